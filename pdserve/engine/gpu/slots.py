"""Which rows of a device's table hold what sequences have seen, and whether they still say all of it. Pure.

A sequence is known by the list of its tokens, which only grows. A slot that was last used for fewer or more tokens than
its sequence has now was passed by (a step was computed elsewhere, or given up): it has to be filled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from pdserve.core.errors import InternalError


@dataclass(slots=True)
class _Slot:
    tokens: Sequence[int]  # the caller's list, kept so that its identity is not another's
    count: int  # of its tokens that the device will have seen once the last step has drawn
    step: int  # when it was last used


@final
class Slots:
    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[int, _Slot] = {}
        self._number_of: dict[int, int] = {}  # by identity of the list
        self._free: list[int] = []
        self._step = 0

    def take(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[int, bool]]:
        """For each list of tokens and how many there are now, before one more is drawn: its slot, the lowest that is
        free, and whether that holds them. A slot is given up only when another sequence needs it."""
        self._step += 1
        return [self._take(tokens, count) for tokens, count in sequences]

    def _take(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        number = self._number_of.get(id(tokens))
        if number is None:
            number = self._new()
            self._number_of[id(tokens)] = number
            self._slots[number] = _Slot(tokens, -1, 0)
        slot = self._slots[number]
        if slot.step == self._step:
            raise InternalError("two rows of a step share a list of tokens")
        is_known = slot.count == count
        slot.count, slot.step = count + 1, self._step
        return number, is_known

    def _new(self) -> int:
        if not self._free:
            for number, slot in list(self._slots.items()):
                if slot.step < self._step - 1:  # this step may still ask for those of the last one
                    del self._slots[number], self._number_of[id(slot.tokens)]
                    self._free.append(number)
            self._free.sort(reverse=True)
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._most:
            raise InternalError(f"more rows than the {self._most} slots of a table")
        return len(self._slots)
