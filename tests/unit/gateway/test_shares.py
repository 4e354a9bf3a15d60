"""A caller that sends its bodies slowly takes its share of bytes and connections, and no more."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.core.errors import DeadlineExceeded, Overloaded
from pdserve.core.held_bytes import SMALL_BYTES
from pdserve.core.key_file import key_hash, make_key
from pdserve.gateway import body
from pdserve.gateway.shares import BYTES_WEIGHT, CONNECTIONS_WEIGHT, HeldBody, Shares
from tests.unit.gateway.conftest import Served, read_all, serve, until
from tests.unit.gateway.test_limits import OK, code_of, exchange, post, status_of

Connect = Callable[[str], socket.socket]
SLOW, OTHER = make_key(bytes([7] * 32)), make_key(bytes([8] * 32))


@pytest.mark.parametrize("weight", [BYTES_WEIGHT, CONNECTIONS_WEIGHT])
def test_a_caller_leaves_room_for_others(weight: int) -> None:
    shares, free = Shares(512, weight), 512
    for caller in (b"first", b"second", b"third"):
        taken = 0
        while shares.fits(caller, 1):
            shares.add(caller, 1)
            taken += 1
        assert 0 < taken <= free * weight // (weight + 1) + 1
        free -= taken
    assert free > 0


def test_bodies_are_charged_as_they_arrive_and_given_back() -> None:
    shares = Shares(12 * SMALL_BYTES, BYTES_WEIGHT)
    with shares.body(b"a") as first, shares.body(b"a") as second, shares.body(b"b") as other:
        first.add(6 * SMALL_BYTES)
        with pytest.raises(Overloaded, match="for all callers"):
            second.add(SMALL_BYTES + 1)
        second.add(1)
        assert shares.total == 6 * SMALL_BYTES + 1
        other.add(SMALL_BYTES)
    assert shares.total == 0
    with shares.body(b"a") as alone:
        alone.add(100 * SMALL_BYTES)
    assert shares.total == 0
    assert not shares._of


def test_a_body_has_time_as_it_arrives() -> None:
    assert body.time_for(0, 30.0) == body.GRACE_S
    assert body.time_for(10 * body.LEAST_RATE, 30.0) == body.GRACE_S + 10.0
    assert body.time_for(2**22, 30.0) == 30.0
    assert body.time_for(0, 0.3) == 0.3


async def test_a_body_that_arrives_in_tiny_parts_is_kept_once() -> None:
    parts = iter([{"type": "http.request", "body": b"ab", "more_body": True}] * 1000)

    async def receive() -> dict[str, object]:
        return next(parts, {"type": "http.request", "body": b"", "more_body": False})

    kept = HeldBody(Shares(10_000, BYTES_WEIGHT), b"")
    assert await body.read_body(receive, 4096, 30.0, kept) == b"ab" * 1000
    assert kept.num_bytes == 2000


async def test_a_slow_body_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "GRACE_S", 0.05)
    never = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> dict[str, object]:
        import asyncio

        return next(never, None) or await asyncio.Event().wait()  # type: ignore[return-value]

    with pytest.raises(DeadlineExceeded):
        await body.read_body(receive, 4096, 600.0, HeldBody(Shares(10_000, BYTES_WEIGHT), b""))


@pytest.fixture
def tenanted(tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "keys.json"
    tenants = {
        "slow": {"max_concurrent": 1, "keys": [{"sha256": key_hash(SLOW)}]},
        "beta": {"keys": [{"sha256": key_hash(OTHER)}]},
    }
    file.write_text(json.dumps({"tenants": tenants}))
    settings = {"max_connections": 16, "max_held_bytes": 2**20, "max_body_bytes": 2**18}
    with serve(token="operator", router={"key_file": str(file)}, body_s=600.0, **settings) as served:
        yield served


@pytest.mark.parametrize("declared", ["2", "262144"])
def test_a_tenants_open_bodies_keep_nobody_out(
    tenanted: Served, raw: Connect, declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "GRACE_S", 600.0)
    opened = [raw(tenanted.address) for _ in range(20)]
    for one in opened:
        one.sendall(post(b"", content_length=declared, authorization=f"Bearer {SLOW}", connection="keep-alive"))
    refused = 0
    for one in opened:
        one.settimeout(0.1)
        try:
            answer = read_all(one)
        except TimeoutError:
            continue
        refused += status_of(answer) in (429, 503)
    assert refused >= 8  # 12 of 16 are its share
    for key in (OTHER, "operator"):
        assert status_of(exchange(raw(tenanted.address), post(OK, authorization=f"Bearer {key}"))) == 200
    health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert status_of(exchange(raw(tenanted.address), health)) == 200
    for one in opened:
        one.close()
    until(lambda: status_of(exchange(raw(tenanted.address), post(OK, authorization=f"Bearer {SLOW}"))) == 200)


def test_received_bytes_are_shared(tenanted: Served, raw: Connect) -> None:
    """Of 1 MiB, three bodies of 250,000 bytes may wait for their last one: the fourth is over the caller's share."""
    opened = []
    for _ in range(3):
        opened.append(raw(tenanted.address))
        opened[-1].sendall(post(b" " * 250_000, content_length="250001", authorization=f"Bearer {SLOW}"))
    answers = []
    for one in opened:
        one.settimeout(0.5)
        try:
            answers.append(read_all(one))
        except TimeoutError:
            continue
    assert [(status_of(one), code_of(one)) for one in answers] == [(429, "overloaded")]
    large = json.dumps({"prompt": "hello", "max_tokens": 1}).encode() + b" " * 100_000
    assert status_of(exchange(raw(tenanted.address), post(large, authorization=f"Bearer {OTHER}"))) == 200
