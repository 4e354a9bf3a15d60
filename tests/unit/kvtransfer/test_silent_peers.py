"""Silent, stopped and stalled peers, over real connections: all blocks that they hold are freed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvtransfer.protocol.frames import Frame, Kind, pack
from kvtransfer.protocol.lease import Heartbeat, Lease
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Clock, Heard, Pair, wait_for
from tests.unit.kvtransfer.process import Process
from tests.unit.kvtransfer.raw import RawSender, expected

MakePair = Callable[..., Pair]
# A minute of silence, which passes only on the test's clock, and heartbeats that come as soon as it has passed.
LEASE = Lease(beat_s=0.05, silence_s=60.0, stall_s=1000.0, unclaimed_s=1000.0)


def heartbeats(pair: Pair) -> list[Heartbeat]:
    """Sends heartbeats from both ends of the pair's connection."""
    outbounds = [one for one in pair.sender.plain._pairs.values() if one._endpoint == pair.host.endpoint]
    inbounds = [one for one in pair.receiver._connections.values() if one.peer and one.peer.sender_id == "p0"]
    found = [*(one._heartbeat for one in outbounds), *(one.channel._heartbeat for one in inbounds)]
    return [heartbeat for heartbeat in found if heartbeat is not None]


def live(pair: Pair, clock: Clock, for_s: float = 1.5 * LEASE.silence_s) -> None:
    """Advances the time in steps. After each, both ends receive a heartbeat."""
    for _ in range(4):
        clock.added_s += for_s / 4
        at_s = clock()
        wait_for(lambda: all(heartbeat._heard_s >= at_s for heartbeat in heartbeats(pair)), "signs of life")  # noqa: B023
    assert len(heartbeats(pair)) == 2


def fall_silent(clock: Clock, heard: Heard) -> Any:
    """Advances the time until this side gets its report. Earlier messages count as received whenever they are read."""
    while not heard.all:
        clock.added_s += LEASE.silence_s
        heard.wait_for_one(0.2)
    return heard.wait()


def test_a_silent_senders_transfers_end_without_a_deadline(make_pair: MakePair, transport: str, clock: Clock) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    raw = RawSender(pair, "silent")
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first block")
    end = fall_silent(clock, received)
    assert (end.outcome, end.fault) == (ReceiveOutcome.FAILED, "cut")
    assert end.error == "sender silent: the peer sent nothing for 60 s"
    assert pair.receiver.stats.silent == 1
    raw.close()


def test_a_stopped_sender_frees_its_chunk(make_pair: MakePair, clock: Clock) -> None:
    pair = make_pair("tcp", lease=LEASE, clock=clock)
    raw = RawSender(pair, "half")
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    head = Frame(Kind.CHUNK, tag, 0, 2, 0, 2 * BLOCK_BYTES, b"c" * 8).encode() + pack([0, 0], tag.generation, 1)
    raw.send(head + b"x" * 100)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the half chunk")
    for _ in range(10):
        assert pair.move(pair.grant((10, 11)), (1, 2))[0].outcome is ReceiveOutcome.VERIFIED
    assert received.all == []
    live(pair, clock)
    assert received.wait().fault == "cut"
    assert pair.move(pair.grant((10, 11)), (1, 2))[0].outcome is ReceiveOutcome.VERIFIED
    raw.close()


def test_trickling_bytes_count_as_a_heartbeat(make_pair: MakePair, clock: Clock) -> None:
    """Each time fewer bytes arrive than would wake the thread."""
    pair = make_pair("tcp", num_blocks=64, block_bytes=BLOCK_BYTES, lease=LEASE, clock=clock)
    raw = RawSender(pair, "slow")
    _, tag, received = expected(pair, tuple(range(1, 33)))
    raw.announce(tag)
    payload = b"s" * (32 * BLOCK_BYTES)
    frame = Frame(Kind.CHUNK, tag, 0, 32, 0, len(payload), raw._digest([memoryview(payload)]), True)
    raw.send(frame.encode() + pack([0] * 32, tag.generation, 1))
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the head of the chunk")
    [slow] = pair.receiver._connections.values()
    for at in range(0, 200, 50):
        raw.send(payload[at : at + 50])
        clock.added_s += LEASE.silence_s
        at_s = clock()
        wait_for(lambda: slow.channel._heartbeat._heard_s >= at_s or bool(received.all), "it to be heard")  # type: ignore[union-attr]  # noqa: B023
    assert received.all == []
    raw.send(payload[200:])
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    raw.close()


