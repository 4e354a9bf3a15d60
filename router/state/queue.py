"""The order of waiting requests, and fairness between tenants. Pure.

    1. level     requests whose client already has tokens; then priority classes, the highest first
    2. on time   requests that can still meet their target, before those that cannot: otherwise one late request makes
                 the next one late (under overload, an order by deadline alone makes every request late)
    3. tenant    a tenant that is ahead of the least served waiting tenant yields (Fairness)
    4. key       the smallest one: when the first token is due, or the order of arrival

Ageing: while late requests wait, LATE_SHARE of the placed work is credited to the late request that arrived first, of
any level and tenant. That request is placed next when the credit covers its prefill.

Bound on waiting. A waiting request becomes late at `late_at_s`, whatever the other requests are. Let W be its prefill
seconds plus those of all earlier requests that still wait then. It is first at the latest when others with W /
LATE_SHARE prefill seconds were placed: each of these seconds adds LATE_SHARE of credit, and only earlier requests use
up credit, each at most its own part of W. So requests with stricter targets, of higher classes or of less served
tenants cannot make it wait forever.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from typing import Final, NamedTuple, final

# --- fairness between tenants ---------------------------------------------------------------------------------
# It is measured by the predicted GPU-seconds that each tenant has received. A tenant that is ahead of the least served
# waiting tenant by more than a quantum yields to it. `_level` never decreases, and no waiting tenant is below it. An
# idle tenant that returns starts at `_level`, so idle time earns no credit, and idle tenants that are not above it need
# not be stored.

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


# --- order of waiting requests --------------------------------------------------------------------------------

LATE_SHARE: Final = 0.05
NEVER_S: Final = float("inf")
ROUNDING_S: Final = 1e-9

Level = tuple[int, int]  # (0 if the client already has tokens, else 1; minus the priority)


class Entry(NamedTuple):
    """What determines the position of a waiting request. Sorts by key, then by order of arrival."""

    key: float
    serial: int
    request_id: str
    level: Level
    tenant: str = ""
    prefill_s: float = 0.0  # predicted, on an unloaded cluster
    late_at_s: float = NEVER_S  # if it is placed later than this, it misses its TTFT target


class _Group:
    """The entries of one level."""

    __slots__ = ("late", "on_time")

    def __init__(self) -> None:
        self.on_time: dict[str, list[Entry]] = {}  # tenant -> sorted entries; no list is empty
        self.late: list[Entry] = []  # in order of arrival


@final
class Queue:
    def __init__(self, *, is_ageing: bool = True) -> None:
        self._is_ageing = is_ageing
        self._entries: dict[str, Entry] = {}
        self._late: set[str] = set()
        self._groups: dict[Level, _Group] = {}
        self._levels: list[Level] = []  # sorted
        self._due: list[tuple[float, int, str]] = []  # heap of late_at_s; may contain removed requests
        self._late_credit_s = 0.0  # prefill seconds that late requests may take before others
        self.fairness = Fairness()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[str]:
        """In the order of levels and keys, ignoring tenants."""
        return (entry.request_id for level in self._levels for entry in self.at_level(level))

    @property
    def num_on_time(self) -> int:
        return len(self._entries) - len(self._late)

    @property
    def on_time_s(self) -> float:
        """Prefill seconds of the requests that can still be on time."""
        return sum(entry.prefill_s for entry in self._entries.values() if entry.request_id not in self._late)

    @property
    def levels(self) -> list[Level]:
        return self._levels

    def entry(self, request_id: str) -> Entry:
        return self._entries[request_id]

    def is_late(self, request_id: str) -> bool:
        return request_id in self._late

    def at_level(self, level: Level) -> list[Entry]:
        """In order, ignoring tenants."""
        group = self._groups[level]
        return [*self.on_time(level), *group.late]

    def on_time(self, level: Level) -> list[Entry]:
        """In order, ignoring tenants."""
        lists = list(self._groups[level].on_time.values()) if level in self._groups else []
        return lists[0] if len(lists) == 1 else sorted(entry for one in lists for entry in one)

    # -- adding and removing ----------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        assert entry.request_id not in self._entries, entry.request_id
        self._entries[entry.request_id] = entry
        group = self._groups.get(entry.level)
        if group is None:
            group = self._groups[entry.level] = _Group()
            insort(self._levels, entry.level)
        insort(group.on_time.setdefault(entry.tenant, []), entry)
        if entry.late_at_s < NEVER_S:
            if len(self._due) > 2 * len(self._entries) + 64:
                held = self._entries
                self._due = [one for one in self._due if one[2] in held and held[one[2]].serial == one[1]]
                heapq.heapify(self._due)
            heapq.heappush(self._due, (entry.late_at_s, entry.serial, entry.request_id))
        self.fairness.joins(entry.tenant)

    def remove(self, request_id: str) -> bool:
        """False: the request is not in the queue."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        group = self._groups[entry.level]
        if request_id in self._late:
            self._late.discard(request_id)
            del group.late[bisect_left(group.late, entry.serial, key=_serial)]
        else:
            self._leave_on_time(group, entry)
        if not group.on_time and not group.late:
            del self._groups[entry.level]
            self._levels.remove(entry.level)
        if not self._late:
            self._late_credit_s = 0.0
        self.fairness.leaves(entry.tenant)
        return True

    def take(self, request_id: str) -> None:
        """Removes a placed request. Its work counts for the ageing of late requests."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if self._late:
            if self._oldest_late() is entry:
                self._late_credit_s = max(self._late_credit_s - entry.prefill_s, 0.0)
            else:
                self._late_credit_s += LATE_SHARE * entry.prefill_s
        self.remove(request_id)

    def late_ahead_s(self, request_id: str) -> float:
        """Prefill seconds of the late requests that arrived before this one."""
        serial, entries = self._entries[request_id].serial, self._entries
        return sum(entries[one].prefill_s for one in self._late if entries[one].serial < serial)

    def turn_late(self, request_id: str) -> None:
        """Marks the request as late, so requests that can meet their target go first."""
        if request_id in self._late:
            return
        entry = self._entries[request_id]
        group = self._groups[entry.level]
        self._leave_on_time(group, entry)
        insort(group.late, entry, key=_serial)
        self._late.add(request_id)

    def mark_newly_late(self, now_s: float) -> list[str]:
        """Marks the requests whose latest time to start has passed as late, and returns them."""
        turned = []
        while self._due and self._due[0][0] <= now_s:
            _, serial, request_id = heapq.heappop(self._due)
            entry = self._entries.get(request_id)
            if entry is not None and entry.serial == serial and entry.late_at_s <= now_s:
                if request_id not in self._late:
                    turned.append(request_id)
                self.turn_late(request_id)
        return turned

    # -- the next request ----------------------------------------------------------------------------------------

    def first(self, passed: Container[str] = ()) -> str | None:
        """The first request that is not in `passed`."""
        if self._late and self._is_ageing and self._late_credit_s > 0.0:
            oldest = self._oldest_late()
            if oldest.prefill_s <= self._late_credit_s + ROUNDING_S and oldest.request_id not in passed:
                return oldest.request_id
        for level in self._levels:
            group = self._groups[level]
            heads = [head for head in (_head(one, passed) for one in group.on_time.values()) if head is not None]
            if len(heads) > 1:
                in_turn = set(self.fairness.in_turn(head.tenant for head in heads))
                heads = [head for head in heads if head.tenant in in_turn]
            if heads:
                return min(heads).request_id
            late = _head(group.late, passed)
            if late is not None:
                return late.request_id
        return None

    # -- inside --------------------------------------------------------------------------------------------------

    def _oldest_late(self) -> Entry:
        return min((group.late[0] for group in self._groups.values() if group.late), key=_serial)

    @staticmethod
    def _leave_on_time(group: _Group, entry: Entry) -> None:
        entries = group.on_time[entry.tenant]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del group.on_time[entry.tenant]

    def check(self) -> None:
        assert self._levels == sorted(self._groups), "levels are not in order"
        seen = []
        for level, group in self._groups.items():
            assert all(group.on_time.values()), "an empty list is kept"
            for tenant, entries in group.on_time.items():
                assert entries == sorted(entries), "the queue is not in order"
                assert all((one.level, one.tenant) == (level, tenant) for one in entries), "misplaced"
                seen += [one.request_id for one in entries]
            assert group.late == sorted(group.late, key=_serial), "late requests are not in order of arrival"
            assert {one.request_id for one in group.late} <= self._late, "a late request is not marked as late"
            seen += [one.request_id for one in group.late]
        assert sorted(seen) == sorted(self._entries), "a request is lost, or queued twice"
        assert self._late <= self._entries.keys(), "a removed request is marked as late"
        assert self._late or not self._late_credit_s, "there is credit without a late request"
        self.fairness.check()


def _serial(entry: Entry) -> int:
    return entry.serial


def _head(entries: list[Entry], passed: Container[str]) -> Entry | None:
    for entry in entries:
        if entry.request_id not in passed:
            return entry
    return None
