"""Limits the staging memory of all connections of one KV pool.

A connection always gets one slot, so that every pair of workers can connect. It gets further slots, for more chunks in
flight, from half of the remaining budget. So the first connections get what they can use, and some budget is left for
later ones.
"""

from __future__ import annotations

import threading
from typing import final


def num_slots(left_bytes: int, slot_bytes: int, most: int) -> int:
    """The slots of a new connection that can use `most`. Pure."""
    return max(1, min(most, left_bytes // 2 // slot_bytes))


@final
class StagingShare:
    """The share of one connection."""

    def __init__(self, budget: StagingBudget, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes, self.num_slots = slot_bytes, num_slots
        self._budget = budget

    def shrink(self, num_slots: int) -> None:
        """Returns slots, because the peer has fewer."""
        assert 1 <= num_slots <= self.num_slots
        self._budget._give_back((self.num_slots - num_slots) * self.slot_bytes)
        self.num_slots = num_slots

    def close(self) -> None:
        """Call it once the memory is no longer used. May be called again."""
        self._budget._give_back(self.num_slots * self.slot_bytes)
        self.num_slots = 0


@final
class StagingBudget:
    """Any thread may call it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return self._taken_bytes

    def take(self, slot_bytes: int, most: int) -> StagingShare:
        with self._lock:
            count = num_slots(self.limit_bytes - self._taken_bytes, slot_bytes, most)
            self._taken_bytes += count * slot_bytes
        return StagingShare(self, slot_bytes, count)

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            assert self._taken_bytes >= num_bytes
            self._taken_bytes -= num_bytes
