"""Shares of what all callers use before their quotas are known, so that none takes all of it: pools, and places for
connections that wait. Pure.

Dynamic thresholds (Choudhury and Hahne, 1998): a caller may hold at most `weight` times what is free. So one caller
gets at most weight / (weight + 1) of the pool, and the next one the same share of the rest.

A caller is a tenant, however many keys and connections it has. Everyone else is an operator: callers with the
operator's token, and all callers if there are no tenants. A part of the pool is kept for operators, so that no number
of tenants takes it. Another part may be kept for what operators look at and control.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, TypeVar, final

from pdserve.core.errors import Overloaded

RETRY_S: Final = 1.0
BYTES_WEIGHT: Final = 2
COUNT_WEIGHT: Final = 3  # of connections and of items in a queue
OPERATOR: Final = "operator"
CONTROL: Final = "control"  # operators' calls that are no requests to the model
KEPT_SHARE: Final = 16  # one of so many is kept
SMALL_BYTES: Final = 65_536
LARGE_SHARE: Final = 0.75  # share of the limit for requests over SMALL_BYTES, which leaves room for small ones
_TENANT: Final = "tenant "


def caller_of(tenant: str) -> str:
    return _TENANT + tenant if tenant else OPERATOR


def kept_of(limit: int) -> int:
    """The part of a pool that is kept for some of its callers. A very small pool keeps nothing."""
    return limit // KEPT_SHARE or int(limit >= KEPT_SHARE // 2)


@final
class Shares:
    def __init__(self, limit: int, weight: int, *, is_controlled: bool = False) -> None:
        """`is_controlled`: a part is kept for CONTROL too."""
        self._weight, self._groups = weight, (OPERATOR, CONTROL) if is_controlled else (OPERATOR,)
        self.limit = limit  # may change: a lower one rejects what comes, and takes nothing back
        self._of: Counter[str] = Counter()  # by caller, without zeros
        self._of_group: Counter[str] = Counter()  # of the callers for whom a part is kept
        self.total = 0

    def fits(self, caller: str, amount: int, limit: int | None = None) -> bool:
        own, more, group = self._of[caller] + amount, amount, _group_of(caller)
        if group is not None:
            used = self._of_group[group]
            beyond = self._beyond(group, used + amount)
            own, more = min(own, beyond), beyond - self._beyond(group, used)
            if not more:
                return True
        free = (self.limit if limit is None else limit) - self.total
        free -= sum(max(kept_of(self.limit) - self._of_group[one], 0) for one in self._groups)
        return more <= free and own <= self._weight * free

    def add(self, caller: str, amount: int) -> None:
        self._of[caller] += amount
        self.total += amount
        if not self._of[caller]:
            del self._of[caller]
        group = _group_of(caller)
        if group is not None:
            self._of_group[group] += amount

    @contextmanager
    def connection(self, caller: str) -> Iterator[None]:
        """Raises Overloaded if the caller has its share of connections."""
        if not self.fits(caller, 1):
            raise Overloaded(f"{self._of[caller]} requests of this caller have a connection, of {self.limit}", RETRY_S)
        self.add(caller, 1)
        try:
            yield
        finally:
            self.add(caller, -1)

    @contextmanager
    def body(self, caller: str, num_bytes: int = 0) -> Iterator[HeldBody]:
        """A request of which `num_bytes` have arrived. Gives everything back that was added. Raises Overloaded."""
        held = HeldBody(self, caller)
        try:
            held.add(num_bytes)
            yield held
        finally:
            self.add(caller, -held.num_bytes)

    def limit_of(self, num_bytes: int) -> int:
        """Large requests leave room for small ones."""
        return self.limit if num_bytes <= SMALL_BYTES else int(LARGE_SHARE * self.limit)

    def check(self) -> None:
        assert self.total == sum(self._of.values()), "the total of the shares"
        assert all(amount > 0 for amount in self._of.values()), "a caller has a negative share"

    def _beyond(self, group: str, amount: int) -> int:
        """What callers who hold `amount` have taken of the part that all callers use."""
        return max(amount - (kept_of(self.limit) if group in self._groups else 0), 0)


@final
class HeldBody:
    """The received bytes of one request."""

    def __init__(self, shares: Shares, caller: str) -> None:
        self._shares, self._caller = shares, caller
        self.num_bytes = 0

    def add(self, amount: int) -> None:
        """Raises Overloaded if the caller has its share. A single request always fits."""
        if not amount:
            return
        shares, size = self._shares, self.num_bytes + amount
        if shares.total > self.num_bytes and not shares.fits(self._caller, amount, shares.limit_of(size)):
            most = shares.limit_of(size)
            raise Overloaded(f"requests of {shares.total} bytes are being served, of {most} for all callers", RETRY_S)
        shares.add(self._caller, amount)
        self.num_bytes = size


def _group_of(caller: str) -> str | None:
    if caller.startswith(_TENANT):
        return None
    return CONTROL if caller == CONTROL else OPERATOR


# --- places of connections that wait --------------------------------------------------------------------------
# Which connection is closed when too many wait: those without a request, or without a proof of the secret.
#
# A connection that sends nothing costs its caller the least. So a flood of these can take only a quarter of the places
# from those that have sent something.

SILENT_SHARE: Final = 4  # the silent ones keep one of so many places
_Silent = TypeVar("_Silent")
_Active = TypeVar("_Active")


def closes_silent(num_silent: int, num_active: int) -> bool:
    """Whether one that has sent nothing makes room, rather than one that has."""
    return (SILENT_SHARE - 1) * num_silent > num_active


def to_close(
    silent: Mapping[_Silent, str], active: Mapping[_Active, str], expected: Mapping[str, int] = MappingProxyType({})
) -> _Silent | _Active | None:
    """Each connection with its caller's host; those to close first come first. `expected`: how many connections of a
    host are known to be honest. The host with the most others loses its first one, so no host takes the places of
    others."""
    is_silent = closes_silent(len(silent), len(active))
    return first_to_close(silent, expected) if is_silent else first_to_close(active, expected)


def first_to_close(
    waiting: Mapping[_Silent, str], expected: Mapping[str, int] = MappingProxyType({})
) -> _Silent | None:
    """As in `to_close`. Takes a time in proportion to the connections."""
    num_of = {host: max(num - expected.get(host, 0), 0) for host, num in Counter(waiting.values()).items()}
    most = max(num_of.values(), default=0)
    return next((one for one, host in waiting.items() if num_of[host] == most), None)