def test_heartbeats_keep_an_idle_transfer_open(make_pair: MakePair, transport: str, clock: Clock) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 5)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first chunk")
    live(pair, clock)  # The rest of the prompt is still being computed.
    assert received.all == sent.all == []
    pair.sender.push(grant.key, [(1, 6)], True)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
    assert pair.receiver.stats.silent == pair.sender.stats.silent == 0


def test_an_idle_pair_stays_connected(make_pair: MakePair, transport: str, clock: Clock) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    pair.move(pair.grant((1,)), (1,))
    [connection] = pair.receiver._connections
    live(pair, clock)
    pair.move(pair.grant((2,)), (2,))
    assert list(pair.receiver._connections) == [connection]


def test_a_stopped_senders_messages_are_late_afterwards(
    make_pair: MakePair, transport: str, start_process: Callable[..., Process], clock: Clock
) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    grant, received = pair.grant(tuple(range(32)), transfer_id="killed"), Heard()
    pair.receiver.expect(grant, received)
    sender = start_process("sender", transport, pair.host.endpoint, "32")
    assert sender.say() == {"ready": True}
    wait_for(lambda: pair.target.block(30) == pair.source.block(30), "all blocks but the last")
    sender.stop()
    assert fall_silent(clock, received).error == "sender p9: the peer sent nothing for 60 s"
    pair.target.fill(range(32), 0x5A)
    sender.go_on()
    assert sender.say()["sent"] == "failed"
    assert pair.target.block(3) == b"\x5a" * BLOCK_BYTES


def test_a_stopped_receiver_delays_no_other_pair(
    make_pair: MakePair, transport: str, start_process: Callable[..., Process], clock: Clock
) -> None:
    """The sender sends more than all buffers on the way hold."""
    num_blocks = 4096
    pair = make_pair(transport, num_blocks=num_blocks, lease=LEASE, clock=clock)
    receiver = start_process("receiver", transport, str(num_blocks))
    endpoint = f"127.0.0.1:{receiver.say()['port']}"
    grant, sent = pair.grant(tuple(range(num_blocks)), transfer_id="killed", endpoint=endpoint), Heard()
    pair.sender.start(grant, sent)
    pair.sender.push(grant.key, [(0, 0)], False)
    wait_for(lambda: pair.sender.stats.chunks >= 1, "the first chunk")
    receiver.stop()
    pair.sender.push(grant.key, [(i, i) for i in range(1, num_blocks)], True)
    for _ in range(25):
        assert pair.move(pair.grant((40, 41)), (1, 2))[0].outcome is ReceiveOutcome.VERIFIED
    assert sent.all == [], "the others did not wait for the end of this one"
    live(pair, clock, 2 * LEASE.silence_s)  # The stopped receiver's last message may be received after the first step.
    assert sent.wait().error == f"{endpoint}: the receiver sent nothing for 60 s"
    assert pair.sender.stats.silent == 1


def test_a_stopped_receiver_frees_source_blocks(make_pair: MakePair, clock: Clock) -> None:
    """The receiver still sends heartbeats, so only the deadline can end the transfer."""
    held, release = threading.Event(), threading.Event()

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK:
            held.set()
            assert release.wait(WAIT_S)
        return message

    pair = make_pair("tcp", num_blocks=3, block_bytes=16 * 2**20, hook=hook, lease=LEASE, clock=clock)
    grant = pair.grant((0, 1, 2))
    _, sent = pair.begin(grant, 50.0)
    pair.sender.push(grant.key, [(0, 0), (1, 1), (2, 2)], True)
    assert held.wait(WAIT_S)
    clock.added_s += 50.0
    assert sent.wait().fault in ("expired", "refused")  # By either side's clock.
    pair.source.fill(range(3), 0x11)
    release.set()


def test_a_connection_with_an_endless_write_is_closed(pair: Pair) -> None:
    """The test acts as the writer, like a transport that cannot prove that its write has ended."""
    pair.receiver._table.grace_s, pair.receiver._table.quarantine_s = 0.05, 0.2
    raw = RawSender(pair)
    grant, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.announce(tag._replace(generation=0))
    raw.hear()
    [writer] = pair.receiver._connections
    claim = pair.receiver.claim(Frame(Kind.CHUNK, tag, 0, 2), writer, pack([0, 0], tag.generation, 1))
    assert claim is not None
    assert pair.receiver.enter(claim)
    pair.receiver.abort(grant.key)
    assert received.wait(2).outcome is ReceiveOutcome.DRAINED
    assert received.outcomes == ["quarantined", "drained"]
    assert raw.is_cut()
    assert pair.receiver.stats.severed == 1
    raw.close()
