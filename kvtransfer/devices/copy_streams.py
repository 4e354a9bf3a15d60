"""Chooses the copy stream of a device for each copy.

A copy goes to the stream with the fewest outstanding bytes, so a copy that waits for the engine does not delay others.
A copy that must run after another one uses the same stream, which keeps the order without an event.
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
    """The streams of one KV pool on a device."""

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
