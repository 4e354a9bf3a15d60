"""Fairness between tenants, by the predicted GPU-seconds that each has received.

Pure. A tenant that is ahead of the least served waiting tenant by more than a quantum yields to it. `_level` never
decreases, and no waiting tenant is below it. An idle tenant that returns starts at `_level`, so idle time earns no
credit, and idle tenants that are not above it need not be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

QUANTUM_REQUESTS: Final = 2.0  # a quantum is the work of this many mean requests
MAX_IDLE: Final = 1024  # number of stored idle tenants, those that are furthest ahead
GAIN: Final = 0.02  # weight of each new request in the mean


@final
class Fairness:
    __slots__ = ("_charged", "_level", "_mean_s", "_served_s", "_waiting")

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._waiting: dict[str, int] = {}  # tenant -> its requests that wait
        self._level = 0.0
        self._mean_s = 0.0
        self._charged = 0

    def __len__(self) -> int:
        """Number of stored tenants."""
        return len(self._served_s)

    def served_s(self, tenant: str) -> float:
        """GPU-seconds that the tenant has received, relative to a zero that all tenants share."""
        return self._served_s.get(tenant, self._level)

    @property
    def quantum_s(self) -> float:
        return QUANTUM_REQUESTS * self._mean_s

    def is_ahead(self, tenant: str, other: str) -> bool:
        """Whether `tenant` yields to `other` while both wait."""
        return self.served_s(tenant) > self.served_s(other) + self.quantum_s

    def in_turn(self, tenants: Iterable[str]) -> list[str]:
        """The tenants among `tenants` that yield to no other of them."""
        served = [(self.served_s(one), one) for one in tenants]
        limit_s = min(served)[0] + self.quantum_s
        return [one for seconds, one in served if seconds <= limit_s]

    def joins(self, tenant: str) -> None:
        """One more request of the tenant waits."""
        self._served_s[tenant] = max(self.served_s(tenant), self._level)
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1

    def leaves(self, tenant: str) -> None:
        """One request of the tenant no longer waits."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._raise_level(self._level)
            self._forget()

    def charge(self, tenant: str, work_s: float) -> None:
        """One request of the tenant was placed."""
        before_s = self.served_s(tenant)
        self._served_s[tenant] = before_s + work_s
        self._charged += 1
        self._mean_s += max(GAIN, 1.0 / self._charged) * (work_s - self._mean_s)
        self._raise_level(before_s)

    def correct(self, tenant: str, by_s: float) -> None:
        """Corrects a charge."""
        self._served_s[tenant] = max(self.served_s(tenant) + by_s, self._level)
        self._raise_level(self._level)
        self._forget()

    def _raise_level(self, otherwise_s: float) -> None:
        served = self._served_s
        least_s = min([served[one] for one in self._waiting]) if self._waiting else otherwise_s
        self._level = max(self._level, least_s)

    def _forget(self) -> None:
        served, waiting = self._served_s, self._waiting
        if len(served) <= len(waiting) + MAX_IDLE:
            return
        ahead = [(seconds, one) for one, seconds in served.items() if one not in waiting and seconds > self._level]
        kept = sorted(ahead, reverse=True)[: MAX_IDLE // 2]
        self._served_s = {one: served[one] for one in waiting} | {one: seconds for seconds, one in kept}

    def check(self) -> None:
        assert all(count > 0 for count in self._waiting.values()), "a tenant without requests is waiting"
        assert all(self._served_s[one] >= self._level for one in self._waiting), "a waiting tenant has credit"
        assert len(self._served_s) <= len(self._waiting) + MAX_IDLE, "tenants are not bounded"
