"""Bounds of durations and waits, and alarms: times at which something is due. Pure: standard library only.

A duration from a setting or from the wire is at most a day. A longer one is a mistake, and would overflow the system's
own timers (poll() takes at most 24 days). A wait is clipped to the same bound, and the waiter then checks again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar, final

from pdserve.core.errors import InvalidRequest

DAY_S: Final = 86_400.0
SHORTEST_SLO_S: Final = 1e-6  # lower bound of targets, because formulas divide by them
MAX_DOUBLINGS: Final = 64  # doublings of a backoff; a float overflows after 1,023


def check_duration(field: str, seconds: float, low: float = 0.0, high: float = DAY_S) -> None:
    """Raises InvalidRequest if `seconds` is not a number from `low` to `high`."""
    if not low <= seconds <= high:  # also rejects NaN
        raise InvalidRequest(field, seconds, f"between {low:g} and {high:g} seconds")


def clamped_s(wait_s: float, shortest_s: float = 0.0, longest_s: float = DAY_S) -> float:
    """The wait, clipped to its bounds; `longest_s` for NaN."""
    if math.isnan(wait_s):
        return longest_s
    return min(max(wait_s, shortest_s), longest_s)


def backoff_s(first_s: float, longest_s: float, doublings: int) -> float:
    """`first_s` doubled `doublings` times, at most `longest_s`."""
    return min(first_s * 2.0 ** min(doublings, MAX_DOUBLINGS), longest_s)


# --- alarms ---------------------------------------------------------------------------------------------------
# One per key.
#
# Memory is in proportion to the keys with an alarm, not to all alarms that were ever set: a cleared or moved alarm
# leaves the heap when it reaches the head, or when more than half of the heap is stale.

Key = TypeVar("Key", bound=Hashable)
SLACK: Final = 64  # stale entries that are always allowed


@final
class Alarms(Generic[Key]):
    __slots__ = ("_at", "_heap", "_number")

    def __init__(self) -> None:
        self._at: dict[Key, tuple[float, int]] = {}  # due time, and the number of the heap entry
        self._heap: list[tuple[float, int, Key]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def __iter__(self) -> Iterator[Key]:
        return iter(self._at)

    def set(self, key: Key, at_s: float) -> None:
        """Sets the key's alarm, replacing an earlier one."""
        assert not math.isnan(at_s), key
        self._number += 1
        self._at[key] = (at_s, self._number)
        heapq.heappush(self._heap, (at_s, self._number, key))
        self._drop_stale()

    def clear(self, key: Key) -> None:
        """Removes the key's alarm, if it has one."""
        if self._at.pop(key, None) is not None:
            self._drop_stale()

    @property
    def next_at_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Key | None:
        """Removes the alarm that was due first, and returns its key. Equal times are in the order of `set`. None if no
        alarm is due."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        self._drop_stale()
        return key

    def check(self) -> None:
        """Raises AssertionError unless all invariants hold."""
        assert len(self._heap) <= 2 * len(self._at) + SLACK, "stale alarms are not bounded"
        assert not self._heap or not self._is_stale(self._heap[0]), "a stale alarm is the next one"
        kept = {key: (at_s, number) for at_s, number, key in self._heap if not self._is_stale((at_s, number, key))}
        assert kept == self._at, "an alarm is lost"

    def _is_stale(self, entry: tuple[float, int, Key]) -> bool:
        return self._at.get(entry[2]) != entry[:2]

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
            heapq.heapify(self._heap)
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
