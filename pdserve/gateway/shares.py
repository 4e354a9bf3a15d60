"""Shares of a pool that all callers use, so that none takes it before its quota is checked. Pure.

Dynamic thresholds (Choudhury and Hahne, 1998): a caller may hold at most `weight` times what is free. So one caller
gets at most weight / (weight + 1) of the pool, and the next one the same share of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final

from pdserve.core.errors import Overloaded
from pdserve.core.held_bytes import LARGE_SHARE, SMALL_BYTES

RETRY_S: Final = 1.0
BYTES_WEIGHT: Final = 2
CONNECTIONS_WEIGHT: Final = 3


@final
class Shares:
    def __init__(self, limit: int, weight: int) -> None:
        self._limit, self._weight = limit, weight
        self._of: Counter[bytes] = Counter()  # by caller, without zeros
        self.total = 0

    def fits(self, caller: bytes, amount: int, limit: int | None = None) -> bool:
        free = (self._limit if limit is None else limit) - self.total
        return amount <= free and self._of[caller] + amount <= self._weight * free

    def add(self, caller: bytes, amount: int) -> None:
        self._of[caller] += amount
        self.total += amount
        if not self._of[caller]:
            del self._of[caller]

    @contextmanager
    def connection(self, caller: bytes) -> Iterator[None]:
        """Raises Overloaded if the caller has its share of connections."""
        if not self.fits(caller, 1):
            raise Overloaded(f"{self._of[caller]} requests of this caller have a connection, of {self._limit}", RETRY_S)
        self.add(caller, 1)
        try:
            yield
        finally:
            self.add(caller, -1)

    @contextmanager
    def body(self, caller: bytes) -> Iterator[HeldBody]:
        """Gives everything back that the body added."""
        held = HeldBody(self, caller)
        try:
            yield held
        finally:
            self.add(caller, -held.num_bytes)

    def limit_of(self, num_bytes: int) -> int:
        """Large requests leave room for small ones."""
        return self._limit if num_bytes <= SMALL_BYTES else int(LARGE_SHARE * self._limit)


@final
class HeldBody:
    """The received bytes of one request."""

    def __init__(self, shares: Shares, caller: bytes) -> None:
        self._shares, self._caller = shares, caller
        self.num_bytes = 0

    def add(self, amount: int) -> None:
        """Raises Overloaded if the caller has its share. A single request always fits."""
        shares, size = self._shares, self.num_bytes + amount
        if shares.total > self.num_bytes and not shares.fits(self._caller, amount, shares.limit_of(size)):
            most = shares.limit_of(size)
            raise Overloaded(f"requests of {shares.total} bytes are being served, of {most} for all callers", RETRY_S)
        shares.add(self._caller, amount)
        self.num_bytes = size
