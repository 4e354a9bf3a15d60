"""Chooses which client's work a child process does next, fairly among hosts, then among their clients. Pure: no clock.

Each host and each client has an account of the time that its work has used. Used time decays with a half-life of
HALF_LIFE_S. A client's next work is expected to take as long as its last; for an unknown client, as long as that of all
clients. The queue takes the host with the least sum of used and expected time, then its client with the least sum, then
that client's smallest item, or the oldest of those after which MOST_LATER others have come. So a client with slow
grammars waits behind all others, many connections from one host count as one host, and no item waits forever. Items
that were taken and not charged yet count with their expected time, because a process takes several at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

from pdserve.core.access.hosts import network_of
from pdserve.core.access.shares import BYTES_WEIGHT, COUNT_WEIGHT, Shares, caller_of
from pdserve.core.errors import Overloaded

HALF_LIFE_S: Final = 10.0
WEIGHT: Final = 0.3  # weight of the last check in the expected time of the next
MAX_ACCOUNTS: Final = 4096
MOST_LATER: Final = 64  # items that come later, after which an item's size no longer matters

Item = TypeVar("Item")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How many items may wait, and their size in total. Each host has a share of both
    (pdserve/core/access/shares.py)."""

    items: str  # what they are, in the plural
    most: int
    of_host: int
    of_client: int
    size: int


@final
@dataclass(frozen=True, slots=True)
class ClientKey:
    host: str
    name: str  # unique among all hosts


ANONYMOUS: Final = ClientKey("", "")


def client_of(peer: str, tenant: str = "") -> ClientKey:
    """The client of a call, by gRPC's name for the peer, such as `ipv4:127.0.0.1:4321`. Addresses of one IPv6 network
    (/64) count as one host. A tenant counts as one host and one client, because its calls may come through a gateway
    that also serves other tenants."""
    if tenant:
        name = caller_of(tenant)
        return ClientKey(name, name)
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ClientKey(peer, peer)
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").replace("%25", "%").strip("[]")
    try:
        return ClientKey(network_of(host), peer)
    except ValueError:
        return ClientKey(host, peer)


@final
class _Account:
    __slots__ = ("at_s", "next_s", "spent_s")

    def __init__(self) -> None:
        self.spent_s, self.at_s = 0.0, 0.0
        self.next_s: float | None = None  # expected time of the next item

    def at(self, now_s: float) -> float:
        return float(self.spent_s * 0.5 ** (max(0.0, now_s - self.at_s) / HALF_LIFE_S))

    def add(self, seconds: float, now_s: float) -> None:
        self.spent_s, self.at_s = self.at(now_s) + seconds, now_s
        self.next_s = seconds if self.next_s is None else self.next_s + WEIGHT * (seconds - self.next_s)


@final
class FairQueue(Generic[Item]):
    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._waiting: list[tuple[ClientKey, int, int, Item]] = []  # with the item's size and a number
        self._items, self._bytes = Shares(limits.most, COUNT_WEIGHT), Shares(limits.size, BYTES_WEIGHT)
        self._num_put = 0
        self._accounts: dict[str, _Account] = {}  # of hosts and clients
        self._all = _Account()
        self._of: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # items that were taken and not charged, of hosts and clients

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item, client: ClientKey, size: int, retry_after_s: float) -> None:
        """Raises Overloaded if too many wait: of this client, of its host, or in total. A single item has any size."""
        limits = self._limits
        host, name = _names(client)
        for whose, count, most in (
            ("this client", self._of[name], limits.of_client),
            ("this client's host", self._of[host], limits.of_host),
        ):
            if count >= most:
                raise Overloaded(f"{count} {limits.items} of {whose} wait, of {most} at most", retry_after_s)
        if not self._items.fits(client.host, 1):
            words = f"{len(self._waiting)} {limits.items} of all clients wait, of {limits.most} at most"
            raise Overloaded(words, retry_after_s)
        if self._waiting and not self._bytes.fits(client.host, size):
            words = f"{limits.items} of {self._bytes.total} bytes wait, of {limits.size} at most"
            raise Overloaded(words, retry_after_s)
        self._items.add(client.host, 1)
        self._bytes.add(client.host, size)
        self._num_put += 1
        self._waiting.append((client, size, self._num_put, item))
        self._of.update((host, name))

    def take(self, now_s: float) -> tuple[Item, ClientKey] | None:
        """Removes and returns the next item; None if the queue is empty. `charge` or `forget` follows."""
        if not self._waiting:
            return None
        num_early = self._num_put - MOST_LATER

        def key(entry: tuple[ClientKey, int, int, Item]) -> tuple[float, float, int, int]:
            client, size, number, _ = entry
            host, name = _names(client)
            account = self._accounts.get(name)
            expected_s = (account.next_s if account is not None else self._all.next_s) or 0.0
            return (
                self._spent(host, now_s) + expected_s * (1 + self._running[host]),
                self._spent(name, now_s) + expected_s * (1 + self._running[name]),
                size if number > num_early else 0,
                number,
            )

        entry = min(self._waiting, key=key)
        self._waiting.remove(entry)
        client = entry[0]
        self._items.add(client.host, -1)
        self._bytes.add(client.host, -entry[1])
        for name in _names(client):
            _count_down(self._of, name)
            self._running[name] += 1
        return entry[3], client

    def charge(self, client: ClientKey, seconds: float, now_s: float) -> None:
        """Records the time that this client's item took."""
        self.forget(client)
        self._all.add(seconds, now_s)
        for name in _names(client):
            self._accounts.setdefault(name, _Account()).add(seconds, now_s)
        if len(self._accounts) > MAX_ACCOUNTS:  # drops those with the least used time
            kept = sorted(self._accounts.items(), key=lambda one: -one[1].at(now_s))[: MAX_ACCOUNTS // 2]
            self._accounts = dict(kept)

    def forget(self, client: ClientKey) -> None:
        """The client's item took no time."""
        for name in _names(client):
            _count_down(self._running, name)

    def _spent(self, name: str, now_s: float) -> float:
        account = self._accounts.get(name)
        return 0.0 if account is None else account.at(now_s)


def _names(client: ClientKey) -> tuple[str, str]:
    """Of the accounts of the host and of the client."""
    return "host " + client.host, "client " + client.name


def _count_down(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if counter[name] <= 0:
        del counter[name]
