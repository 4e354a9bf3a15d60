"""Builds the messages of worker.proto that no codec covers. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, Final

from pdserve.core import effects as fx
from pdserve.core.blocks import CacheChange
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.wire.convert import logprobs_to_proto

MAX_SCORED: Final = 16_384  # logprobs in one message: some 200 kB


def prompt_scored(effect: fx.PromptScored) -> Iterator[worker_pb2.PromptScored]:
    """As many messages as keep each far below any limit on message size."""
    width = 1 + max(len(token.top) for token in effect.tokens)
    size = max(1, MAX_SCORED // width)
    for first in range(0, len(effect.tokens), size):
        scores = inference_pb2.PromptLogprobs(
            first_position=effect.first_position + first,
            tokens=[logprobs_to_proto(token) for token in effect.tokens[first : first + size]],
        )
        yield worker_pb2.PromptScored(request_id=effect.key.request_id, attempt=effect.key.attempt, scores=scores)


def plain_tokens(effect: fx.PlainSampled) -> Iterator[tuple[int, worker_pb2.PlainTokens]]:
    """One message for each router, by the number of its stream."""
    routers, request_ids, attempts = zip(*effect.keys, strict=True)
    columns: list[Sequence[Any]] = [request_ids, attempts, effect.output_indexes, effect.token_ids]
    for router in sorted(set(routers)):
        names, numbers, indexes, tokens = columns
        if routers.count(router) < len(routers):
            is_its = [one == router for one in routers]
            names, numbers, indexes, tokens = (list(compress(column, is_its)) for column in columns)
        plain = worker_pb2.PlainTokens(request_ids=names, attempts=numbers, output_indexes=indexes, token_ids=tokens)
        yield router, plain


def kv_events(change: CacheChange) -> worker_pb2.KvEvents:
    return worker_pb2.KvEvents(
        sequence=change.sequence, is_snapshot=change.is_snapshot, stored=change.stored, removed=change.removed
    )
