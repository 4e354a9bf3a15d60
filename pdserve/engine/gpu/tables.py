"""Block tables on the device: the row of each sequence, and the changes since the last step. Pure.

A sequence is identified by its list of blocks. Blocks are only appended to a list, so only the new ones are sent. A
copy of each list is compared with it at every step; a list that was changed otherwise is sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from pdserve.core.errors import InternalError


@dataclass(slots=True)
class _SeqSlot:
    blocks: Sequence[int]  # the caller's list, kept so that its identity is not another's
    sent: list[int]
    step: int  # step at which it was last used


@dataclass(frozen=True, slots=True)
class Update:
    """`seq_slots[i]` is the table row of the step's row i; entry `at[j]` of the flat table becomes `block[j]`."""

    seq_slots: list[int]
    at: list[int]
    block: list[int]


@final
class TableMirror:
    def __init__(self, num_seq_slots: int, num_pages: int) -> None:
        self._num_pages = num_pages
        self._seq_slots: dict[int, _SeqSlot] = {}
        self._seq_slot_of: dict[int, int] = {}  # by identity of the list
        self._free = list(range(num_seq_slots - 1, -1, -1))
        self._step = 0
        self._is_kept_S = np.zeros(num_seq_slots, bool)  # in this step, without comparing its table

    def update(self, tables: Sequence[Sequence[int]], kept_R: Any | None = None) -> Update:
        """Assigns sequence slots to the tables of a step's rows.

        A slot is freed only when another row needs it. A running step may still read it; the changes for this step
        come later on the same stream.

        `kept_R`: sequence slots of further rows of the step, whose tables have not changed since the previous step.
        """
        self._step += 1
        self._is_kept_S[:] = False
        if kept_R is not None:
            self._is_kept_S[kept_R] = True
        seq_slots = [self._seq_slot(table) for table in tables]
        if len(set(seq_slots)) != len(seq_slots) or self._is_kept_S[seq_slots].any():
            raise InternalError("two rows of a step share a list of blocks")
        at: list[int] = []
        block: list[int] = []
        for number, table in zip(seq_slots, tables, strict=True):
            seq_slot = self._seq_slots[number]
            num_sent = len(seq_slot.sent)
            if len(table) == num_sent and table == seq_slot.sent:  # the usual case
                continue
            if len(table) > self._num_pages:
                raise InternalError(f"{len(table)} blocks, a table has {self._num_pages}")
            if table[:num_sent] != seq_slot.sent:
                num_sent = 0
                seq_slot.sent = []
            if len(table) > num_sent:
                fresh = table[num_sent:]
                first = number * self._num_pages + num_sent
                at += range(first, first + len(fresh))
                block += fresh
                seq_slot.sent += fresh
        return Update(seq_slots, at, block)

    def _seq_slot(self, table: Sequence[int]) -> int:
        number = self._seq_slot_of.get(id(table))
        if number is None:
            if not self._free:
                self._give_up_oldest()
            number = self._free.pop()
            self._seq_slot_of[id(table)] = number
            self._seq_slots[number] = _SeqSlot(table, [], self._step)
        self._seq_slots[number].step = self._step
        return number

    def _give_up_oldest(self) -> None:
        """Frees all sequence slots that this step does not use; their sequences have most likely ended."""
        for number, seq_slot in list(self._seq_slots.items()):
            if seq_slot.step < self._step and not self._is_kept_S[number]:
                del self._seq_slots[number], self._seq_slot_of[id(seq_slot.blocks)]
                self._free.append(number)
        if not self._free:
            raise InternalError(f"more rows than the {len(self._seq_slots)} sequence slots of the block tables")
