"""Effects of failures on memory and owners, on every transport."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtransfer.protocol.frames import Frame, Kind
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.v1 import transfer_pb2_grpc
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Clock, GrpcHost, Heard, HostPool, Pair, wait_for
from tests.unit.kvtransfer.process import Process

MakePair = Callable[..., Pair]
STAMP = 0x5A
MANY = 3 * DEFAULT_CHUNK_BYTES // BLOCK_BYTES  # Blocks for three chunks.


class Gate:
    """A proxy hook that forwards one chunk at a time, when a test allows it."""

    def __init__(self) -> None:
        self.held = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.is_open = False

    def __call__(self, frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK and not self.is_open:
            self.held.release()
            assert self.allowed.acquire(timeout=WAIT_S)
        return message

    def wait_for_chunk(self) -> None:
        assert self.held.acquire(timeout=WAIT_S)

    def open(self) -> None:
        self.is_open = True
        self.allowed.release(1000)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def test_nothing_is_written_after_drained(make_pair: MakePair, transport: str, gate: Gate) -> None:
    pair = make_pair(transport, num_blocks=MANY, hook=gate)
    blocks = tuple(range(MANY))
    grant = pair.grant(blocks)
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, list(enumerate(blocks)), True)
    gate.wait_for_chunk()
    gate.allowed.release()  # The first chunk arrives, and the second is held back on the wire.
    gate.wait_for_chunk()
    wait_for(lambda: pair.target.block(0) == pair.source.block(0), "the first chunk")
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    pair.target.fill(blocks, STAMP)
    gate.open()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert "aborted by the receiver" in sent.all[0].error
    wait_for(lambda: pair.receiver.stats.late_messages >= 1, "the late chunk")
    assert pair.move(pair.grant((), transfer_id="x"), ())[1].outcome is SendOutcome.SENT
    assert pair.target.memory == bytes([STAMP]) * len(pair.target.memory)
    assert received.outcomes == ["drained"]


@pytest.mark.parametrize("at_chunk", range(4))
def test_an_abort_at_any_moment_stops_all_writes(make_pair: MakePair, transport: str, at_chunk: int) -> None:
    """Without a proxy, so that the abort races with the writing thread."""
    pair = make_pair(transport, num_blocks=256, block_bytes=16_384)
    blocks = tuple(range(256))
    grant = pair.grant(blocks)
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, list(enumerate(blocks)), True)
    wait_for(lambda: pair.receiver.stats.chunks > at_chunk or bool(received.all), "some chunks")
    pair.receiver.abort(grant.key)
    end = received.wait()
    if end.outcome is ReceiveOutcome.VERIFIED:
        return  # The transfer was faster than the abort.
    pair.target.fill(blocks, STAMP)
    assert end.outcome is ReceiveOutcome.DRAINED
    assert sent.wait().outcome is SendOutcome.FAILED
    follower = pair.grant((255,), transfer_id="after")
    pair.receiver.expect(follower, after := Heard())
    pair.sender.start(follower, Heard())
    pair.sender.push(follower.key, [(0, 0)], True)
    assert after.wait().outcome is ReceiveOutcome.VERIFIED  # So every earlier chunk has been handled.
    assert pair.target.memory[: 255 * 16_384] == bytes([STAMP]) * (255 * 16_384)


def test_regranted_blocks_ignore_the_old_transfer(make_pair: MakePair, transport: str, gate: Gate) -> None:
    pair = make_pair(transport, num_blocks=64, hook=gate)
    old = pair.grant((1, 2, 3), transfer_id="r")
    received, sent = pair.begin(old)
    pair.sender.push(old.key, [(0, 10), (1, 11), (2, 12)], True)
    gate.wait_for_chunk()
    pair.receiver.abort(old.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    new = pair.grant((1, 2, 3), transfer_id="r")
    received, _ = pair.begin(new)
    pair.sender.push(new.key, [(0, 20), (1, 21), (2, 22)], True)
    gate.open()
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(new, (20, 21, 22))
    assert sent.wait().outcome is SendOutcome.FAILED
    assert pair.receiver.stats.late_messages >= 1


def test_an_abort_is_idempotent(pair: Pair) -> None:
    grant = pair.grant((1, 2))
    pair.receiver.abort(grant.key)
    pair.sender.abort(grant.key)
    received, sent = pair.begin(grant)
    for _ in range(3):
        pair.receiver.abort(grant.key)
        pair.sender.abort(grant.key)
    received.wait()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert pair.move(pair.grant((3,)), (3,))[0].outcome is ReceiveOutcome.VERIFIED
    assert received.outcomes == ["drained"]
    assert sent.outcomes == ["failed"]


def test_a_sender_abort_is_reported_on_both_sides(pair: Pair) -> None:
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], False)
    pair.sender.abort(grant.key)
    assert (sent.wait().outcome, sent.all[0].error) == (SendOutcome.FAILED, "aborted by the sender")
    end = received.wait()
    assert (end.outcome, end.error) == (ReceiveOutcome.FAILED, "the sender gave up: aborted by the sender")
    assert sent.all[0].is_cancelled
    assert end.is_cancelled
    for stats in (pair.sender.stats, pair.receiver.stats):
        assert (stats.failed, stats.cancelled) == (0, 1)
    pair.sender.push(grant.key, [(1, 1)], True)  # Late, and without effect.


def test_a_transfer_that_the_receiver_cancels_has_not_failed(pair: Pair) -> None:
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], False)
    pair.receiver.abort(grant.key)
    assert received.wait().is_cancelled
    pair.sender.push(grant.key, [(1, 1)], True)
    assert sent.wait().is_cancelled
    late = Heard()
    pair.sender.start(grant, late)  # Arrives after the receiver has dropped all but the outcome.
    pair.sender.push(grant.key, [(0, 0), (1, 1)], True)
    assert late.wait().is_cancelled
    for stats in (pair.sender.stats, pair.receiver.stats):
        assert stats.failed == 0


def test_an_abort_frees_source_blocks_within_a_frame(make_pair: MakePair) -> None:
    """tcp only, because frames of shm do not contain the bytes."""
    release = threading.Event()

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        assert frame.kind is not Kind.ANNOUNCE or release.wait(WAIT_S)  # And reads nothing in the meantime.
        return message

    pair = make_pair("tcp", num_blocks=2, block_bytes=16 * 2**20, hook=hook)
    grant = pair.grant((0, 1))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0), (1, 1)], True)
    [outbound] = pair.sender.plain._pairs.values()
    wait_for(lambda: outbound.writer.is_streaming, "the frame that no socket buffer can hold")
    pair.sender.abort(grant.key)
    assert sent.wait().error == "aborted by the sender"
    pair.source.fill(range(1), STAMP)
    release.set()
    assert received.wait().error == "the sender gave up: aborted by the sender"
    assert pair.receiver.stats.checksum_mismatches == 0
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_a_deadline_fails_both_sides_and_frees_the_memory(
    make_pair: MakePair, transport: str, gate: Gate, clock: Clock
) -> None:
    pair = make_pair(transport, num_blocks=MANY, hook=gate, lease=Lease(beat_s=0.05, silence_s=1000.0), clock=clock)
    blocks = tuple(range(MANY))
    grant = pair.grant(blocks)
    received, sent = pair.begin(grant, deadline_s=300.0)
    pair.sender.push(grant.key, list(enumerate(blocks)), True)
    gate.wait_for_chunk()
    assert received.all == sent.all == []
    clock.added_s += 300.0
    pair.receiver.abort(pair.grant((0,)).key)  # For no transfer: it makes the receiver look at its clock.
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.all[0].error == f"the deadline passed when 0 of {MANY} blocks had arrived"
    assert "the deadline passed when" in sent.all[0].error  # By its own clock, or by the receiver's message.
    pair.target.fill(blocks, STAMP)
    gate.open()
    wait_for(lambda: pair.receiver.stats.late_messages >= 1, "the late chunks")
    assert pair.target.memory == bytes([STAMP]) * len(pair.target.memory)
    assert pair.receiver.stats.expired == 1


def test_a_deadline_ends_a_sender_without_a_receiver(pair: Pair) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)  # Accepts connections, but never speaks HTTP/2.
        sent = Heard()
        pair.sender.start(pair.grant((1,), endpoint=f"127.0.0.1:{deaf.getsockname()[1]}"), sent, 0.1)
        end = sent.wait()
    assert (end.outcome, end.error) == (SendOutcome.FAILED, "the deadline passed when 0 of 1 blocks were sent")
    assert pair.sender.stats.expired == 1


def test_an_unused_grant_ends_at_its_deadline(pair: Pair) -> None:
    received = Heard()
    pair.receiver.expect(pair.grant((1,)), received, 0.05)
    assert received.wait().error == "the deadline passed when 0 of 1 blocks had arrived"


def test_an_earlier_deadline_than_others_is_kept(make_pair: MakePair) -> None:
    pair, received = make_pair("tcp"), Heard()
    for number, deadline_s in enumerate((600.0, 300.0, 0.05)):
        pair.receiver.expect(pair.grant((number,)), received, deadline_s)
    assert received.wait().error == "the deadline passed when 0 of 1 blocks had arrived"
    assert len(pair.receiver.open_keys) == 2


def test_a_later_deadline_than_others_wakes_no_thread(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, received, wakes = make_pair("tcp"), Heard(), []
    pair.receiver.expect(pair.grant((0,)), received, 600.0)
    wait_for(lambda: pair.receiver._sleeps_until_s < math.inf, "the listening thread to know the deadline")
    with monkeypatch.context() as patch:
        patch.setattr(pair.receiver._waker, "set", lambda: wakes.append(1))
        pair.receiver.expect(pair.grant((1,)), received, 601.0)
        assert not wakes
        pair.receiver.expect(pair.grant(()), received, 601.0)  # without blocks it ends at once, which must be reported
        assert wakes


def test_after_a_cut_the_next_transfer_reconnects(make_pair: MakePair, transport: str) -> None:
    cuts = [True]

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray | None:
        return None if frame.kind is Kind.CHUNK and cuts and cuts.pop() else message

    pair = make_pair(transport, hook=hook)
    grant, waiting = pair.grant((1, 2)), pair.grant((5,))
    idle_received, idle_sent = pair.begin(waiting)
    received, sent = pair.move(grant, (1, 2))
    assert received.outcome is idle_received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.outcome is idle_sent.wait().outcome is SendOutcome.FAILED
    assert received.error == "sender p0: connection closed by the peer"
    assert sent.error.startswith(pair.host.endpoint)
    assert pair.receiver.stats.cut == pair.sender.stats.cut == 2
    again, _ = pair.move(pair.grant((1, 2)), (3, 4))
    assert again.outcome is ReceiveOutcome.VERIFIED


def test_a_missing_receiver_fails_the_transfer(pair: Pair) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        sent = Heard()
        pair.sender.start(pair.grant((1,), endpoint=endpoint), sent)
        end = sent.wait()
    assert end.outcome is SendOutcome.FAILED
    assert f"{endpoint} refused: UNAVAILABLE" in end.error


def test_a_restarted_receiver_gets_no_old_transfer(pair: Pair) -> None:
    sent = Heard()
    pair.sender.start(pair.grant((1,), incarnation="d0-0"), sent)
    assert "has restarted since it granted this transfer" in sent.wait().error


def test_an_unexpected_transfer_fails_at_once(pair: Pair) -> None:
    sent = Heard()
    pair.sender.start(pair.grant((1,)), sent)
    assert sent.wait().error == "the receiver refused: the receiver does not expect this transfer"
    assert pair.receiver.stats.late_messages == 1


def test_a_killed_sender_fails_its_transfers_at_once(
    pair: Pair, transport: str, start_process: Callable[..., Process]
) -> None:
    grant = pair.grant(tuple(range(32)), transfer_id="killed")
    received, other = Heard(), Heard()
    pair.receiver.expect(grant, received, 60.0)
    sender = start_process("sender", transport, pair.host.endpoint, "32")
    assert sender.say() == {"ready": True}
    wait_for(lambda: pair.target.block(30) == pair.source.block(30), "all blocks but the last")
    sender.kill()
    end = received.wait()
    assert end.outcome is ReceiveOutcome.FAILED
    assert end.error.startswith("sender p9: connection ")
    pair.target.fill(range(32), STAMP)
    unrelated = pair.grant((40,))
    pair.receiver.expect(unrelated, other)
    assert pair.target.block(3) == bytes([STAMP]) * BLOCK_BYTES
    pair.receiver.abort(unrelated.key)
    assert other.wait().outcome is ReceiveOutcome.DRAINED


def test_a_killed_receiver_fails_the_senders_transfers_at_once(
    pair: Pair, transport: str, start_process: Callable[..., Process]
) -> None:
    receiver = start_process("receiver", transport, "32")
    endpoint = f"127.0.0.1:{receiver.say()['port']}"
    grant, sent = pair.grant(tuple(range(32)), transfer_id="killed", endpoint=endpoint), Heard()
    pair.sender.start(grant, sent, 60.0)
    pair.sender.push(grant.key, [(i, i) for i in range(31)], False)
    wait_for(lambda: pair.sender.stats.chunks >= 1, "the first chunk")
    receiver.kill()
    end = sent.wait()
    assert end.outcome is SendOutcome.FAILED
    assert end.error.startswith(f"{endpoint}: connection")


def test_a_reconnecting_sender_replaces_its_old_connection(make_pair: MakePair, transport: str) -> None:
    """A half-open connection of a dead incarnation must not keep its transfers alive."""
    from kvtransfer.link.endpoint import make_sender
    from tests.unit.kvtransfer.harness import fingerprint

    pair = make_pair(transport)
    first = pair.grant((1, 2))
    received, _ = pair.begin(first)
    pair.sender.push(first.key, [(0, 1)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "a chunk, so that the transfer is the old connection's")
    again = make_sender(
        endpoint_config(HostPool(64, seed=7), fingerprint(), worker_id="p0", incarnation="p0-2", transport=transport)
    )
    grant, ok = pair.grant((5,)), Heard()
    pair.receiver.expect(grant, ok)
    again.start(grant, Heard())
    again.push(grant.key, [(0, 5)], True)
    assert ok.wait().outcome is ReceiveOutcome.VERIFIED
    assert received.wait().error == "sender p0: replaced by its newer connection"
    again.close()


def test_a_dead_receiver_thread_fails_all_transfers(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    received, sent = pair.begin(pair.grant((1,)))
    wait_for(lambda: len(pair.receiver.peers) == 1, "the connection")

    def broken(now_s: float) -> list[Any]:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(pair.receiver, "_tick", broken)
    pair.receiver.abort(pair.grant((2,)).key)  # Wakes the thread.
    assert received.wait().error == "the receiver's thread died"
    assert sent.wait().outcome is SendOutcome.FAILED
    wait_for(lambda: not pair.receiver.is_healthy, "ill health")
    assert "the KV receiver's thread died" in caplog.text


def test_a_server_without_the_transfer_service_is_rejected(pair: Pair) -> None:
    host = GrpcHost(transfer_pb2_grpc.TransferServiceServicer())
    sent = Heard()
    pair.sender.start(pair.grant((1,), endpoint=host.endpoint), sent)
    assert sent.wait().outcome is SendOutcome.FAILED
    host.stop()
