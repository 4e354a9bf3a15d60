"""Limits the bytes of the requests being served, because a server keeps each until its answer has ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from pdserve.core.errors import Overloaded

RETRY_S: Final = 1.0
SMALL_BYTES: Final = 65_536
LARGE_SHARE: Final = 0.75  # share of the limit for requests over SMALL_BYTES, which leaves room for small ones


@final
class HeldBytes:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Adds a request. Raises Overloaded if the sum would exceed the limit. A single request always fits."""
        limit = self.limit if num_bytes <= SMALL_BYTES else int(LARGE_SHARE * self.limit)
        if self.num_bytes and self.num_bytes + num_bytes > limit:
            raise Overloaded(f"requests of {self.num_bytes} bytes are being served, of {limit} at most", RETRY_S)
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
