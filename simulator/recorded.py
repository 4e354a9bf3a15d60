"""A recording of a live router, read as a trace. Pure: reads lines, opens nothing.

Requests have their recorded arrivals and sampled lengths. So a simulation of the recorded cluster (recorded_cluster.py)
reproduces the run, and one of another cluster or policy shows how that would have performed. An unknown length
(rejected, failed, still running at the end) is replaced by the mean of the complete answers before it, at most the
requested length. If a client disconnected, the length is the requested one, and the client disconnects again.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from router import replay
from router.commands import EmitTokens, EndCancelled, FailRequest, FinishRequest
from router.events import ClientLeft, RequestArrived, WorkerConnected
from router.settings import RouterSettings
from simulator.model import TraceRequest
from simulator.trace_rows import NumberedLine, TraceError

_KINDS: Final = (WorkerConnected, RequestArrived, ClientLeft, EmitTokens, FinishRequest, FailRequest, EndCancelled)
ID_BYTES: Final = 7  # enough to distinguish blocks, and a number below 2**63


def is_recording(first_line: str) -> bool:
    try:
        row = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "settings" in row


def block_tokens(lines: Iterable[NumberedLine], name: str) -> int:
    """Tokens per block id of a request; 0 if no worker connected."""
    _, rows = steps(lines, name, (WorkerConnected,))
    return next((item.block_size for _, items in rows for item in items), 0)


@dataclass(slots=True)
class _Seen:
    """One request while the recording is read."""

    number: int
    facts: RequestArrived
    arrival_s: float
    sampled: int = 0
    left_after_s: float | None = None
    is_over: bool = False
    is_complete: bool = False


def read_recording(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Yields requests in order of arrival; holds only running requests and those that wait behind them. Raises
    TraceError at the first invalid line."""
    waiting: deque[_Seen] = deque()
    known: dict[str, _Seen] = {}
    lengths = _Lengths()
    first_s: float | None = None
    number = block_size = 0
    _, rows = steps(lines, name, _KINDS)
    for now_s, items in rows:
        for item in items:
            if isinstance(item, WorkerConnected):
                block_size = block_size or item.block_size
                continue
            if isinstance(item, RequestArrived):
                if item.request_id in known:
                    continue  # its id was in use: the router dropped it
                first_s = now_s if first_s is None else first_s
                number += 1
                seen = known[item.request_id] = _Seen(number, item, now_s - first_s)
                waiting.append(seen)
                continue
            found = known.get(item.request_id)
            if found is None:
                continue  # an answer after its end
            match item:
                case EmitTokens():
                    found.sampled = item.first_index + len(item.tokens)
                case ClientLeft():
                    found.left_after_s = now_s - (first_s or 0.0) - found.arrival_s
                case _:
                    found.is_over, found.is_complete = True, isinstance(item, FinishRequest)
                    del known[item.request_id]
        while waiting and waiting[0].is_over:
            yield _request(waiting.popleft(), lengths, block_size)
    for seen in waiting:
        yield _request(seen, lengths, block_size)


class _Lengths:
    """Mean length of the complete answers so far."""

    def __init__(self) -> None:
        self._sum = self._count = 0

    def add(self, tokens: int) -> None:
        self._sum, self._count = self._sum + tokens, self._count + 1

    def mean(self, most: int) -> int:
        return min(round(self._sum / self._count), most) if self._count else most


def _request(seen: _Seen, lengths: _Lengths, block_size: int) -> TraceRequest:
    facts, most = seen.facts, seen.facts.sampling.max_tokens
    if seen.is_complete:
        output = seen.sampled
        lengths.add(output)
    elif seen.left_after_s is not None:
        output = most
    else:
        output = max(lengths.mean(most), seen.sampled)
    # Hashed again, because content hashes of a simulated router are no real hashes and differ in any of their bytes.
    blocks = [int.from_bytes(blake2b(one, digest_size=ID_BYTES).digest()) for one in facts.block_hashes]
    if blocks and len(blocks) * block_size < facts.num_prompt_tokens:
        blocks.append(seen.number)  # only full blocks are hashed; the rest is not shared
    return TraceRequest(
        arrival_s=seen.arrival_s,
        prompt_tokens=facts.num_prompt_tokens,
        output_tokens=max(output, 1),
        block_ids=tuple(blocks),
        tenant=facts.tenant,
        priority=facts.priority,
        slo=facts.slo,
        cancel_after_s=None if seen.is_complete else seen.left_after_s,
        max_tokens=most,
    )


# -- lines -------------------------------------------------------------------------------------------------------


def steps(
    lines: Iterable[NumberedLine], name: str, kinds: tuple[type, ...]
) -> tuple[RouterSettings, Iterator[tuple[float, list[Any]]]]:
    """(the router's settings, (time, the event, the commands of `kinds`) of each step).

    Other kinds are not decoded, for speed. An invalid last line is ignored, because it was truncated when the router
    died. Raises TraceError: this function for the first line, the iterator for the others.
    """
    rows = iter(lines)
    line, text = next(rows, (1, ""))
    try:
        settings = replay.read_settings(text)
    except replay.RecordingError as error:
        raise TraceError(name, line, "settings", text, error.expected) from None
    return settings, _steps(rows, name, {kind.__name__ for kind in kinds})


def _steps(rows: Iterator[NumberedLine], name: str, wanted: set[str]) -> Iterator[tuple[float, list[Any]]]:
    last_s = -math.inf
    for line, text in rows:
        try:
            row = json.loads(text)
            now_s = float(row["now_s"])
            found = [replay.decode(one) for one in (row["event"], *row["commands"]) if one["is"] in wanted]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if next(rows, None) is None:
                return
            raise TraceError(name, line, "step", text, f"an event and its commands ({error})") from None
        if not last_s <= now_s < math.inf:
            raise TraceError(name, line, "now_s", now_s, "no earlier than the line before")
        last_s = now_s
        yield now_s, found
