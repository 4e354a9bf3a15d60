"""An upper bound on the requests that any scheduler could serve within their targets, on a trace and a cluster. Pure.

`upper_bound` knows the whole trace in advance and solves relaxations of the scheduling problem: whatever is served in
time also meets their constraints. The bound is the least of

    alone      the requests that an idle cluster with the best prefix cache could serve in time
    deadlines  of those, the prompts that one machine with the speed of all workers computes by their deadlines
               (most_in_time: Moore and Hodgson; Kise, Ibaraki and Mine)
    periods    of those, the requests whose prompts and answers fit into the workers' time, in every period
               (late_in_periods), for several ways to count the work (`_measures`)

simulator/search/bound_work.py computes the least work that a request can take, and the time that workers have despite
faults.

Prefill workers compute prompts; decode workers decode, and compute prompts too. Let the prompts that are counted take F
seconds of work, and their answers G. If decode workers compute the part L of F beside the rows that hide `hidden` of
their weights' reading, L takes them (1 - hidden) * L, attention aside. So

    G(hidden) + (1 - hidden) * L <= time of the decode workers        F - L <= time of the prefill workers

which gives  G + (1 - hidden) * F <= decode + (1 - hidden) * prefill  for each `hidden` from 0 to 1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

from pdserve.core.types import Role
from simulator.model import SimConfig, Trace, TraceRequest
from simulator.search.bound_work import (
    Costs,
    CumulativeCapacity,
    Work,
    capacity,
    costs,
    decode_work,
    least_work,
    limits,
)

# --- jobs that meet their deadlines ---------------------------------------------------------------------------
# The most jobs that one machine can finish by their deadlines.
#
# Source: M. Moore, Management Science 15 (1968), for equal release times; H. Kise, T. Ibaraki and H. Mine, Operations
# Research 26 (1978), for release times whose order is that of the deadlines (agreeable); Lawler, Annals of Operations
# Research 26 (1990), treats all release times with preemption, in O(n^5).
#
# Jobs are added in order of their deadlines. If the last one would be late, the job is removed without which the others
# end earliest. With agreeable deadlines no order is better than that of the deadlines, and preemption does not help.

# Jobs that are considered together. The sum over groups of jobs is a bound too, because each group has the machine for
# itself; so the time is in proportion to the number of jobs.
GROUP: Final = 1000
ROUNDING: Final = 1e-9  # relative, in favour of the jobs


class DeadlineJob(NamedTuple):
    release: float
    deadline: float
    work: float


def most_in_time(jobs: Iterable[DeadlineJob]) -> int:
    """At least the number of jobs that can be finished in time, and exactly it for agreeable deadlines in one group.

    Deadlines that are not agreeable are extended until they are.
    """
    ordered = sorted(jobs)
    return sum(_most(ordered[at : at + GROUP]) for at in range(0, len(ordered), GROUP))


def _most(jobs: list[DeadlineJob]) -> int:
    kept: list[DeadlineJob] = []
    starts: list[float] = []  # of `kept`
    end = deadline = 0.0
    for job in jobs:
        deadline = max(deadline, job.deadline)
        before = end
        kept.append(job)
        starts.append(max(end, job.release))
        end = starts[-1] + job.work
        if end <= deadline + ROUNDING * abs(deadline):
            continue
        index = _cheapest(kept, starts, end, before)
        del kept[index], starts[index]
        end = before
        if index < len(kept):
            end = starts[index - 1] + kept[index - 1].work if index else 0.0
            for later in range(index, len(kept)):
                starts[later] = max(end, kept[later].release)
                end = starts[later] + kept[later].work
    return len(kept)


def _cheapest(kept: list[DeadlineJob], starts: list[float], end: float, before: float) -> int:
    """The job without which the others end earliest.

    Without job j the later ones start earlier by its work, but none before its release.
    """
    last = len(kept) - 1
    found, gain = last, end - before
    slack = starts[last] - kept[last].release
    for index in range(last - 1, -1, -1):
        if slack <= gain:
            break
        if min(kept[index].work, slack) > gain:
            found, gain = index, min(kept[index].work, slack)
        slack = min(slack, starts[index] - kept[index].release)
    return found


# --- late requests of periods ---------------------------------------------------------------------------------
# The fewest requests that must be late because of the work in some periods.
#
# In the period from a to b the workers do at most C(a, b) work. Of the requests whose work must be done within it, the
# most that can be served are those with the least work, as many as fit (the knapsack problem with equal values). The
# others of that period are late. Periods that do not overlap have different requests, so their numbers add up, and
# dynamic programming finds the periods with the largest sum:
#
#     late(b) = max over a < b of late(a) + late in the period (a, b)        O(periods^2 * requests)
#
# Work conservation in all intervals is what decides whether preemptive jobs can be scheduled (W. Horn, Naval Research
# Logistics Quarterly 21, 1974).


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


# --- least of the bounds --------------------------------------------------------------------------------------

HIDDEN: Final = (0.0, 0.5, 1.0)  # shares of the weights' reading that decode rows pay
PERIODS: Final = 24  # into which the arrivals are divided
GROWTH: Final = 1.2  # of the periods after the last arrival
# Shares of the computing time at which the work of each request is known, and the bound by deadlines.
_WORK_ENDS: Final = 0.25
_DEADLINES_END: Final = 0.35
_EVERY: Final = 256  # requests between two reports of progress
OnShare = Callable[[float], None]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Numbers of requests."""

    requests: int
    alone: int
    deadlines: int
    periods: int

    @property
    def most(self) -> int:
        """The bound: no scheduler serves more requests within their targets."""
        return min(self.alone, self.deadlines, self.periods)

    @property
    def limit(self) -> str:
        """The relaxation with the lowest number."""
        found = {"alone": self.alone, "deadlines": self.deadlines, "periods": self.periods}
        return min(found, key=lambda one: found[one])

    def share(self, met: int) -> float:
        """The share of the bound that `met` is; 1 if nothing can be served."""
        return met / self.most if self.most else 1.0


