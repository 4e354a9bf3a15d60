"""Joins the token rows of one call by attempt, and puts them into one message for each router. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pdserve.core.effects import PlainSampled
from pdserve.core.protocol import TokenRow
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import TOKEN_ROW
from pdserve.worker import messages


def join_rows(rows: Iterable[TokenRow]) -> list[TokenRow]:
    """Joins the rows of each attempt. With accepted drafts, a step yields several tokens."""
    joined: list[TokenRow] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last is None or last.key != row.key:
            joined.append(replace(row))
            continue
        last.tokens += row.tokens
        last.finish = row.finish
        last.decode_s += row.decode_s
        last.preemptions += row.preemptions
    return joined


def responses_by_router(
    rows: Iterable[TokenRow], plain: Iterable[PlainSampled]
) -> dict[int, worker_pb2.AttachResponse]:
    """One message for each router, by the number of its stream."""
    by_router: dict[int, worker_pb2.AttachResponse] = {}
    for columns in plain:
        for router, tokens in messages.plain_tokens(columns):
            by_router[router] = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=tokens))
    for row in rows:
        response = by_router.setdefault(row.key.router, worker_pb2.AttachResponse())
        response.tokens.rows.append(TOKEN_ROW.encode(row))
    return by_router
