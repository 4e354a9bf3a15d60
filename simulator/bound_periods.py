"""The fewest requests that must be late because of the work in some periods. Pure.

In the period from a to b the workers do at most C(a, b) work. Of the requests whose work must be done within it, the
most that can be served are those with the least work, as many as fit (the knapsack problem with equal values). The
others of that period are late. Periods that do not overlap have different requests, so their numbers add up, and
dynamic programming finds the periods with the largest sum:

    late(b) = max over a < b of late(a) + late in the period (a, b)        O(periods^2 * requests)

Work conservation in all intervals is what decides whether preemptive jobs can be scheduled (W. Horn, Naval Research
Logistics Quarterly 21, 1974).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from simulator.bound_deadlines import ROUNDING


class PeriodDemand(NamedTuple):
    """Work of a request between its release and two times: some is due at the first, the rest at the last."""

    release_s: float
    first_due_s: float
    last_due_s: float
    first: float
    rest: float


def late_in_periods(
    edges: Sequence[float],
    candidates: Iterable[tuple[Sequence[PeriodDemand], Callable[[float], float]]],
) -> int:
    """`edges`: where periods may begin and end, in order. Each candidate is a way to measure work, with the capacity
    until a time. All of them are valid, so the best one is used for each period."""
    count = len(edges) - 1
    late = [[0] * (count + 1) for _ in range(count)]
    for demands, until in candidates:
        done = [until(edge) for edge in edges]
        for begin, row in enumerate(_late(edges, demands, done)):
            late[begin] = [max(pair) for pair in zip(late[begin], row, strict=True)]
    best = [0] * (count + 1)
    for end in range(1, count + 1):
        best[end] = max(best[begin] + late[begin][end] for begin in range(end))
    return best[count]


def most_that_fit(work: Iterable[float], capacity: float) -> int:
    return bisect_right(list(accumulate(sorted(work))), capacity * (1.0 + ROUNDING))


def _late(edges: Sequence[float], demands: Sequence[PeriodDemand], done: Sequence[float]) -> list[list[int]]:
    """[begin][end] in indices of edges."""
    count = len(edges) - 1
    placed = sorted(
        (
            one.first + one.rest,
            one.first,
            bisect_right(edges, one.release_s) - 1,
            bisect_left(edges, one.first_due_s),
            bisect_left(edges, one.last_due_s),
        )
        for one in demands
    )
    due = [[0.0] * (count + 1) for _ in range(count)]  # of requests released in the period that begins there
    for total, first, start, first_end, last in placed:
        due[start][first_end] += first
        due[start][last] += total - first
    found = [[0] * (count + 1) for _ in range(count)]
    by_end = [0.0] * (count + 1)
    for begin in reversed(range(count)):
        by_end = [sum(pair) for pair in zip(by_end, due[begin], strict=True)]
        full = [end for end, work in enumerate(accumulate(by_end)) if end > begin and work > done[end] - done[begin]]
        here = [one for one in placed if one[2] >= begin] if full else []
        for end in full:
            work = [total if last <= end else first for total, first, _, first_end, last in here if first_end <= end]
            found[begin][end] = len(work) - most_that_fit(work, done[end] - done[begin])
    return found
