"""Divides what the copies of one KV pool on a device share: its streams, and the memory of its staging slots.

A copy goes to the stream with the fewest outstanding bytes, so a copy that waits for the engine does not delay others.
A copy that must run after another one uses the same stream, which keeps the order without an event. Copies that hold
the engine have a stream of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

#: The number of chunks in flight on a cuda_ipc connection. More streams would share the same links (docs/gpu.md).
DEFAULT_STREAMS: Final = 4
DEFAULT_STAGING_BYTES: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """What the copies of one KV pool on a device may use."""

    num_streams: int = DEFAULT_STREAMS
    staging_bytes: int = DEFAULT_STAGING_BYTES  # in addition to one slot for each connection


def least_loaded(outstanding_bytes: Sequence[int]) -> int:
    """The first stream with the fewest bytes. Pure."""
    return min(range(len(outstanding_bytes)), key=outstanding_bytes.__getitem__)


@final
class StreamLoads:
    """Counts the outstanding bytes of each stream. Any thread may call it."""

    def __init__(self, num_streams: int) -> None:
        self._bytes = [0] * num_streams
        self._lock = threading.Lock()

    @property
    def outstanding_bytes(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._bytes)

    def begin(self, num_bytes: int, behind: int | None = None) -> int:
        """The stream for this many bytes: the stream of the work before them, if there is any."""
        with self._lock:
            index = least_loaded(self._bytes) if behind is None else behind
            self._bytes[index] += num_bytes
            return index

    def end(self, index: int, num_bytes: int) -> None:
        """The copy has ended or was not started. Must be called once for each `begin`."""
        with self._lock:
            assert self._bytes[index] >= num_bytes
            self._bytes[index] -= num_bytes


# --- staging budget -------------------------------------------------------------------------------------------
# Of all connections of one KV pool.
#
# A connection always gets one slot, so that every pair of workers can connect. It gets further slots, for more chunks
# in flight, from half of the remaining budget. So the first connections get what they can use, and some budget is left
# for later ones.


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
