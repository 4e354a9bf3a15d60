"""The order in which grammars are checked."""

from __future__ import annotations

import contextlib

import pytest

from pdserve.core.errors import Overloaded
from router.service.text import fair_queue
from router.service.text.fair_queue import HALF_LIFE_S, MOST_LATER, ClientKey, FairQueue, QueueLimits, client_of

LIMITS = QueueLimits(items="grammars", most=256, of_host=128, of_client=16, size=5000)


def put(queue: FairQueue[str], *items: str, host: str = "h", port: int = 1, size: int = 10) -> None:
    for item in items:
        queue.put(item, ClientKey(host, f"{host}:{port}"), size, 1.0)


def order(queue: FairQueue[str], now_s: float = 0.0) -> list[str]:
    taken = []
    while (one := queue.take(now_s)) is not None:
        taken.append(one[0])
    return taken


def test_without_history_the_shortest_grammar_goes_first() -> None:
    queue: FairQueue[str] = FairQueue(LIMITS)
    put(queue, "long", size=100)
    put(queue, "b", "c", size=10)
    put(queue, "short", size=1)
    assert order(queue) == ["short", "b", "c", "long"]
    assert queue.take(0.0) is None


def test_the_least_served_host_goes_first() -> None:
    queue: FairQueue[str] = FairQueue(LIMITS)
    for _ in range(5):
        queue.charge(ClientKey("busy", "busy:1"), 1.0, 0.0)
    queue.charge(ClientKey("h", "h:1"), 1.0, 0.0)
    put(queue, "from a new connection of a busy host", host="busy", port=2)
    put(queue, "from a client that used some")
    put(queue, "from its neighbour", port=2, size=50)
    put(queue, "from a newcomer", host="new", size=99)
    assert order(queue) == [
        "from a newcomer",
        "from its neighbour",
        "from a client that used some",
        "from a new connection of a busy host",
    ]


def test_many_slow_clients_do_not_delay_another() -> None:
    """The other client is on the same host, and is served before most of the slow clients."""
    queue: FairQueue[str] = FairQueue(LIMITS)
    quick = ClientKey("h", "h:99")
    for port in range(24):
        put(queue, f"slow {port}", port=port)
    served: list[str] = []
    for step in range(60):
        if step in (3, 20, 40, 41):
            queue.put("quick", quick, 500, 1.0)
        taken = queue.take(float(step))
        assert taken is not None
        item, client = taken
        served.append(item)
        is_slow = client != quick
        queue.charge(client, 0.5 if is_slow else 0.01, float(step))
        if is_slow:
            queue.put(item, client, 10, 1.0)  # Each sends another grammar at once.
    # At first nothing is known about any client. Later the fast client is served before all slow ones.
    assert [at for at, item in enumerate(served) if item == "quick"] == [24, 25, 40, 41]


def test_a_large_item_does_not_wait_for_all_that_come_later() -> None:
    queue: FairQueue[str] = FairQueue(LIMITS)
    put(queue, "large", size=100)
    served: list[str] = []
    while "large" not in served:
        put(queue, f"small {len(served)}")
        taken = queue.take(0.0)
        assert taken is not None
        served.append(taken[0])
        queue.charge(taken[1], 0.01, 0.0)
        assert len(served) <= MOST_LATER
    assert len(served) == MOST_LATER, "size decides among items that are not late"


def test_items_that_are_running_count() -> None:
    """A process takes several items before the first of them is charged."""
    queue: FairQueue[str] = FairQueue(LIMITS)
    for host in "ab":
        queue.charge(ClientKey(host, f"{host}:1"), 1.0, 0.0)
        put(queue, f"{host}1", f"{host}2", f"{host}3", host=host)
    assert order(queue) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_used_time_decays() -> None:
    queue: FairQueue[str] = FairQueue(LIMITS)
    queue.charge(ClientKey("a", "a:1"), 4.0, 0.0)
    queue.charge(ClientKey("b", "b:1"), 1.5, HALF_LIFE_S)
    put(queue, "a", host="a")
    put(queue, "b", host="b")
    assert order(queue, HALF_LIFE_S) == ["b", "a"]
    for host in "ab":
        queue.forget(ClientKey(host, f"{host}:1"))
    put(queue, "a", host="a")
    put(queue, "b", host="b")
    queue.charge(ClientKey("b", "b:1"), 3.0, HALF_LIFE_S)
    assert order(queue, HALF_LIFE_S) == ["a", "b"]


def test_clients_hosts_and_the_queue_have_limits() -> None:
    queue: FairQueue[str] = FairQueue(LIMITS)
    for _ in range(LIMITS.of_client):
        put(queue, "x")
    with pytest.raises(Overloaded, match=f"{LIMITS.of_client} grammars of this client wait"):
        put(queue, "x")
    for port in range(2, 2 + LIMITS.of_host - LIMITS.of_client):
        put(queue, "x", port=port)
    with pytest.raises(Overloaded, match=f"{LIMITS.of_host} grammars of this client's host"):
        put(queue, "x", port=5000)
    for number in range(LIMITS.most - LIMITS.of_host):
        put(queue, "x", host=f"h{number}")
    with pytest.raises(Overloaded, match=f"{LIMITS.most} grammars of all clients"):
        put(queue, "x", host="late")
    assert len(order(queue)) == LIMITS.most
    put(queue, "x")
    assert len(queue) == 1


def test_tenants_leave_room_in_the_queue_for_others() -> None:
    limits = QueueLimits(items="texts", most=64, of_host=64, of_client=64, size=64_000)
    for size in (1, 1000, 10_000):  # the number or the bytes are used up first
        queue: FairQueue[str] = FairQueue(limits)
        put(queue, "first", host="tenant greedy", size=size)
        with pytest.raises(Overloaded, match="texts of"):
            put(queue, *["x"] * 64, host="tenant greedy", size=size)
        put(queue, "other", host="tenant small")
        with pytest.raises(Overloaded):
            put(queue, *[f"{number}" for number in range(64)], host="tenant third")
        for number in range(64):
            with contextlib.suppress(Overloaded):
                put(queue, "x", host=f"tenant {number}", size=1)
        put(queue, "operator", host="10.0.0.1", size=10)
        order(queue)
        queue._items.check()
        queue._bytes.check()
        assert queue._items.total == queue._bytes.total == 0


def test_accounts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_ACCOUNTS", 8)
    queue: FairQueue[str] = FairQueue(LIMITS)
    for number in range(100):
        queue.charge(ClientKey(f"h{number}", f"h{number}:1"), 0.1 if number else 9.0, 0.0)
    assert len(queue._accounts) <= 8
    put(queue, "large", host="h0")
    put(queue, "new", host="n")
    assert order(queue) == ["new", "large"]


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4321", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4321", "::1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:4321", "2001:db8:1:2::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("odd", "odd"),
    ],
)
def test_the_host_is_parsed_from_the_peer_name(peer: str, host: str) -> None:
    assert client_of(peer) == ClientKey(host, peer)
