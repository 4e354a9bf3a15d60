"""Decides about the number of workers and their roles by predicted goodput. Pure.

Rules, in this order:
1. Nothing changes while a roll-out or a recovery runs, or before arrivals were seen.
2. One change at a time: the next one is decided when the last one is complete and one interval with it was seen. With
   `starts_overlap`, more workers can be started while others start, or drain to end.
3. Of all changes, the one whose best plan costs least is chosen (`plan.py`), if it costs less than keeping the size.
4. A drain that would make requests miss their targets is refused.
5. After a change that failed, changes of its kind wait, each time twice as long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, final

from pdserve.core.types import Role
from router.scaling.demand import ArrivalHistory, foreseen
from router.scaling.interface import (
    Alternative,
    Change,
    ChangeKind,
    Decision,
    Demand,
    Observed,
    Outcome,
    ScalingSettings,
    Size,
    of_role,
)
from router.scaling.plan import Coming, SizePlan, slice_edges_s

SHOWN: Final = 6  # alternatives of a decision
BACKLOG_S: Final = 60.0  # in which queued requests should be served
FIRST_CAPACITY_SHARE: Final = 0.92  # of the closed form; assumed until misses say otherwise
LEAST_CAPACITY_SHARE: Final = 0.6
JUDGED_INTERVALS: Final = 6  # misses are compared with the prediction over this many
FEWEST_JUDGED: Final = 40  # requests
LOST_FACTOR: Final = 0.97  # of the capacity share, each time more requests missed than predicted
REGAINED: Final = 0.002  # each time a nearly full cluster missed no more than predicted
INFORMATIVE_LOAD: Final = 0.8  # a cluster with less load says nothing about its capacity
FIRST_PAUSE_S: Final = 30.0  # after a change that failed; what it lacked, such as a node, is probably still missing
LONGEST_PAUSE_S: Final = 600.0
#: Of equal costs, relative. A start now may have its effect in the same slice of the plan as one at the next decision.
#: It is due then: the next decision would see the same.
ROUNDING: Final = 1e-9


@dataclass(slots=True)
class _Pending:
    change: Change
    size: Size  # after this change and those before it
    decided_s: float
    expected_attainment: float
    expected_rate_rps: float
    left: int  # workers that start or drain
    completed_s: float | None = None  # when the change was complete


@final
class Controller:
    """State: the history of arrivals, the changes that are under way, and the learned share of the capacity."""

    def __init__(self, settings: ScalingSettings, *, starts_overlap: bool = False) -> None:
        """`starts_overlap`: the caller carries out further starts while workers start or drain."""
        self._settings, self._starts_overlap = settings, starts_overlap
        self._edges_s = slice_edges_s(settings.horizon_s)
        self._history = ArrivalHistory()
        self._pending: list[_Pending] = []  # the oldest first
        self._capacity = _CapacityShare()
        self._pauses = _Pauses()

    def decide(self, observed: Observed, now_s: float) -> Decision:
        """Called with consecutive intervals. The caller carries the changes out, and reports their workers as
        `starting` and `draining` from the next call on."""
        self._history.add(observed.interval)
        if observed.settings is not None:
            self._settings = observed.settings
        if observed.failed is not None:
            self._pauses.begin(observed.failed.kind, now_s)
            if failed := next((one for one in self._pending if one.change == observed.failed), None):
                self._pending.remove(failed)
        if observed.busy_because:
            self._capacity.forget()
            return self._kept(observed, now_s, f"nothing changes during a {observed.busy_because}")
        is_ours = self._follow(observed, now_s)
        if observed.starting.total or observed.draining.total:
            self._capacity.forget()
            if not is_ours or not self._may_add:
                names = ", ".join(str(one.change) for one in self._pending) if is_ours else "a change by hand"
                return self._kept(observed, now_s, f"under way: {names}")
        elif self._pending and observed.ready != self._pending[-1].size:
            self._pending.clear()  # a change failed, or the cluster was changed in another way
        outcome = self._next_outcome(observed, now_s)
        if self._pending and not self._may_add:
            return self._kept(observed, now_s, f"the effect is not yet seen: {self._pending[0].change}")
        if observed.ready.total < 1 or observed.ready.decode < 1:
            return self._kept(observed, now_s, "no decode worker is ready")
        demands = self._demands(observed, now_s)
        if not demands:
            return replace(self._kept(observed, now_s, "too few requests were seen"), outcome=outcome)
        every_s = observed.interval.width_s
        plan = SizePlan(
            self._settings,
            observed,
            demands,
            self._edges_s,
            self._capacity.share,
            every_s,
            self._coming(now_s, every_s),
        )
        if not self._pending:
            self._capacity.judge(observed, plan.attainment_now(), plan.load_now())
        return replace(self._chosen(plan, observed, demands, now_s), outcome=outcome)

    # -- changes under way ---------------------------------------------------------------------------------------

    @property
    def _may_add(self) -> bool:
        """Whether workers may be started before the effect of the pending changes was seen."""
        return self._starts_overlap and all(one.change.kind is not ChangeKind.CHANGE_ROLE for one in self._pending)

    def _follow(self, observed: Observed, now_s: float) -> bool:
        """Notes what is complete. False if workers start or drain that this controller did not order."""
        starting = dict(zip(Role, observed.starting, strict=True))
        draining = dict(zip(Role, observed.draining, strict=True))
        for one in reversed(self._pending):  # those that were ordered first are there first
            change, role = one.change, one.change.role
            if change.kind is not ChangeKind.STOP:
                one.left = min(starting[role], change.count)
                starting[role] -= one.left
            if change.kind is not ChangeKind.START:
                drains = role if change.kind is ChangeKind.STOP else role.other
                num_draining = min(draining[drains], change.count)
                draining[drains] -= num_draining
                one.left = num_draining + (one.left if change.kind is ChangeKind.CHANGE_ROLE else 0)
            if one.left == 0 and one.completed_s is None:
                one.completed_s = now_s
        return not any(starting.values()) and not any(draining.values())

    def _next_outcome(self, observed: Observed, now_s: float) -> Outcome | None:
        """Of the oldest change that was complete one interval ago."""
        for one in self._pending:
            if one.completed_s is not None and one.completed_s < now_s:
                self._pending.remove(one)
                self._pauses.forget(one.change.kind)
                return _outcome(one, one.completed_s, observed)
        return None

    def _coming(self, now_s: float, every_s: float) -> list[Coming]:
        start_s = self._settings.start_s
        return [
            Coming(of_role(one.change.role, one.left), max(one.decided_s + start_s - now_s, every_s))
            for one in self._pending
            if one.change.kind is ChangeKind.START and one.left
        ]

    def _demands(self, observed: Observed, now_s: float) -> list[Demand]:
        """One for each slice of the horizon."""
        edges_s = self._edges_s
        if observed.future:
            demands = foreseen(observed.future, edges_s, now_s)
            if len(demands) < len(edges_s) - 1:  # nothing arrives in the first slices
                return []
        elif self._history.has_enough:
            middles_s = [0.5 * (begin + end) for begin, end in pairwise(edges_s)]
            demands = self._history.forecast(middles_s, observed.tokens_so_far)
        else:
            return []
        extra = observed.queued / BACKLOG_S
        return [replace(one, rate_rps=one.rate_rps + extra) if one.at_s < BACKLOG_S else one for one in demands]

    def _chosen(self, plan: SizePlan, observed: Observed, demands: list[Demand], now_s: float) -> Decision:
        # Until the effect of the last changes was seen, only more workers.
        kinds = (ChangeKind.START,) if self._pending else tuple(ChangeKind)
        pauses = self._pauses.left_s(now_s)
        ranked: list[tuple[Alternative, Change | None]] = []
        waiting: list[Alternative] = []
        for one, change in plan.alternatives(kinds):
            left_s = 0.0 if change is None else pauses.get(change.kind, 0.0)
            if left_s:
                waiting.append(one := replace(one, refused=f"such a change failed; again in {left_s:.0f} s"))
            ranked.append((one, change))
        keep = next(one for one, change in ranked if change is None)
        bounds = self._settings
        is_too_large = observed.ready.total > bounds.max_workers
        allowed = [
            (one, change)
            for one, change in ranked
            if not one.refused or (is_too_large and change is not None and one not in waiting)
        ]
        best, change = allowed[0]
        if change is None:
            due_s = keep.cost_s * (1.0 + ROUNDING)
            starts = [pair for pair in allowed if pair[1] is not None and pair[1].kind is ChangeKind.START]
            best, change = next((pair for pair in starts if pair[0].cost_s <= due_s), (keep, None))
        if change is None:
            reason = "no change costs less than keeping the size"
            if waiting and waiting[0].cost_s < keep.cost_s:
                reason = f"{waiting[0].change} would cost less than keeping the size, but {waiting[0].refused}"
        else:
            saved_s = keep.cost_s - best.cost_s
            reason = f"saves {saved_s:.0f} worker-seconds, with misses and changes, in {bounds.horizon_s:.0f} s"
            if saved_s < keep.cost_s * ROUNDING:
                reason = "costs as much as at the next decision"
            self._pending.append(_Pending(change, best.size, now_s, best.attainment, demands[0].rate_rps, change.count))
        return Decision(
            at_s=now_s,
            changes=(change,) if change is not None else (),
            reason=reason,
            size=observed.ready,
            demand=(demands[0], demands[-1]),
            alternatives=_shown([one for one, _ in ranked], best, keep),
            capacity_share=self._capacity.share,
        )

    def _kept(self, observed: Observed, now_s: float, reason: str) -> Decision:
        return Decision(at_s=now_s, reason=reason, size=observed.ready, capacity_share=self._capacity.share)


def _shown(ranked: list[Alternative], best: Alternative, keep: Alternative) -> tuple[Alternative, ...]:
    """The cheapest ones, always with the chosen one and `keep`."""
    must = [best] if best is keep else [best, keep]
    rest = [one for one in ranked if one not in must][: SHOWN - len(must)]
    return tuple(sorted([*must, *rest], key=lambda one: one.cost_s))


def _outcome(pending: _Pending, completed_s: float, observed: Observed) -> Outcome:
    interval = observed.interval
    ended = interval.met + interval.missed
    return Outcome(
        decided_s=pending.decided_s,
        change=str(pending.change),
        expected_attainment=pending.expected_attainment,
        seen_attainment=interval.met / ended if ended else None,
        expected_rate_rps=pending.expected_rate_rps,
        seen_rate_rps=interval.requests / interval.width_s,
        took_s=completed_s - pending.decided_s,
    )


# --- changes that failed --------------------------------------------------------------------------------------


@final
class _Pauses:
    """Of each kind of change: a cluster that gets no node for a start can still stop workers or change roles."""

    def __init__(self) -> None:
        self._lengths_s: dict[ChangeKind, float] = {}
        self._ends_s: dict[ChangeKind, float] = {}

    def begin(self, kind: ChangeKind, now_s: float) -> None:
        """A change of the kind has failed."""
        length_s = min(max(2.0 * self._lengths_s.get(kind, 0.0), FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._lengths_s[kind], self._ends_s[kind] = length_s, now_s + length_s

    def forget(self, kind: ChangeKind) -> None:
        """A change of the kind was made."""
        self._lengths_s.pop(kind, None)

    def left_s(self, now_s: float) -> dict[ChangeKind, float]:
        return {kind: end_s - now_s for kind, end_s in self._ends_s.items() if end_s > now_s}


# --- what misses say about the capacity -----------------------------------------------------------------------


@final
class _CapacityShare:
    """The share of the predicted capacity that the cluster reaches, corrected where it misses more than predicted.

    Only intervals without a change count, because requests that end after a change arrived before it.
    """

    def __init__(self) -> None:
        self.share = FIRST_CAPACITY_SHARE
        self._judged: deque[tuple[float, int, int]] = deque(maxlen=JUDGED_INTERVALS)  # (expected, met, ended)
        self._size: Size | None = None

    def forget(self) -> None:
        self._judged.clear()

    def judge(self, observed: Observed, expected: float, load: float) -> None:
        if observed.ready != self._size:
            self._size = observed.ready
            self.forget()
        interval = observed.interval
        self._judged.append((expected, interval.met, interval.met + interval.missed))
        ended = sum(count for _, _, count in self._judged)
        if len(self._judged) < JUDGED_INTERVALS or ended < FEWEST_JUDGED:
            return
        met = sum(count for _, count, _ in self._judged)
        mean = sum(one * count for one, _, count in self._judged) / ended
        deviation = (max(mean * (1.0 - mean), 0.01) / ended) ** 0.5
        if met / ended < mean - 3.0 * deviation:
            self.share = max(LEAST_CAPACITY_SHARE, self.share * LOST_FACTOR)
            self.forget()
        elif load > INFORMATIVE_LOAD:
            self.share = min(1.0, self.share + REGAINED)
