"""Bounds the bytes of the requests that are being served. gRPC holds each message until its call has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from pdserve.core.errors import Overloaded

RETRY_S: Final = 1.0
SMALL_BYTES: Final = 65_536
LARGE_SHARE: Final = 0.75  # of the limit, for requests over SMALL_BYTES: they leave room for small ones


@final
class HeldBytes:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Raises Overloaded where that is too much beside what is held. One request alone always fits."""
        limit = self._limit if num_bytes <= SMALL_BYTES else int(LARGE_SHARE * self._limit)
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            raise Overloaded(f"requests of {self.num_bytes} bytes are being served, of {limit} at most", RETRY_S)
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
