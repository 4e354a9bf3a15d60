"""Learned rates of reuse, and the values of cached blocks that follow from them. Pure.

What saves is a later use, so each class of blocks has learned rates: how many of its blocks were used again at which
age, and how many stayed unused. The class is the number of turns of the text that used the block last or, if several
texts share it, the number of its uses. Blocks whose use is announced and blocks of sessions that have ended are classes
of their own.

The value of a block is, over all times that it could stay, the highest ratio of the probability of a use by then to the
expected time until then: the Gittins index. It may rise with age, because few sessions continue at once, and falls at
last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Final, final


class Kind(IntEnum):
    PRIVATE = 1  # of one text; its number is that of turns
    SHARED = 2  # of several texts; its number is that of uses
    WITHIN = 3  # a use within a time is announced
    ENDED = 4  # a client has ended the session


ReuseClass = tuple[Kind, int]

_EDGES_S: Final = tuple(0.25 * 2.0 ** (number / 2) for number in range(34))  # between ages, up to 6.4 hours
_NUM_AGES: Final = len(_EDGES_S) + 1
_WIDTHS_S: Final = (
    _EDGES_S[0],
    *(end - start for start, end in pairwise(_EDGES_S)),
    _EDGES_S[-1],
)
_PRIOR: Final = 4.0  # texts: what the rates of all classes weigh in those of one
_KEPT: Final = 0.92  # of the counts, at each update of the rates
_PROMISED: Final = 0.9  # probability that an announced use comes, before anything is learned


def _no_counts() -> list[float]:
    return [0.0] * _NUM_AGES


@final
class ReuseRates:
    def __init__(self) -> None:
        self._used: dict[ReuseClass, list[float]] = defaultdict(_no_counts)
        self._unused: dict[ReuseClass, list[float]] = defaultdict(_no_counts)
        self._values: dict[ReuseClass, list[float]] = {}
        self._chances: dict[ReuseClass | None, list[float]] = {}  # None: of all classes
        self._uses_of_all = [0.0] * _NUM_AGES  # the probability of a use at each age, of blocks at it
        self._common = [0.0] * _NUM_AGES  # values of a class of which nothing else is known

    def used(self, reuse_class: ReuseClass, age_s: float, count: float) -> None:
        self._used[reuse_class][age_number(age_s)] += count

    def unused(self, reuse_class: ReuseClass, age_s: float, count: float) -> None:
        """The blocks will not be watched any longer."""
        self._unused[reuse_class][age_number(age_s)] += count

    def value(self, reuse_class: ReuseClass, age_s: float) -> float:
        """Expected uses per second of a block; 0.0 if nothing is known, and less if a session has ended."""
        values = self._values.get(reuse_class)
        if values is None:
            values = self._common
            if reuse_class[0] in (Kind.WITHIN, Kind.ENDED):
                values = self._values[reuse_class] = self._of_class(reuse_class, [0.0] * _NUM_AGES, [0.0] * _NUM_AGES)
        return values[bisect_right(_EDGES_S, age_s)]

    def chance(self, reuse_class: ReuseClass, age_s: float) -> float | None:
        """The probability of another use of a block before it is forgotten; None: nothing is known."""
        chances = self._chances.get(reuse_class)
        if chances is None:
            if reuse_class[0] is Kind.ENDED:
                return 0.0
            chances = self._chances.get(None)
        return None if chances is None else chances[age_number(age_s)]

    def learn(self, present: Iterable[tuple[ReuseClass, float, float]]) -> None:
        """Updates the values. `present`: class, age and number of the blocks that are watched."""
        unused = {one: list(counts) for one, counts in self._unused.items()}
        for reuse_class, age_s, count in present:
            unused.setdefault(reuse_class, [0.0] * _NUM_AGES)[age_number(age_s)] += count
        nothing = [0.0] * _NUM_AGES
        used_of_all, at_risk_of_all = list(nothing), list(nothing)
        at_risk: dict[ReuseClass, list[float]] = {}
        for reuse_class in dict.fromkeys((*unused, *self._used)):
            used, left = self._used.get(reuse_class, nothing), unused.get(reuse_class, nothing)
            older, risk = 0.0, list(nothing)
            for age in reversed(range(_NUM_AGES)):
                older += used[age] + left[age]
                risk[age] = older - 0.5 * left[age]  # those last seen at this age were there for half of it
                used_of_all[age] += used[age]
                at_risk_of_all[age] += risk[age]
            at_risk[reuse_class] = risk
        common = [used / (risk + 1.0) for used, risk in zip(used_of_all, at_risk_of_all, strict=True)]
        self._uses_of_all = common
        self._common = _values(nothing, nothing, common)
        self._chances[None] = _chances(nothing, nothing, common)
        for reuse_class, risk in at_risk.items():
            used = self._used.get(reuse_class, nothing)
            self._values[reuse_class] = self._of_class(reuse_class, used, risk)
            self._chances[reuse_class] = _chances(used, risk, self._prior(reuse_class))
        for counts in (*self._used.values(), *self._unused.values()):
            counts[:] = [_KEPT * count for count in counts]

    def _of_class(self, reuse_class: ReuseClass, used: Sequence[float], at_risk: Sequence[float]) -> list[float]:
        values = _values(used, at_risk, self._prior(reuse_class))
        return [value or -1.0 for value in values] if reuse_class[0] is Kind.ENDED else values

    def _prior(self, reuse_class: ReuseClass) -> Sequence[float]:
        """The expected probability of a use at each age, of blocks at it."""
        kind, number = reuse_class
        if kind is Kind.ENDED:
            return [0.0] * _NUM_AGES
        if kind is not Kind.WITHIN:
            return self._uses_of_all
        each = 1.0 - (1.0 - _PROMISED) ** (1.0 / (number + 1))
        return [each if age <= number else 0.0 for age in range(_NUM_AGES)]


def age_number(age_s: float) -> int:
    return bisect_right(_EDGES_S, age_s)


def _stays(used: Sequence[float], at_risk: Sequence[float], prior: Sequence[float]) -> list[float]:
    """The probability that a block stays unused until each age, and to the end of the last one."""
    stays = [1.0]
    for count, risk, expected in zip(used, at_risk, prior, strict=True):
        stays.append(stays[-1] * max(0.0, 1.0 - (count + _PRIOR * expected) / (risk + _PRIOR)))
    return stays


def _chances(used: Sequence[float], at_risk: Sequence[float], prior: Sequence[float]) -> list[float]:
    """Of a use, of blocks that are unused until each age."""
    stays = _stays(used, at_risk, prior)
    return [1.0 - stays[-1] / one if one > 0.0 else 1.0 for one in stays[:-1]]


def _values(used: Sequence[float], at_risk: Sequence[float], prior: Sequence[float]) -> list[float]:
    stays = _stays(used, at_risk, prior)
    # The highest ratio is the steepest descent to a later point, of which only those of the convex hull can be that.
    values = [0.0] * _NUM_AGES
    hull = [(0.0, stays[-1])]  # seconds spent until the last age, negative, and what stays; the nearest is the last
    for age in reversed(range(_NUM_AGES)):
        spent_s = hull[-1][0] - _WIDTHS_S[age] * 0.5 * (stays[age] + stays[age + 1])
        if spent_s == hull[-1][0]:
            continue  # nothing stays
        point = (spent_s, stays[age])
        while len(hull) > 1 and _descent(point, hull[-2]) >= _descent(point, hull[-1]):
            hull.pop()
        values[age] = _descent(point, hull[-1])
        hull.append(point)
    return values


def _descent(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (start[1] - end[1]) / (end[0] - start[0])
