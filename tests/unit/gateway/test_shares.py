"""Tenants that send their bodies slowly take their shares of bytes and connections, and no more."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.access.shares import BYTES_WEIGHT, OPERATOR, HeldBody, Shares
from pdserve.core.errors import DeadlineExceeded
from pdserve.gateway import bodies
from tests.unit.gateway.conftest import Served, read_all, serve, until
from tests.unit.gateway.test_limits import OK, code_of, exchange, post, status_of

Connect = Callable[[str], socket.socket]
SLOW, OTHER, SLOW_2 = (make_key(bytes([number] * 32)) for number in (7, 8, 9))
MANY = [make_key(bytes([number] * 32)) for number in range(100, 116)]


def test_a_body_has_time_as_it_arrives() -> None:
    assert bodies.time_for(0, 30.0) == bodies.GRACE_S
    assert bodies.time_for(10 * bodies.LEAST_RATE, 30.0) == bodies.GRACE_S + 10.0
    assert bodies.time_for(2**22, 30.0) == 30.0
    assert bodies.time_for(0, 0.3) == 0.3


async def test_a_body_that_arrives_in_tiny_parts_is_kept_once() -> None:
    parts = iter([{"type": "http.request", "body": b"ab", "more_body": True}] * 1000)

    async def receive() -> dict[str, object]:
        return next(parts, {"type": "http.request", "body": b"", "more_body": False})

    kept = HeldBody(Shares(10_000, BYTES_WEIGHT), OPERATOR)
    assert await bodies.read_body(receive, 4096, 30.0, kept) == b"ab" * 1000
    assert kept.num_bytes == 2000


async def test_a_slow_body_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.05)
    never = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> dict[str, object]:
        import asyncio

        return next(never, None) or await asyncio.Event().wait()  # type: ignore[return-value]

    with pytest.raises(DeadlineExceeded):
        await bodies.read_body(receive, 4096, 600.0, HeldBody(Shares(10_000, BYTES_WEIGHT), OPERATOR))


@pytest.fixture
def tenanted(tmp_path: Path) -> Iterator[Served]:
    file = tmp_path / "keys.json"
    tenants = {
        "slow": {"max_concurrent": 1, "keys": [{"sha256": key_hash(key)} for key in (SLOW, SLOW_2)]},
        "beta": {"keys": [{"sha256": key_hash(OTHER)}]},
        **{f"t{number}": {"keys": [{"sha256": key_hash(key)}]} for number, key in enumerate(MANY)},
    }
    file.write_text(json.dumps({"tenants": tenants}))
    settings = {"max_connections": 16, "max_held_bytes": 2**20, "max_body_bytes": 2**18}
    with serve(token="operator", router={"key_file": str(file)}, body_s=600.0, **settings) as served:
        yield served


def get(path: str, key: str = "") -> bytes:
    head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return (head + (f"authorization: Bearer {key}\r\n" if key else "") + "\r\n").encode()


def open_bodies(
    served: Served, raw: Connect, keys: Sequence[str], most: int, declared: str = "2"
) -> list[socket.socket]:
    """Requests whose bodies do not come. Returns their connections that have no answer, once these are `most`."""
    opened = [raw(served.address) for _ in keys]
    for one, key in zip(opened, keys, strict=True):
        one.sendall(post(b"", content_length=declared, authorization=f"Bearer {key}", connection="keep-alive"))
    until(lambda: len(select.select(opened, [], [], 0)[0]) >= len(keys) - most)
    answered = select.select(opened, [], [], 0.1)[0]
    assert all(status_of(read_all(one)) in (429, 503) for one in answered)
    return [one for one in opened if one not in answered]


def status_with(served: Served, raw: Connect, key: str) -> int:
    return status_of(exchange(raw(served.address), post(OK, authorization=f"Bearer {key}")))


@pytest.mark.parametrize("declared", ["2", "262144"])
def test_a_tenants_open_bodies_keep_nobody_out(
    tenanted: Served, raw: Connect, declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 600.0)
    opened = open_bodies(tenanted, raw, [SLOW] * 12, 10, declared)
    assert len(opened) == 10  # of 16 connections
    assert [status_with(tenanted, raw, key) for key in (SLOW, OTHER, "operator")] == [429, 200, 200]
    for path, key in (("/health", ""), ("/metrics", "operator"), ("/load", "operator")):
        assert status_of(exchange(raw(tenanted.address), get(path, key))) == 200
    for one in opened:
        one.close()
    until(lambda: status_with(tenanted, raw, SLOW) == 200)


def test_a_tenant_with_two_keys_has_one_share(tenanted: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 600.0)
    assert len(open_bodies(tenanted, raw, [SLOW, SLOW_2] * 6, 10)) == 10
    assert [status_with(tenanted, raw, key) for key in (SLOW, SLOW_2, OTHER)] == [429, 429, 200]


def test_many_tenants_keep_no_operator_out(tenanted: Served, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 600.0)
    assert len(open_bodies(tenanted, raw, MANY, 13)) == 13
    assert status_with(tenanted, raw, OTHER) == 429
    assert status_with(tenanted, raw, "operator") == 200
    assert len(open_bodies(tenanted, raw, ["operator"] * 2, 1)) == 1
    assert status_with(tenanted, raw, "operator") == 429
    for path, key in (("/health", ""), ("/metrics", "operator"), ("/load", "operator")):
        assert status_of(exchange(raw(tenanted.address), get(path, key))) == 200
    assert status_of(exchange(raw(tenanted.address), get("/metrics", OTHER))) == 429


def test_received_bytes_are_shared(tenanted: Served, raw: Connect) -> None:
    """Of 1 MiB, half is the caller's share: two bodies of 250,000 bytes may wait for their last one, not three. If the
    bodies arrive together, two may be rejected, because each waits with a part of the share."""
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
    assert {(status_of(one), code_of(one)) for one in answers} == {(429, "overloaded")}
    assert len(answers) < len(opened)
    large = json.dumps({"prompt": "hello", "max_tokens": 1}).encode() + b" " * 100_000
    assert status_of(exchange(raw(tenanted.address), post(large, authorization=f"Bearer {OTHER}"))) == 200
