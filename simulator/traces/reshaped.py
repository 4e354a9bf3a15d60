"""Traces made from other traces. Pure.

Steps change the rate, spread arrivals, cut and join. Each step reads and yields requests in order of arrival, one by
one, so that steps can be chained without holding a trace in memory. Reshaped applies them at each iteration; equal
seeds give equal traces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from typing import final

from pdserve.core.errors import ConfigError
from simulator.model import Trace, TraceRequest

Step = Callable[[Iterable[TraceRequest]], Iterator[TraceRequest]]


@final
class Reshaped:
    """`trace` with `steps` applied in their order."""

    def __init__(self, trace: Trace, *steps: Step, name: str = "") -> None:
        self._trace = trace
        self._steps = steps
        self.name = name or trace.name
        self.block_tokens = trace.block_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        requests = iter(self._trace)
        for step in self._steps:
            requests = step(requests)
        return requests


def rate_scaled(rate_scale: float) -> Step:
    """Multiplies the arrival rate; the requests stay the same."""
    _check("rate_scale", rate_scale, 0.0 < rate_scale < math.inf, "a finite number above 0")
    return lambda requests: (replace(one, arrival_s=one.arrival_s / rate_scale) for one in requests)


def jittered(seed: int, quantum_s: float) -> Step:
    """Spreads each group of equal arrivals uniformly over `quantum_s`, or up to the next group if that is earlier.

    Otherwise a trace with rounded timestamps would send whole groups at once, which the clients did not.
    """
    _check("quantum_s", quantum_s, 0.0 < quantum_s < math.inf, "a finite number above 0")

    def step(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        rng = random.Random(seed)
        group: list[TraceRequest] = []
        for _, members in groupby(requests, key=lambda one: one.arrival_s):
            arrived = list(members)
            if group:
                yield from _spread(group, min(quantum_s, arrived[0].arrival_s - group[0].arrival_s), rng)
            group = arrived
        if group:
            yield from _spread(group, quantum_s, rng)

    return step


def _spread(group: list[TraceRequest], width_s: float, rng: random.Random) -> Iterator[TraceRequest]:
    offsets_s = sorted(rng.random() * width_s for _ in group)
    for one, offset_s in zip(group, offsets_s, strict=True):
        yield replace(one, arrival_s=one.arrival_s + offset_s)


def first(limit: int) -> Step:
    """The first `limit` requests."""
    _check("limit", limit, limit >= 1, "at least 1")
    return lambda requests: islice(requests, limit)


def window(start_s: float, end_s: float) -> Step:
    """The requests that arrive in [start_s, end_s); times are relative to start_s."""
    _check("window", f"[{start_s}, {end_s})", 0.0 <= start_s < end_s, "0 <= start < end")

    def step(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        for one in requests:
            if one.arrival_s >= end_s:
                return
            if one.arrival_s >= start_s:
                yield replace(one, arrival_s=one.arrival_s - start_s, follows=None)  # numbers have changed

    return step


@final
class Joined:
    """`before` until `at_s`, from then on `after` from its beginning: a change of traffic at a known time.

    The two share no prefixes and no sessions: ids of one become even, of the other odd.
    """

    def __init__(self, before: Trace, after: Trace, at_s: float) -> None:
        _check("at_s", at_s, 0.0 <= at_s < math.inf, "a finite number, at least 0")
        sizes = {one.block_tokens for one in (before, after)} - {0}
        if len(sizes) > 1:
            raise ConfigError("block_tokens", " and ".join(map(str, sorted(sizes))), "the same in both traces")
        self._before, self._after, self._at_s = before, after, at_s
        self.name = f"{before.name} then {after.name}"
        self.block_tokens = max(sizes, default=0)

    def __iter__(self) -> Iterator[TraceRequest]:
        for one in self._before:
            if one.arrival_s >= self._at_s:
                break
            yield self._of_one(one, 0, 0.0)
        for one in self._after:
            yield self._of_one(one, 1, self._at_s)

    def _of_one(self, request: TraceRequest, number: int, begin_s: float) -> TraceRequest:
        return replace(
            request,
            arrival_s=request.arrival_s + begin_s,
            block_ids=tuple(2 * held + number for held in request.block_ids),
            session=request.session and f"{number} {request.session}",
            follows=None,
        )


def _check(field: str, seen: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(field, seen, expected)