def upper_bound(trace: Trace, config: SimConfig, on_share: OnShare = lambda share: None) -> Bound:
    """The policy and the router's settings in `config` do not matter.

    With noise, each step is assumed to be faster than its mean by bound_capacity.NOISE_SIGMAS standard deviations.
    `on_share` receives the share of the computation that is done: 0 after the trace was read.
    """
    requests = list(trace)
    shapes = [[shape for shape in config.workers if shape.role is role] for role in (Role.PREFILL, Role.DECODE)]
    prefill, decode = (costs(config, found) if found else None for found in shapes)
    assert decode is not None, "checked by SimConfig"
    counted = _counted(requests, on_share, 0.0, _WORK_ENDS)
    works = least_work(counted, trace.block_tokens, config, prefill, decode)
    if not works:
        return Bound(requests=len(requests), alone=0, deadlines=0, periods=0)
    longest = max(_longest_step(costs(config, [shape]), requests) for shape in config.workers)
    cluster = _ClusterCosts(prefill, decode, *(capacity(config, found, longest) for found in shapes))
    return Bound(
        requests=len(requests),
        alone=len(works),
        deadlines=_by_deadlines(_counted(works, on_share, _WORK_ENDS, _DEADLINES_END), cluster),
        periods=len(works) - late_in_periods(_edges(works), _measures(works, cluster, on_share)),
    )


@dataclass(frozen=True, slots=True)
class _ClusterCosts:
    prefill: Costs | None
    decode: Costs
    prefill_time: CumulativeCapacity
    decode_time: CumulativeCapacity

    def weight(self, hidden: float) -> float:
        """The value of a prefill worker's second in those of a decode worker."""
        if self.prefill is None:
            return 0.0
        ratio = self.decode.per_token / self.prefill.per_token if self.prefill.per_token else 1.0
        return (1.0 - hidden) * ratio

    def until(self, hidden: float) -> Callable[[float], float]:
        weight = self.weight(hidden)
        return lambda at_s: self.decode_time.until(at_s) + weight * self.prefill_time.until(at_s)

    def prompt_work(self, work: Work, hidden: float) -> float:
        """In seconds of a decode worker."""
        here = self.decode.prompt_work(work.prompt, hidden)
        if self.prefill is None:
            return here
        return min(here, self.weight(hidden) * self.prefill.prompt_work(work.prompt, can_decode=False))


def _counted(items: Sequence[Item], on_share: OnShare, begin: float, end: float) -> Iterator[Item]:
    for number, one in enumerate(items):
        if not number % _EVERY:
            on_share(begin + (end - begin) * number / len(items))
        yield one


def _by_deadlines(works: Iterable[Work], cluster: _ClusterCosts) -> int:
    """Time is measured by the work that the cluster does, so that its speed is 1."""
    until = cluster.until(0.0)
    return most_in_time(
        DeadlineJob(until(one.release_s), until(one.first_due_s), cluster.prompt_work(one, 0.0)) for one in works
    )


def _measures(
    works: Sequence[Work], cluster: _ClusterCosts, on_share: OnShare
) -> Iterator[tuple[list[PeriodDemand], Callable[[float], float]]]:
    measures = limits(works, HIDDEN)
    each = (1.0 - _DEADLINES_END) / len(measures)
    for number, limit in enumerate(measures):
        begin = _DEADLINES_END + each * number
        demands = [
            PeriodDemand(
                one.release_s,
                one.first_due_s,
                one.last_due_s,
                cluster.prompt_work(one, limit.hidden),
                decode_work(one, cluster.decode, limit),
            )
            for one in _counted(works, on_share, begin, begin + each)
        ]
        yield demands, cluster.until(limit.hidden)


def _edges(works: Sequence[Work]) -> list[float]:
    """Where periods may begin and end: PERIODS equal parts of the arrivals, and parts that grow after them.

    Neither targets nor capacity move an edge but the last one, so more of either never lowers the bound.
    """
    first_s, last_s = works[0].release_s, works[-1].release_s
    end_s = max(one.last_due_s for one in works)
    part_s = (last_s - first_s) / PERIODS
    inner = [first_s + part_s * index for index in range(1, PERIODS + 1)]
    while part_s > 0.0 and inner[-1] < end_s:
        part_s *= GROWTH
        inner.append(inner[-1] + part_s)
    return [first_s, *(edge for edge in inner if first_s < edge < end_s), end_s]


def _longest_step(one: Costs, requests: Sequence[TraceRequest]) -> float:
    """No step takes more work, whatever it consists of."""
    context = min(one.max_context, max(each.prompt_tokens + each.output_tokens for each in requests))
    return (
        max(one.weights, one.base + one.per_token * one.max_tokens)
        + one.max_rows * (one.per_row + one.per_context_token * context)
        + one.per_token_context * one.max_tokens * context
    )
