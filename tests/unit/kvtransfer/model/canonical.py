"""Maps local states to values that are equal exactly if the states behave the same.

Every field of every object is included, so a new field of a table is part of the state without further work. Only the
fields listed here, which have no influence, are left out. Times are relative to the side's clock. An object that occurs
twice is represented by its number the second time.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import fields
from enum import Enum
from typing import Any, Final

from pdserve.core.kv.kv_shape import Grant, TransferKey

IGNORED: Final = {
    "stats",  # Counted, but never read.
    "error",  # Texts for people.
    "now_s",  # All times are relative to it.
    "began_at_s",
    "first_byte_at_s",  # This and the following are only for figures in reports.
    "num_bytes",
    "busy",
    "busy_s",
    "early_bytes",
    "last_pushed_at_s",
    "moves",  # The side's table, which is equal in all states.
}
_ATOMS: Final = (int, str, bytes, float, type(None), Enum, Grant, TransferKey)
_MANY: Final = (tuple, list, deque, array)
_known: dict[type, tuple[str, ...]] = {}


def canonical(side: Any) -> Hashable:
    return _Walk(side.now_s).of(side)


class _Walk:
    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._numbers: dict[int, int] = {}

    def of(self, value: Any) -> Hashable:
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, _MANY):
            return tuple([self.of(one) for one in value])
        if isinstance(value, OrderedDict | dict):
            return tuple([(self.of(key), self.of(one)) for key, one in value.items()])
        if isinstance(value, set | frozenset):
            return tuple(sorted(value))
        number = self._numbers.get(id(value))
        if number is not None:
            return ("again", number)
        self._numbers[id(value)] = len(self._numbers)
        return tuple([self._field(value, name) for name in _names(value)])

    def _field(self, value: Any, name: str) -> Hashable:
        one = getattr(value, name)
        if name.endswith("_at_s"):
            return None if one is None else one - self._now_s
        special = _SPECIAL.get(name)
        return self.of(one) if special is None else special(value, one, self._now_s)


def _names(value: Any) -> tuple[str, ...]:
    kind = type(value)
    names = _known.get(kind)
    if names is None:
        every = vars(value) if hasattr(value, "__dict__") else [one.name for one in fields(value)]
        names = _known[kind] = tuple(name for name in every if name not in IGNORED)
    return names


def _alarms(table: Any, alarms: Any, now_s: float) -> Hashable:
    """Alarms without the tie-breaking numbers and the stale entries."""
    return tuple(sorted((at_s - now_s, tag) for tag, (at_s, _) in alarms._at.items()))


def _ends(table: Any, ended: dict[Any, tuple[bool, str, bool]], now_s: float) -> Hashable:
    return tuple((tag, is_verified) for tag, (is_verified, _, _) in ended.items())


_SPECIAL: Final[dict[str, Callable[[Any, Any, float], Hashable]]] = {"_alarms": _alarms, "_ended": _ends}
