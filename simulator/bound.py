"""An upper bound on the requests that any scheduler could serve within their targets, on a trace and a cluster. Pure.

`upper_bound` knows the whole trace in advance and solves relaxations of the scheduling problem: whatever is served in
time also meets their constraints. The bound is the least of

    alone      the requests that an idle cluster with the best prefix cache could serve in time
    deadlines  of those, the prompts that one machine with the speed of all workers computes by their deadlines
               (simulator.bound_deadlines: Moore and Hodgson; Kise, Ibaraki and Mine)
    periods    of those, the requests whose prompts and answers fit into the workers' time, in every period
               (simulator.bound_periods), for several ways to count the work (`_measures`)

The work of a request is the least that it can take (simulator.bound_work, simulator.bound_decode), and the workers'
time excludes the effects of faults (simulator.bound_capacity).

Prefill workers compute prompts; decode workers decode, and compute prompts too. Let the prompts that are counted take F
seconds of work, and their answers G. If decode workers compute the part L of F beside the rows that hide `hidden` of
their weights' reading, L takes them (1 - hidden) * L, attention aside. So

    G(hidden) + (1 - hidden) * L <= time of the decode workers        F - L <= time of the prefill workers

which gives  G + (1 - hidden) * F <= decode + (1 - hidden) * prefill  for each `hidden` from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pdserve.core.types import Role
from simulator.bound_capacity import CumulativeCapacity, capacity
from simulator.bound_deadlines import DeadlineJob, most_in_time
from simulator.bound_decode import decode_work, limits
from simulator.bound_periods import PeriodDemand, late_in_periods
from simulator.bound_work import Costs, Work, costs, least_work
from simulator.model import SimConfig, Trace, TraceRequest

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
    """The policy and the router's settings in `config` do not matter, except `max_attempts`.

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
