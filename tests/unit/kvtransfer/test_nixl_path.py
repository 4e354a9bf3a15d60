"""nixl with a slow, failing or late library: over a stand-in, and once with a real peer that is killed."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable

import pytest

from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports import nixl
from kvtransfer.transports.nixl import Nixl
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.fake_nixl import FakeHandle, World
from tests.unit.kvtransfer.harness import BLOCK_BYTES, GrpcHost, Heard, HostPool, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.peer import grant as grant_of_peer
from tests.unit.kvtransfer.process import Process

MakePair = Callable[..., Pair]


BLOCKS = tuple(range(10, 20))


@pytest.fixture
def pair(make_pair: MakePair, nixl_world: World) -> Pair:
    """Two connected ends."""
    pair = make_pair("nixl")
    assert pair.move(pair.grant((1, 2)), (1, 2))[0].outcome is ReceiveOutcome.VERIFIED
    return pair


def begin_slow(pair: Pair, world: World) -> tuple[Heard, Heard, FakeHandle]:
    """Begins a transfer into BLOCKS whose only read makes no progress."""
    world.gate.clear()
    before = len(world.handles)
    grant = pair.grant(BLOCKS)
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, list(enumerate(range(10))), True)
    wait_for(lambda: len(world.handles) > before, "the read")
    return received, sent, world.handles[-1]


def assert_untouched(pair: Pair) -> None:
    assert all(pair.target.block(block) == bytes(BLOCK_BYTES) for block in BLOCKS)


def test_an_abort_drains_an_open_read(pair: Pair, nixl_world: World) -> None:
    received, sent, handle = begin_slow(pair, nixl_world)
    pair.receiver.abort(pair.receiver.open_keys[0])
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    assert sent.wait().outcome is SendOutcome.FAILED
    assert not handle.is_released
    nixl_world.gate.set()
    wait_for(lambda: handle.is_released, "the end of the read")
    again, _ = pair.move(pair.grant((30,)), (5,))
    assert again.outcome is ReceiveOutcome.VERIFIED, "by the same connection"
    assert_untouched(pair)


def test_an_aborting_nixl_sender_frees_its_blocks_at_once(pair: Pair, nixl_world: World) -> None:
    received, sent, handle = begin_slow(pair, nixl_world)
    pair.sender.abort(pair.sender.open_keys[0])
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert not handle.is_released
    nixl_world.gate.set()
    assert pair.move(pair.grant((30,)), (5,))[0].outcome is ReceiveOutcome.VERIFIED
    assert_untouched(pair)


@pytest.mark.parametrize("failing", ["ERR", "NIXL_ERR_REMOTE_DISCONNECT"])
def test_a_failed_read_ends_the_connection(pair: Pair, nixl_world: World, failing: str) -> None:
    """The next connection reuses its staging, and must not accept the late bytes either."""
    nixl_world.failing = failing
    grant = pair.grant(BLOCKS)
    received, sent = pair.move(grant, tuple(range(10)))
    expected = "its state is ERR" if failing == "ERR" else failing
    assert received.outcome is ReceiveOutcome.FAILED
    assert received.error == f"sender p0: a NIXL read failed: {expected}"
    assert sent.outcome is SendOutcome.FAILED
    failed = nixl_world.handles[-1]
    assert failed.is_released
    nixl_world.failing = None
    wait_for(lambda: not pair.receiver.peers, "the connection's end")
    again = pair.grant(tuple(range(30, 40)))
    received, _ = pair.move(again, tuple(range(40, 50)))
    assert received.outcome is ReceiveOutcome.VERIFIED
    failed.receive()
    assert_untouched(pair)
    pair.assert_equal(again, tuple(range(40, 50)))


def test_late_bytes_in_staging_fail_the_checksum(
    make_pair: MakePair, nixl_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("nixl")
    nixl_world.failing = "ERR"
    pair.move(pair.grant(BLOCKS), tuple(range(10)))  # The first chunk of its connection, like the next one.
    late = nixl_world.handles[-1]
    [(at, _, num_bytes)] = late.runs
    nixl_world.failing = None
    wait_for(lambda: not pair.receiver.peers, "the connection's end")
    copy = nixl.copy

    def late_copy(destination: list[memoryview], source: list[memoryview]) -> None:
        assert (ctypes.addressof(ctypes.c_char.from_buffer(source[0])), len(source[0])) == (at, num_bytes)
        late.receive()
        copy(destination, source)

    monkeypatch.setattr(nixl, "copy", late_copy)
    received, sent = pair.move(pair.grant(tuple(range(30, 40))), tuple(range(40, 50)))
    assert received.outcome is ReceiveOutcome.FAILED
    assert received.error.startswith("checksum mismatch in blocks")
    assert sent.outcome is SendOutcome.FAILED


def test_a_dead_senders_read_ends_in_staging(pair: Pair, make_pair: MakePair, nixl_world: World) -> None:
    received, _, handle = begin_slow(pair, nixl_world)
    [agent] = [one for one in nixl_world.agents if one.remotes]
    before = len(agent.remotes)
    pair.sender.close()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    wait_for(lambda: not pair.receiver.peers, "the connection's end")
    assert not handle.is_released
    assert len(agent.remotes) == before, "an agent of which something is read is not forgotten"
    other = make_pair("nixl")
    heard, _ = other.begin(other.grant((5,)))
    other.sender.push(other.receiver.open_keys[0], [(0, 9)], True)
    wait_for(lambda: len(nixl_world.handles) > nixl_world.handles.index(handle) + 1, "the other read")
    assert staging_of(nixl_world.handles[-1]) != staging_of(handle), "what may still be written is not shared"
    nixl_world.gate.set()
    assert heard.wait().outcome is ReceiveOutcome.VERIFIED
    wait_for(lambda: handle.is_released, "the late end")
    other.sender.close()
    wait_for(lambda: not agent.remotes, "the agent of which nothing is read any more to be forgotten")
    assert_untouched(pair)


def staging_of(handle: FakeHandle) -> int:
    assert handle.runs
    return handle.runs[0][0]


def test_a_read_that_does_not_end_ends_its_connection_alone(
    pair: Pair, make_pair: MakePair, nixl_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "READ_S", 0.1)
    received, _, handle = begin_slow(pair, nixl_world)
    monkeypatch.undo()
    nixl_world.gate.clear()
    heard = received.wait()
    assert heard.outcome is ReceiveOutcome.FAILED
    assert "a NIXL read has not ended in" in heard.error
    assert not handle.is_released
    nixl_world.gate.set()
    wait_for(lambda: handle.is_released, "the end of the read")
    assert_untouched(pair)


def test_a_source_block_that_changes_while_it_is_read_fails_the_checksum(pair: Pair, nixl_world: World) -> None:
    received, sent, _ = begin_slow(pair, nixl_world)
    pair.source.fill((4,), 0xEE)
    nixl_world.gate.set()
    assert received.wait().error.startswith("checksum mismatch in blocks")
    assert sent.wait().outcome is SendOutcome.FAILED


def hello(**changes: int | bytes) -> bytes:
    told: dict[str, int | bytes] = {"magic": b"PDKX", "blocks": 64, "block_bytes": BLOCK_BYTES, "address": 4096}
    told |= {"size": 8, "metadata": b"garbage!"} | changes
    metadata = told.pop("metadata")
    assert isinstance(metadata, bytes)
    return nixl._HELLO.pack(*told.values()) + metadata


@pytest.mark.parametrize(
    "words",
    [
        hello(),
        hello(magic=b"PDKC"),
        hello(blocks=0),
        hello(block_bytes=2 * BLOCK_BYTES),
        hello(size=0),
        hello(size=2**32 - 1),
    ],
    ids=["metadata that is none", "another path", "no blocks", "other blocks", "no metadata", "endless metadata"],
)
def test_an_invalid_nixl_handshake_is_rejected(pair: Pair, monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    def lie(self: Nixl, sock: socket.socket, pool: HostPool) -> None:
        sock.sendall(words)
        raise OSError("taken" if sock.recv(4) else "refused")

    monkeypatch.setattr(Nixl, "sender", lie)
    liar, sent = (
        make_sender(endpoint_config(HostPool(64), fingerprint(), worker_id="p1", incarnation="1", transport="nixl")),
        Heard(),
    )
    liar.start(pair.grant((5,)), sent)
    assert sent.wait().error.endswith(("refused", "Connection reset by peer"))
    liar.close()
    wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the count")
    assert pair.move(pair.grant((6,)), (9,))[0].outcome is ReceiveOutcome.VERIFIED, "others are not disturbed"


def test_unregistered_blocks_are_rejected(pair: Pair, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    export = nixl.Agent.export
    monkeypatch.setattr(nixl.Agent, "export", lambda *given: export(*given)._replace(address=2**40))
    lying = make_pair("nixl")
    received, sent = lying.move(lying.grant((5,)), (9,))
    assert received.outcome is ReceiveOutcome.FAILED
    assert received.error == "sender p0: a NIXL read failed: NIXL_ERR_NOT_FOUND"
    assert sent.outcome is SendOutcome.FAILED
    monkeypatch.undo()


def test_after_a_killed_sender_the_next_one_works(
    start_process: Callable[..., Process], make_pair: MakePair, prepared: Callable[[str], str]
) -> None:
    num_blocks = 16_384  # 64 MiB in 16 chunks.
    transport = prepared("nixl")
    target = HostPool(num_blocks)
    receiver = make_receiver(
        endpoint_config(target, fingerprint(), worker_id="d0", incarnation="d0-1", transport=transport),
        host="127.0.0.1",
    )
    host, received = GrpcHost(receiver.servicer), Heard()
    receiver.expect(grant_of_peer(host.endpoint, num_blocks), received)
    sender = start_process("sender", transport, host.endpoint, str(num_blocks))
    assert sender.say() == {"ready": True}
    wait_for(lambda: receiver.stats.chunks >= 3, "some chunks")
    sender.kill()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    wait_for(lambda: not receiver.peers, "the connection's end")
    receiver.close()
    host.stop()
    pair = make_pair(transport)
    grant = pair.grant(BLOCKS)
    assert pair.move(grant, tuple(range(10)))[0].outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, tuple(range(10)))
