"""What the controller sees of a live cluster: the routers' sums since their start become arrivals of an interval. Pure.

Each router answers with its own sums. A lost answer loses nothing, because the next one has the sums too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Role
from router.scaling.interface import (
    LONGEST_CHANGE_S,
    NONE,
    Change,
    ChangeKind,
    Interval,
    Observed,
    ScalingSettings,
    Size,
    of_role,
)

SHOWN: Final = 4  # workers in a reason
_SUMS: Final = tuple(name for name in Interval.__slots__ if name not in ("begin_s", "end_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCapacity:
    """A worker, as a router sees it."""

    worker_id: str
    role: Role
    is_connected: bool
    is_draining: bool
    is_drained: bool  # by an operator, or by the launcher before its end
    rows: int  # sequences in its batch
    kv_tokens: int
    max_batch: int
    max_batch_tokens: int
    cost: CostPrior

    @property
    def is_ready(self) -> bool:
        return self.is_connected and not (self.is_draining or self.is_drained)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDemand:
    """The answer of one router."""

    incarnation: str
    sums: Interval  # since its start
    queued: int
    running: int
    answers: int  # that have begun and not ended
    answer_tokens: int  # of these, so far
    workers: tuple[WorkerCapacity, ...]


@final
class DemandHistory:
    """The last answer of each router."""

    def __init__(self) -> None:
        self._last: dict[str, RouterDemand] = {}
        self._as_of_s: float | None = None

    def interval(self, answers: Mapping[str, RouterDemand], now_s: float) -> Interval | None:
        """What arrived since the last call, at all routers together; None the first time, and if no time has passed.
        `answers` by the routers' names, of all of them."""
        parts = [_since(self._last.get(name), one) for name, one in answers.items()]
        began_s, self._last, self._as_of_s = self._as_of_s, dict(answers), now_s
        return together(parts, began_s, now_s) if began_s is not None and now_s > began_s else None


def _since(before: RouterDemand | None, now: RouterDemand) -> Interval:
    """A router that has started again counts from zero. One that was not asked before adds nothing yet."""
    if before is None:
        return together((), now.sums.begin_s, now.sums.end_s)
    if before.incarnation != now.incarnation:
        return now.sums
    changes = {name: getattr(now.sums, name) - getattr(before.sums, name) for name in _SUMS}
    return Interval(begin_s=before.sums.end_s, end_s=now.sums.end_s, **changes)


def together(parts: Iterable[Interval], begin_s: float, end_s: float) -> Interval:
    """The same time at several routers."""
    held = list(parts)
    return Interval(begin_s=begin_s, end_s=end_s, **{name: sum(getattr(one, name) for one in held) for name in _SUMS})


def mean_cost(costs: Sequence[CostPrior]) -> CostPrior | None:
    if not costs:
        return None
    names = CostPrior.__slots__
    return CostPrior(**{name: sum(getattr(one, name) for one in costs) / len(costs) for name in names})


def observe(
    interval: Interval,
    answers: Iterable[RouterDemand],
    *,
    starting: Size = NONE,
    draining: Size = NONE,
    busy_because: str = "",
    failed: Change | None = None,
    settings: ScalingSettings | None = None,
) -> Observed:
    """A worker is ready if it is at each router."""
    held = list(answers)
    views = [one for answer in held for one in answer.workers if one.is_connected]
    ready = ready_workers(held)
    decodes = [one for one in views if one.role is Role.DECODE]
    prefills = [one for one in views if one.role is Role.PREFILL] or decodes
    begun = sum(one.answers for one in held)
    found = Observed(
        interval=interval,
        ready=Size(*(sum(one is role for one in ready.values()) for role in (Role.PREFILL, Role.DECODE))),
        starting=starting,
        draining=draining,
        queued=sum(one.queued for one in held),
        running=sum(one.running for one in held),
        tokens_so_far=sum(one.answer_tokens for one in held) / begun if begun else 0.0,
        decode_rows=sum(one.rows for one in decodes) / len(decodes) if decodes else 0.0,
        busy_because=busy_because,
        failed=failed,
        settings=settings,
    )
    if decodes:
        found = replace(
            found,
            cost=_cost(views, decodes),
            kv_tokens=sum(one.kv_tokens for one in decodes) // len(decodes),
            max_batch=sum(one.max_batch for one in decodes) // len(decodes),
            max_batch_tokens=sum(one.max_batch_tokens for one in prefills) // len(prefills),
        )
    return found


def _cost(workers: Sequence[WorkerCapacity], decodes: Sequence[WorkerCapacity]) -> CostPrior:
    """Prefill workers never decode, and know no cost of it."""
    whole, decode = mean_cost([one.cost for one in workers]), mean_cost([one.cost for one in decodes])
    assert whole is not None
    assert decode is not None
    return replace(
        whole,
        decode_base_s=decode.decode_base_s,
        decode_per_row_s=decode.decode_per_row_s,
        decode_per_context_token_s=decode.decode_per_context_token_s,
    )


def ready_workers(answers: Sequence[RouterDemand]) -> dict[str, Role]:
    """That take new requests at each router."""
    found: dict[str, Role] = {}
    for number, answer in enumerate(answers):
        ready = {one.worker_id: one.role for one in answer.workers if one.is_ready}
        found = ready if number == 0 else {name: role for name, role in found.items() if ready.get(name) is role}
    return found


def why_unsettled(answers: Sequence[RouterDemand], expected: Collection[str]) -> str:
    """What runs that the controller must not disturb: a worker that should be there is not ready. Empty: nothing."""
    missing = expected - ready_workers(answers).keys()
    if not missing:
        return ""
    drained = {one.worker_id for answer in answers for one in answer.workers if one.is_drained and one.is_connected}
    if missing <= drained:
        return f"drain of {_names(missing)} by an operator"
    return f"recovery of {_names(missing - drained)}"


def _names(workers: Collection[str]) -> str:
    more = f" and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
    return ", ".join(sorted(workers)[:SHOWN]) + more


def measured(settings: ScalingSettings, change: Change, took_s: float) -> ScalingSettings:
    """With the times after a change of that duration, which counts for half. A worker's share of a drain or of a change
    of role counts, because they are made one after another."""

    def mean(name: str, now_s: float) -> ScalingSettings:
        mean_s = 0.5 * (getattr(settings, name) + now_s)
        return replace(settings, **{name: min(max(mean_s, 0.0), LONGEST_CHANGE_S)})

    match change.kind:
        case ChangeKind.START:
            return mean("start_s", took_s)
        case ChangeKind.STOP:
            return mean("drain_s", took_s / change.count)
        case ChangeKind.CHANGE_ROLE:
            return mean("change_role_s", max(took_s / change.count - settings.drain_s, 0.0))


def under_way(change: Change | None) -> tuple[Size, Size]:
    """The workers that start and those that drain while `change` is made."""
    if change is None:
        return NONE, NONE
    count = of_role(change.role, change.count)
    return (NONE, count) if change.kind is ChangeKind.STOP else (count, NONE)
