"""Limits the bytes of the requests being served and of their answers, because a server keeps each until its answer has
ended. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, final

from pdserve.core.errors import Overloaded

RETRY_S: Final = 1.0
SMALL_BYTES: Final = 65_536
LARGE_SHARE: Final = 0.75  # share of the limit for requests over SMALL_BYTES, which leaves room for small ones


@final
class HeldBytes:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """Adds a request; the function adds more bytes to it. Both raise Overloaded if the sum would exceed the limit.
        A single request always fits."""
        own = 0

        def add(more: int) -> None:
            nonlocal own
            limit = self._limit if own + more <= SMALL_BYTES else int(LARGE_SHARE * self._limit)
            if self.num_bytes > own and self.num_bytes + more > limit:
                raise Overloaded(f"requests of {self.num_bytes} bytes are being served, of {limit} at most", RETRY_S)
            self.num_bytes += more
            own += more

        add(num_bytes)
        try:
            yield add
        finally:
            self.num_bytes -= own
