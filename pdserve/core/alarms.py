"""Times at which something is due, one per key. Pure: time is passed as `now_s`.

Memory is in proportion to the keys with an alarm, not to all alarms that were ever set: a cleared or moved alarm leaves
the heap when it reaches the head, or when more than half of the heap is stale.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar, final

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
