"""The cheapest sequence of sizes over the next minutes, by dynamic programming over all sizes in reach. Pure.

Each slice of the horizon costs its workers and its predicted misses, and each change of size costs what the change
takes: a start pays a worker that does not serve yet, a stop or a change of role one that only drains. So a change is
worth it only if it saves more than it costs, and nothing else prevents oscillation.

A start that is ordered now serves only after `start_s`. So before that no plan may have more workers, whatever it would
save. A stop is planned together with the start that follows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, final

from pdserve.core.types import Role
from router.scaling.attainment import LoadModel
from router.scaling.interface import Alternative, Change, ChangeKind, Demand, Observed, ScalingSettings, Size

REACH: Final = 16  # workers of a role more or fewer than now, that a plan considers
COUNTS: Final = range(1, REACH + 1)  # workers in one change
MOST_SWEEPS: Final = 8
HARMLESS: Final = 0.005  # share of the requests that a drain may cost before it could be undone
#: Widths of slices: short ones first, because the next decisions depend on them.
WIDTHS_S: Final = ((10.0, 90.0), (20.0, 210.0), (40.0, math.inf))


def slice_edges_s(horizon_s: float) -> list[float]:
    edges_s = [0.0]
    for width_s, until_s in WIDTHS_S:
        while edges_s[-1] < min(until_s, horizon_s) - 1e-9:
            edges_s.append(min(edges_s[-1] + width_s, horizon_s))
    return edges_s


@final
class SizePlan:
    def __init__(
        self,
        settings: ScalingSettings,
        observed: Observed,
        demands: Sequence[Demand],
        edges_s: Sequence[float],
        capacity_share: float,
        decide_every_s: float,
    ) -> None:
        """`demands`: one for each slice between two edges."""
        self._settings, self._now, self._edges_s = settings, observed.ready, edges_s
        self._every_s = decide_every_s
        self._widths_s = [end - begin for begin, end in pairwise(edges_s)]
        self._demands = demands
        self._sizes = list(self._in_reach())
        self._at = {size: index for index, size in enumerate(self._sizes)}
        # Slices after the reach of the trend have equal demands.
        distinct = {replace(one, at_s=0.0): LoadModel(one, observed, capacity_share) for one in demands}
        self._models = [distinct[replace(one, at_s=0.0)] for one in demands]
        attained = {id(model): [model.attainment(size) for size in self._sizes] for model in distinct.values()}
        self._attainments = [attained[id(model)] for model in self._models]
        self._costs = [
            [width_s * (size.total + self._miss_price(t) * (1.0 - attained)) for size, attained in self._rows(t)]
            for t, width_s in enumerate(self._widths_s)
        ]
        self._moves = {kind: [self._indexed(move) for move in self._moves_of(kind)] for kind in ChangeKind}
        next_s = decide_every_s + settings.start_s
        self._after_keep = self._values(self._edge(next_s), self._edge(next_s))
        self._after_start = self._values(
            self._edge(next_s), self._edge(settings.start_s + next_s), as_before=self._after_keep
        )

    def alternatives(self) -> list[tuple[Alternative, Change | None]]:
        """The cheapest first, and `keep` first among equals."""
        found = [(self._keep(), None), *((self._changed(change), change) for change in self._changes())]
        return sorted(found, key=lambda pair: pair[0].cost_s)  # stable

    def attainment_now(self) -> float:
        return self._attainments[0][self._at[self._now]]

    def load_now(self) -> float:
        return self._models[0].load(self._now)

    # -- sizes and moves -----------------------------------------------------------------------------------------

    def _in_reach(self) -> Iterator[Size]:
        """All sizes within the bounds near the present one, which is always among them."""
        now, settings = self._now, self._settings
        fixed = not settings.may_change_roles
        for prefill in range(max(0, now.prefill - REACH), now.prefill + REACH + 1):
            if fixed and prefill != now.prefill:
                continue
            for decode in range(max(1, now.decode - REACH), now.decode + REACH + 1):
                size = Size(prefill, decode)
                low, high = min(settings.min_workers, now.total), max(settings.max_workers, now.total)
                if low <= size.total <= high:
                    yield size
        if now.decode < 1:
            yield now

    def _moves_of(self, kind: ChangeKind) -> Iterator[tuple[Size, Size, float]]:
        """(from, to, cost) between sizes that differ by one worker."""
        settings = self._settings
        cost = {
            ChangeKind.START: settings.start_s,
            ChangeKind.STOP: settings.drain_s,
            ChangeKind.CHANGE_ROLE: settings.drain_s + settings.change_role_s,
        }[kind]
        for size in self._sizes:
            for role in Role:
                there = resized(size, Change(kind=kind, role=role, count=1))
                if there in self._at:
                    yield size, there, cost

    def _indexed(self, move: tuple[Size, Size, float]) -> tuple[int, int, float]:
        here, there, cost = move
        return self._at[here], self._at[there], cost

    def _changes(self) -> Iterator[Change]:
        for role in Role:
            for count in COUNTS:
                for kind in ChangeKind:
                    change = Change(kind=kind, role=role, count=count)
                    size = resized(self._now, change)
                    if size in self._at and (self._settings.may_change_roles or role is Role.DECODE):
                        yield change

    # -- costs ---------------------------------------------------------------------------------------------------

    def _miss_price(self, t: int) -> float:
        """Worker-seconds per second if every request of the slice missed its targets."""
        return self._settings.miss_price * self._models[t].work_s * self._demands[t].rate_rps

    def _rows(self, t: int) -> Iterator[tuple[Size, float]]:
        return zip(self._sizes, self._attainments[t], strict=True)

    def _edge(self, at_s: float) -> int:
        """The first slice that begins at `at_s` or later."""
        return next((t for t, edge_s in enumerate(self._edges_s) if edge_s >= at_s - 1e-9), len(self._widths_s))

    def _values(
        self, first_role: int, first_start: int, as_before: list[list[float]] | None = None
    ) -> list[list[float]]:
        """Cost of the best plan from each slice on, by size. Workers with a new role serve from slice `first_role` on,
        new workers from `first_start` on. From there on, the costs are those of `as_before`."""
        last = len(self._widths_s)
        values: list[list[float]] = [[0.0] * len(self._sizes)]
        if as_before is not None and first_start < last:
            values = list(reversed(as_before[first_start:]))
        for t in range(last - len(values), -1, -1):
            later = values[-1]
            if t + 1 < last:
                moves = list(self._moves[ChangeKind.STOP])
                if t + 1 >= first_role:
                    moves += self._moves[ChangeKind.CHANGE_ROLE]
                if t + 1 >= first_start:
                    moves += self._moves[ChangeKind.START]
                later = _relaxed(later, moves)
            values.append([cost + rest for cost, rest in zip(self._costs[t], later, strict=True)])
        values.reverse()
        return values

    # -- alternatives --------------------------------------------------------------------------------------------

    def _keep(self) -> Alternative:
        return self._alternative("keep", self._now, self._after_keep[0][self._at[self._now]], 0.0, self._now)

    def _changed(self, change: Change) -> Alternative:
        settings, now, count = self._settings, self._now, change.count
        size = resized(now, change)
        match change.kind:
            case ChangeKind.START:
                t = self._edge(settings.start_s)
                during, cost, values = now, count * settings.start_s, self._after_start
            case ChangeKind.STOP:
                t = 0
                during, cost, values = size, count * settings.drain_s, self._after_keep
            case ChangeKind.CHANGE_ROLE:
                role_s = settings.drain_s + settings.change_role_s
                t = self._edge(role_s)
                during, cost, values = drained(now, change), count * role_s, self._after_keep
        # Workers that drain still compute their running answers, so the size counts as before until the change.
        total = cost + sum(self._costs[index][self._at[now]] for index in range(t)) + values[t][self._at[size]]
        return self._alternative(str(change), size, total, cost, during, first=t)

    def _alternative(
        self, name: str, size: Size, total: float, cost: float, during: Size, first: int = 0
    ) -> Alternative:
        undo = max(self._edge(self._every_s + self._settings.start_s), 1)
        refused = ""
        if during.total < self._now.total:
            kept = self._missed(undo, self._now, self._now, 0)
            lost = self._missed(undo, size, during, first)
            if lost > kept + HARMLESS * self._arrivals(undo):
                refused = "its drain would make requests miss their targets"
        until = min(max(first + 1, undo), len(self._widths_s))
        arrivals = self._arrivals(until)
        return Alternative(
            change=name,
            size=size,
            attainment=1.0 - self._missed(until, size, during, first) / arrivals if arrivals > 0.0 else 1.0,
            cost_s=total,
            change_cost_s=cost,
            refused=refused,
        )

    def _arrivals(self, end: int) -> float:
        return sum(one.rate_rps * width_s for one, width_s in zip(self._demands[:end], self._widths_s, strict=False))

    def _missed(self, end: int, size: Size, during: Size, first: int) -> float:
        """Predicted misses until slice `end` with `during` before slice `first`, and `size` from then on."""
        total = 0.0
        for t in range(end):
            attained = self._models[t].attainment(during if t < first else size)
            total += self._demands[t].rate_rps * self._widths_s[t] * (1.0 - attained)
        return total


def resized(size: Size, change: Change) -> Size:
    """The size after the change."""
    sign = -1 if change.kind is ChangeKind.STOP else 1
    own = sign * change.count
    other = -change.count if change.kind is ChangeKind.CHANGE_ROLE else 0
    if change.role is Role.PREFILL:
        return Size(size.prefill + own, size.decode + other)
    return Size(size.prefill + other, size.decode + own)


def drained(size: Size, change: Change) -> Size:
    """The size while the workers of a role change drain and start."""
    if change.role is Role.PREFILL:
        return Size(size.prefill, size.decode - change.count)
    return Size(size.prefill - change.count, size.decode)


def _relaxed(values: Sequence[float], moves: Sequence[tuple[int, int, float]]) -> list[float]:
    """The least cost of moving anywhere and going on from there; both directions of sweeps, until nothing changes."""
    best = list(values)
    for _ in range(MOST_SWEEPS):
        has_changed = False
        for order in (moves, reversed(moves)):
            for here, there, cost in order:
                moved = best[there] + cost
                if moved < best[here] - 1e-12:
                    best[here] = moved
                    has_changed = True
        if not has_changed:
            break
    return best
