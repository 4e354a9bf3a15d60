"""Limits the number of pairs. If the limit is reached, a new pair takes the slot of the least recently used one.

A pair can be closed only while it has no open transfer, and only its sender knows this. So pairs are asked to close, in
the order of their last use, and the new pair takes the first slot that becomes free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, final

from pdserve.core.errors import TransferFailed

WAIT_S: Final = 3.0  # wait for a slot, over all pairs that are asked to close
ANSWER_S: Final = 0.5  # wait for each of these pairs: its connection and its communicator must end


@final
class PairSlot:
    """The slot of one pair. Any thread may call it."""

    def __init__(self, pair_slots: PairSlots) -> None:
        self._pair_slots = pair_slots
        self.ask: Callable[[], None] | None = None  # asks the pair to close, and returns; None: it is being made

    def used(self) -> None:
        self._pair_slots.used(self)

    def leave(self) -> None:
        self._pair_slots.leave(self)


@final
class PairSlots:
    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: list[PairSlot] = []  # least recently used first
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._taken)

    def take(self) -> PairSlot:
        """Waits for a slot if none is free. Raises TransferFailed if no pair closes."""
        ends_s = time.monotonic() + WAIT_S
        with self._changed:
            for pair_slot in [None, *self._taken]:
                if pair_slot is not None and pair_slot.ask is not None:
                    pair_slot.ask()
                wait_s = ANSWER_S if pair_slot is not None and pair_slot.ask is not None else 0.0
                if self._changed.wait_for(self._has_room, min(wait_s, max(0.0, ends_s - time.monotonic()))):
                    self._taken.append(PairSlot(self))
                    return self._taken[-1]
                if time.monotonic() >= ends_s:
                    break
        raise TransferFailed(f"{self.most} pairs are open, and none could be closed")

    def used(self, pair_slot: PairSlot) -> None:
        with self._changed:
            if pair_slot in self._taken:
                self._taken.remove(pair_slot)
                self._taken.append(pair_slot)

    def leave(self, pair_slot: PairSlot) -> None:
        """Frees the slot. Idempotent."""
        with self._changed:
            if pair_slot in self._taken:
                self._taken.remove(pair_slot)
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return len(self._taken) < self.most
