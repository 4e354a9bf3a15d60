"""Assigns slots of a device's count table to sequences, and knows whether the counts are complete. Pure.

A sequence is identified by its list of tokens, to which tokens are only appended. If a slot was last used for another
number of tokens than its sequence has now (a step was computed elsewhere or abandoned), it must be filled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from pdserve.core.errors import InternalError


@dataclass(slots=True)
class _CountSlot:
    tokens: Sequence[int]  # the caller's list, kept so that its identity is not another's
    count: int  # number of its tokens that the device has counted after the last step
    step: int  # when it was last used


@final
class CountSlots:
    def __init__(self, most: int) -> None:
        self._most = most
        self._slots: dict[int, _CountSlot] = {}
        self._number_of: dict[int, int] = {}  # by identity of the list
        self._free: list[int] = []
        self._step = 0

    def take(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[int, bool]]:
        """For each list of tokens and its present number of tokens, before one more is sampled: its slot (the lowest
        free one), and whether its counts are complete. A slot is freed only when another sequence needs it."""
        self._step += 1
        return [self._take(tokens, count) for tokens, count in sequences]

    def _take(self, tokens: Sequence[int], count: int) -> tuple[int, bool]:
        number = self._number_of.get(id(tokens))
        if number is None:
            number = self._new()
            self._number_of[id(tokens)] = number
            self._slots[number] = _CountSlot(tokens, -1, 0)
        slot = self._slots[number]
        if slot.step == self._step:
            raise InternalError("two rows of a step share a list of tokens")
        is_known = slot.count == count
        slot.count, slot.step = count + 1, self._step
        return number, is_known

    def _new(self) -> int:
        if not self._free:
            for number, slot in list(self._slots.items()):
                if slot.step < self._step - 1:  # this step may still need the slots of the last one
                    del self._slots[number], self._number_of[id(slot.tokens)]
                    self._free.append(number)
            self._free.sort(reverse=True)
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._most:
            raise InternalError(f"more rows than the {self._most} slots of a table")
        return len(self._slots)
