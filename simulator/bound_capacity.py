"""The work that the workers of a cluster can do in a period, at most. Pure.

Work is counted in seconds of a worker of slowness 1, so a worker of slowness s does 1 / s per second. Faults
reduce it:

    DIE     nothing until the successor connects
    STALL   nothing; a step that has begun goes on, for at most the longest step
    SLOW    1 / factor; steps that have begun keep their speed, for at most the longest step
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, final

from simulator.model import SimConfig, WorkerFault, WorkerFaultKind, WorkerShape
from simulator.speed import LEAST_FACTOR

NOISE_SIGMAS: Final = 6.0  # a normal value is further below its mean with a probability of 1e-9


@final
class CumulativeCapacity:
    """The work that some workers can do by a time, from time 0 on."""

    def __init__(self, workers: Iterable[Sequence[tuple[float, float]]]) -> None:
        """`workers`: for each its work per second from each time on, as (time, work per second)."""
        changes: dict[float, float] = {0.0: 0.0}
        for steps in workers:
            before = 0.0
            for at_s, rate in steps:
                changes[at_s] = changes.get(at_s, 0.0) + rate - before
                before = rate
        self._times = sorted(changes)
        self._rates = [max(0.0, rate) for rate in accumulate(changes[at_s] for at_s in self._times)]
        lasts = zip(self._times, self._times[1:], self._rates, strict=False)
        self._done = [0.0, *accumulate((end_s - at_s) * rate for at_s, end_s, rate in lasts)]

    def until(self, at_s: float) -> float:
        """The work between 0 and `at_s`."""
        index = max(0, bisect_right(self._times, at_s) - 1)
        return self._done[index] + max(0.0, at_s - self._times[index]) * self._rates[index]


def capacity(config: SimConfig, shapes: Iterable[WorkerShape], longest_step: float) -> CumulativeCapacity:
    """Of these workers. `longest_step`: the work of the longest possible step."""
    return CumulativeCapacity(_rates(config, shape, longest_step) for shape in shapes)


def least_slowness(config: SimConfig, shape: WorkerShape) -> float:
    """The least real time per unit of work that this worker ever takes."""
    slowness = shape.slowness * noise_factor(config)
    for one in _of(config, shape, WorkerFaultKind.SLOW):
        slowness *= min(1.0, one.factor)
    return slowness


def noise_factor(config: SimConfig) -> float:
    """The smallest factor by which noise changes a step's time, NOISE_SIGMAS below the mean."""
    return max(LEAST_FACTOR, 1.0 - NOISE_SIGMAS * config.noise) if config.noise else 1.0


def _rates(config: SimConfig, shape: WorkerShape, longest_step: float) -> list[tuple[float, float]]:
    slows = _of(config, shape, WorkerFaultKind.SLOW)
    deaths = _deaths(config, shape)
    jitter = 1.0 + NOISE_SIGMAS * config.noise
    longest_s = longest_step * shape.slowness * jitter * math.prod(max(1.0, one.factor) for one in slows)
    stops = deaths + [
        (one.at_s + longest_s, min([one.at_s + one.for_s, *(at_s for at_s, _ in deaths if at_s >= one.at_s)]))
        for one in _of(config, shape, WorkerFaultKind.STALL)
        if not any(begin_s <= one.at_s <= end_s for begin_s, end_s in deaths)
    ]
    # Steps that began before the fault are not slowed; steps that began during it are, even if they end after it.
    factors = [
        (one.at_s + longest_s / one.factor, one.at_s + one.for_s)
        if one.factor >= 1.0
        else (one.at_s, one.at_s + one.for_s + longest_s)
        for one in slows
    ]
    times = sorted({0.0, *(at_s for pair in (*stops, *factors) for at_s in pair if at_s < math.inf)})
    rates = []
    for at_s in times:
        rate = 1.0 / (shape.slowness * noise_factor(config))
        for one, (begin_s, end_s) in zip(slows, factors, strict=True):
            if begin_s <= at_s < end_s:
                rate /= one.factor
        rates.append((at_s, 0.0 if any(begin_s <= at_s < end_s for begin_s, end_s in stops) else rate))
    return rates


def _deaths(config: SimConfig, shape: WorkerShape) -> list[tuple[float, float]]:
    """The periods without a worker. A dead worker does not die again."""
    periods: list[tuple[float, float]] = []
    for one in _of(config, shape, WorkerFaultKind.DIE):
        if not periods or one.at_s > periods[-1][1]:
            periods.append((one.at_s, one.at_s + one.for_s))
    return periods


def _of(config: SimConfig, shape: WorkerShape, kind: WorkerFaultKind) -> list[WorkerFault]:
    found = [one for one in config.faults if one.worker_id == shape.worker_id and one.kind is kind]
    return sorted(found, key=lambda one: one.at_s)
