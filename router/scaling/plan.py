"""The cheapest sequence of sizes over the next minutes, by dynamic programming over all sizes in reach. Pure.

Each slice of the horizon costs its workers and its predicted misses, and each change of size costs what the change
takes: a start pays a worker that does not serve yet, a stop or a change of role one that only drains. So a change is
worth it only if it saves more than it costs, and nothing else prevents oscillation.

A start that is ordered now serves only after `start_s`. So before that no plan may have more workers, whatever it would
save. A stop is planned together with the start that follows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias, final

from pdserve.core.types import Role
from router.scaling.attainment import LoadModel
from router.scaling.interface import Alternative, Change, ChangeKind, Demand, Observed, ScalingSettings, Size, resized

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


@dataclass(frozen=True, slots=True)
class Coming:
    """Workers that start, and serve after that time."""

    workers: Size
    after_s: float


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
        coming: Sequence[Coming] = (),
    ) -> None:
        """`demands`: one for each slice between two edges. `coming`: workers that start already. The sizes that are
        compared include them."""
        self._settings, self._edges_s = settings, edges_s
        self._now = _sum([observed.ready, *(one.workers for one in coming)])
        #: Those of them that do not serve yet in each slice.
        self._missing = [
            _sum([one.workers for one in coming if one.after_s > begin_s + 1e-9]) for begin_s, _ in pairwise(edges_s)
        ]
        self._every_s = decide_every_s
        self._widths_s = [end - begin for begin, end in pairwise(edges_s)]
        self._demands = demands
        low, high = min(settings.min_workers, self._now.total), max(settings.max_workers, self._now.total)
        grid = _grid(self._now, low, high, settings.may_change_roles)
        self._sizes, self._at, self._pairs = grid.sizes, grid.at, grid.pairs
        # Slices after the reach of the trend have equal demands.
        distinct = {replace(one, at_s=0.0): LoadModel(one, observed, capacity_share) for one in demands}
        self._models = [distinct[replace(one, at_s=0.0)] for one in demands]
        attained: dict[tuple[int, Size], list[float]] = {}
        for t, model in enumerate(self._models):
            at = (id(model), self._missing[t])
            if at not in attained:
                attained[at] = [model.attainment(self._serving(size, t)) for size in self._sizes]
        self._attainments = [attained[id(model), self._missing[t]] for t, model in enumerate(self._models)]
        totals = [size.total for size in self._sizes]
        self._costs = []
        for t, width_s in enumerate(self._widths_s):
            paid = zip(totals, self._attainments[t], strict=True)
            price = self._miss_price(t)
            self._costs.append([width_s * (total + price * (1.0 - attained)) for total, attained in paid])
        self._move_costs = {
            ChangeKind.START: settings.start_s,
            ChangeKind.STOP: settings.drain_s,
            ChangeKind.CHANGE_ROLE: settings.drain_s + settings.change_role_s,
        }
        next_s = decide_every_s + settings.start_s
        role_s = decide_every_s + settings.drain_s + settings.change_role_s  # of the next decision, if it is longer
        self._after_keep = self._values(self._edge(max(next_s, role_s)), self._edge(next_s))
        self._after_start = self._values(
            self._edge(next_s), self._edge(settings.start_s + next_s), as_before=self._after_keep
        )

    def alternatives(
        self, kinds: Collection[ChangeKind] = tuple(ChangeKind)
    ) -> list[tuple[Alternative, Change | None]]:
        """The cheapest first, and `keep` first among equals."""
        changes = [one for one in self._changes() if one.kind in kinds]
        found = [(self._keep(), None), *((self._changed(change), change) for change in changes)]
        return sorted(found, key=lambda pair: pair[0].cost_s)  # stable

    def attainment_now(self) -> float:
        return self._attainments[0][self._at[self._now]]

    def load_now(self) -> float:
        return self._models[0].load(self._serving(self._now, 0))

    def _serving(self, size: Size, t: int) -> Size:
        """In slice `t`, if the wanted size is `size`."""
        missing = self._missing[t]
        return Size(max(size.prefill - missing.prefill, 0), max(size.decode - missing.decode, 0))

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
                kinds = [ChangeKind.STOP]
                if t + 1 >= first_role:
                    kinds.append(ChangeKind.CHANGE_ROLE)
                if t + 1 >= first_start:
                    kinds.append(ChangeKind.START)
                later = _relaxed(later, [(self._pairs[kind], self._move_costs[kind]) for kind in kinds])
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
                during, cost, values = now, count * self._move_costs[change.kind], self._after_start
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
            there = during if t < first else size
            index = self._at.get(there)
            if index is not None:
                attained = self._attainments[t][index]
            else:  # below the bounds, while a worker changes its role
                attained = self._models[t].attainment(self._serving(there, t))
            total += self._demands[t].rate_rps * self._widths_s[t] * (1.0 - attained)
        return total


def _sum(sizes: Iterable[Size]) -> Size:
    held = list(sizes)
    return Size(sum(one.prefill for one in held), sum(one.decode for one in held))


def drained(size: Size, change: Change) -> Size:
    """The size while the workers of a role change drain and start."""
    if change.role is Role.PREFILL:
        return Size(size.prefill, size.decode - change.count)
    return Size(size.prefill - change.count, size.decode)


def _relaxed(values: Sequence[float], moves: Sequence[tuple[_Pairs, float]]) -> list[float]:
    """The least cost of moving anywhere and going on from there. Each kind of move by itself is complete after one
    pass, because the pairs of a kind have the order of their dependence; all together are repeated until nothing
    changes."""
    best = list(values)
    for _ in range(MOST_SWEEPS):
        has_changed = False
        for pairs, cost in moves:
            for here, there in pairs:
                moved = best[there] + cost
                if moved < best[here] - 1e-12:
                    best[here] = moved
                    has_changed = True
        if not has_changed or len(moves) == 1:
            break
    return best


# --- sizes and moves ------------------------------------------------------------------------------------------

_Pairs: TypeAlias = tuple[tuple[int, int], ...]  # (from, to), indices of sizes


@dataclass(frozen=True, slots=True)
class _Grid:
    """Sizes, and the pairs of them between which each kind of change moves one worker."""

    sizes: tuple[Size, ...]
    at: Mapping[Size, int]
    pairs: Mapping[ChangeKind, _Pairs]


@lru_cache(maxsize=32)
def _grid(now: Size, low: int, high: int, may_change_roles: bool) -> _Grid:
    """All sizes within the bounds near the present one, which is always among them."""
    sizes = []
    for prefill in range(max(0, now.prefill - REACH), now.prefill + REACH + 1):
        if not may_change_roles and prefill != now.prefill:
            continue
        for decode in range(max(1, now.decode - REACH), now.decode + REACH + 1):
            if low <= prefill + decode <= high:
                sizes.append(Size(prefill, decode))
    if now.decode < 1:
        sizes.append(now)
    at = {size: index for index, size in enumerate(sizes)}
    pairs = {}
    for kind in ChangeKind:
        found = []
        for role in Role:
            change = Change(kind=kind, role=role, count=1)
            one_role = [(at[size], at[there]) for size in sizes if (there := resized(size, change)) in at]
            # Moves to a later size depend on what was found for that one.
            found += sorted(one_role, reverse=bool(one_role) and one_role[0][1] > one_role[0][0])
        pairs[kind] = tuple(found)
    return _Grid(tuple(sizes), at, pairs)
