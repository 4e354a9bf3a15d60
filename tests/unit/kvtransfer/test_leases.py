"""Who is silent or stands still frees everything: by the deadline, or by a lease where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer import receive_transfers
from kvtransfer.frames import Frame, Kind, tag_of
from kvtransfer.lease import Heartbeat, Lease
from kvtransfer.parts import WHOLE
from kvtransfer.receive_transfer import Claim
from kvtransfer.receive_transfers import ReceiveTransfers, Sever
from kvtransfer.send_transfers import Report, Retract, SendTransfers
from kvtransfer.stamping import pack
from kvtransfer.transport import ReceiveOutcome, SendOutcome
from pdserve.core.errors import ConfigError
from pdserve.core.grant import Grant
from pdserve.core.stamps import BlockStamps
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Clock, Heard, Pair, grant_of, wait_for
from tests.unit.kvtransfer.process import Process
from tests.unit.kvtransfer.raw import RawSender, expected

MakePair = Callable[..., Pair]
# A minute of silence, which only a test's clock makes pass, and beats that come at once when it has.
LEASE = Lease(beat_s=0.05, silence_s=60.0, stall_s=1000.0, unclaimed_s=1000.0)
GRANT = grant_of("t", 1, 5, (3, 4))
TAG = tag_of(GRANT.key)


# The pulse and the lease.


def test_a_pulse_is_due_each_beat_and_silent_after_its_time() -> None:
    pulse = Heartbeat(Lease(beat_s=1.0, silence_s=3.0), 10.0)
    assert (pulse.is_due(10.9), pulse.left_s(10.9)) == (False, pytest.approx(0.1))
    assert pulse.is_due(11.0)
    assert not pulse.is_due(11.5)
    assert not pulse.is_silent(12.9)
    assert pulse.is_silent(13.0)
    pulse.heard(13.0)
    assert not pulse.is_silent(15.9)
    assert pulse.left_s(100.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "field"), [({"beat_s": 0}, "beat_s"), ({"silence_s": 0.9}, "silence_s"), ({"stall_s": 1e9}, "stall_s")]
)
def test_a_lease_that_cannot_work_is_a_config_error(changes: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"lease\.{field}"):
        Lease(**changes)


# The receiver's table.


def table(deadline_at_s: float | None = None) -> ReceiveTransfers:
    table = ReceiveTransfers(BlockStamps(8), grace_s=1.0, quarantine_s=4.0, stall_s=60.0, unclaimed_s=120.0)
    table.expect(GRANT, 0.0, deadline_at_s)
    return table


def ends_of(actions: list[receive_transfers.Action]) -> list[tuple[str, str]]:
    return [
        (one.received.outcome.value, one.received.error) for one in actions if isinstance(one, receive_transfers.Report)
    ]


def rung(it: ReceiveTransfers, until_s: float) -> list[receive_transfers.Action]:
    """Every alarm up to a time, as the receiver's clock rings them."""
    actions: list[receive_transfers.Action] = []
    while it.next_alarm_s is not None and it.next_alarm_s <= until_s:
        actions += it.expire(it.next_alarm_s)
    return actions


def test_a_grant_without_deadline_that_no_sender_takes_ends() -> None:
    it = table()
    assert rung(it, 119.9) == []
    assert ends_of(rung(it, 120.0)) == [("failed", "no sender came; 0 of 2 blocks had come")]
    assert it.stats.expired == 1


def test_a_transfer_without_deadline_lives_while_it_progresses_and_ends_when_it_stands_still() -> None:
    it = table()
    it.announce(TAG, 1, now_s=100.0)
    assert rung(it, 150.0) == []
    claim = it.claim(TAG, 1, 0, pack([0], 5, 1), 150.0)
    assert claim is not None
    it.settle(claim, 1, True, False, 150.0)
    assert rung(it, 209.9) == [], "the block has extended it"
    assert ends_of(rung(it, 210.0))[0][1] == "no block came for 60 s; 1 of 2 blocks had come"


def test_a_deadline_is_all_that_counts_where_there_is_one() -> None:
    it = table(deadline_at_s=500.0)
    assert rung(it, 499.0) == []
    assert ends_of(rung(it, 500.0)) == [("failed", "the deadline passed when 0 of 2 blocks had come")]


def writing(it: ReceiveTransfers) -> Claim:
    it.announce(TAG, 7)
    claim = it.claim(TAG, 7, 0, pack([0, 0], 5, 1), 0.0, WHOLE)
    assert claim is not None
    assert it.enter(claim)
    return claim


def test_a_write_that_outlives_its_deadline_has_its_connection_closed_within_a_second() -> None:
    it = table(deadline_at_s=10.0)
    writing(it)
    assert ends_of(rung(it, 10.9)) == []
    assert rung(it, 11.0) == [Sever(7)]
    assert rung(it, 1000.0) == [], "once"
    assert ends_of(it.cut(7, "severed", 11.1))[0][0] == "failed"
    assert it.stats.severed == 1


def test_a_quarantine_ends_with_its_connection() -> None:
    it = table(deadline_at_s=500.0)
    writing(it)
    it.abort(GRANT.key, 20.0)
    assert ends_of(rung(it, 20.9)) == []
    assert ends_of(rung(it, 21.0)) == [("quarantined", "aborted by the receiver")]
    assert rung(it, 24.9) == []
    assert rung(it, 25.0) == [Sever(7)]
    assert ends_of(it.cut(7, "severed", 25.1)) == [("drained", "aborted by the receiver")]


def test_a_write_that_ends_in_time_severs_nobody() -> None:
    it = table(deadline_at_s=500.0)
    claim = writing(it)
    it.abort(GRANT.key, 20.0)
    assert ends_of(it.leave(claim, 20.5)) == [("drained", "aborted by the receiver")]
    assert rung(it, 100.0) == []
    assert it.stats.severed == it.stats.quarantined == 0


# The sender's table.


def test_a_departure_without_deadline_ends_when_nothing_is_pushed_or_taken() -> None:
    out = SendTransfers(1, BlockStamps(8), stall_s=60.0)
    out.start(GRANT, 0.0, None)
    out.linked()
    out.push(GRANT.key, [(0, 0)], False, 30.0)
    assert out.next_alarm_s == 90.0
    job = out.take(1, 80.0)
    assert job is not None
    out.written(job, 80.0)
    assert out.expire(139.9) == []
    retract, report = out.expire(140.0)
    assert report.sent.fault == "expired"  # type: ignore[union-attr]
    assert report.sent.error == retract.error == "nothing was pushed or taken for 60 s"  # type: ignore[union-attr]


def sent_whole(grant: Grant, deadline_at_s: float | None, num_shards: int = 1) -> SendTransfers:
    """The last block is on the wire at 10 s."""
    out = SendTransfers(1, BlockStamps(8), stall_s=60.0, unconfirmed_s=5.0)
    out.start(grant, 0.0, deadline_at_s, num_shards=num_shards)
    out.linked()
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    job = out.take(2, 1.0)
    assert job is not None
    out.written(job, 10.0)
    return out


@pytest.mark.parametrize("deadline_at_s", [None, 500.0])
def test_a_transfer_that_was_sent_whole_and_is_not_confirmed_leaves_time_for_another(
    deadline_at_s: float | None,
) -> None:
    out = sent_whole(GRANT, deadline_at_s)
    assert out.next_alarm_s == 15.0
    assert out.expire(14.9) == []
    retract, report = out.expire(15.0)
    assert isinstance(retract, Retract)
    assert isinstance(report, Report)
    assert report.sent.fault == "expired"
    assert report.sent.error == retract.error == "the receiver did not confirm it within 5 s of its last block"
    assert out.done(TAG, 15.1) == [], "too late"


def test_an_owner_who_has_nothing_to_add_does_not_put_the_end_off() -> None:
    """The last push may be empty, and come when everything is on the wire already."""
    out = SendTransfers(1, BlockStamps(8), stall_s=60.0, unconfirmed_s=5.0)
    out.start(GRANT, 0.0, 500.0)
    out.linked()
    out.push(GRANT.key, [(0, 0), (1, 1)], False, 0.0)
    job = out.take(2, 1.0)
    assert job is not None
    out.written(job, 10.0)
    assert out.push(GRANT.key, [], True, 11.0) == []
    assert out.next_alarm_s == 15.0
    assert out.expire(15.0) != []


def test_a_deadline_before_the_confirmation_is_due_still_counts() -> None:
    assert sent_whole(GRANT, 12.0).expire(12.0) != []


def test_one_shard_of_several_waits_for_the_others() -> None:
    out = sent_whole(GRANT, 500.0, num_shards=2)
    assert out.expire(499.0) == []
    assert out.expire(500.0) != []


def test_source_blocks_that_are_read_after_the_end_cost_the_connection() -> None:
    out = SendTransfers(1, BlockStamps(8), grace_s=0.5)
    out.start(GRANT, 0.0, 10.0)
    out.linked()
    out.push(GRANT.key, [(0, 0)], False, 0.0)
    job = out.take(1, 0.0)
    assert job is not None
    out.expire(10.0)
    assert out.next_alarm_s == 10.5
    assert out.expire(10.4) == []
    assert not out.is_stuck
    out.expire(10.5)
    assert out.is_stuck
    [report] = out.cut("closed", 10.6)
    assert report.sent.error.startswith("the deadline passed")  # type: ignore[union-attr]


# Real connections.


def pulses(pair: Pair) -> list[Heartbeat]:
    """Of both ends of the pair's own connection."""
    outbounds = [one for one in pair.sender.plain._pairs.values() if one._endpoint == pair.host.endpoint]
    inbounds = [one for one in pair.receiver._connections.values() if one.peer and one.peer.sender_id == "p0"]
    found = [*(one._pulse for one in outbounds), *(one.channel._pulse for one in inbounds)]
    return [pulse for pulse in found if pulse is not None]


def live(pair: Pair, clock: Clock, for_s: float = 1.5 * LEASE.silence_s) -> None:
    """Time passes, in steps after each of which both ends hear each other's sign of life."""
    for _ in range(4):
        clock.added_s += for_s / 4
        at_s = clock()
        wait_for(lambda: all(pulse._heard_s >= at_s for pulse in pulses(pair)), "signs of life")  # noqa: B023
    assert len(pulses(pair)) == 2


def fall_silent(clock: Clock, heard: Heard) -> Any:
    """Time passes until this side has been told; what came before counts as heard whenever it is read."""
    while not heard.all:
        clock.added_s += LEASE.silence_s
        heard.wait_for_one(0.2)
    return heard.wait()


def test_a_silent_sender_frees_what_it_holds_though_nothing_has_a_deadline(
    make_pair: MakePair, transport: str, clock: Clock
) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    raw = RawSender(pair, "silent")
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first block")
    end = fall_silent(clock, received)
    assert (end.outcome, end.fault) == (ReceiveOutcome.FAILED, "cut")
    assert end.error == "sender silent: nothing was heard of the peer for 60 s"
    assert pair.receiver.stats.silent == 1
    raw.close()


def test_a_sender_that_stops_within_a_chunk_frees_it_and_delays_nobody_else(make_pair: MakePair, clock: Clock) -> None:
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


def test_bytes_that_trickle_in_are_a_sign_of_life(make_pair: MakePair, clock: Clock) -> None:
    """Fewer than what wakes the thread, each time."""
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
        wait_for(lambda: slow.channel._pulse._heard_s >= at_s or bool(received.all), "it to be heard")  # type: ignore[union-attr]  # noqa: B023
    assert received.all == []
    raw.send(payload[200:])
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    raw.close()


def test_two_that_live_and_have_nothing_to_say_keep_their_transfer(
    make_pair: MakePair, transport: str, clock: Clock
) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 5)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first chunk")
    live(pair, clock)  # the prompt's rest takes its time
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


def test_a_stopped_sender_frees_everything_and_is_late_when_it_wakes(
    make_pair: MakePair, transport: str, start_process: Callable[..., Process], clock: Clock
) -> None:
    pair = make_pair(transport, lease=LEASE, clock=clock)
    grant, received = pair.grant(tuple(range(32)), transfer_id="killed"), Heard()
    pair.receiver.expect(grant, received)
    sender = start_process("sender", transport, pair.host.endpoint, "32")
    assert sender.say() == {"ready": True}
    wait_for(lambda: pair.target.block(30) == pair.source.block(30), "all blocks but the last")
    sender.stop()
    assert fall_silent(clock, received).error == "sender p9: nothing was heard of the peer for 60 s"
    pair.target.fill(range(32), 0x5A)
    sender.go_on()
    assert sender.say()["sent"] == "failed"
    assert pair.target.block(3) == b"\x5a" * BLOCK_BYTES


def test_a_stopped_receiver_gives_the_source_back_and_delays_no_other_pair(
    make_pair: MakePair, transport: str, start_process: Callable[..., Process], clock: Clock
) -> None:
    """It is sent more than any buffer on the way to it holds."""
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
    live(pair, clock, 2 * LEASE.silence_s)  # the last word of the stopped one may have been heard after the first step
    assert sent.wait().error == f"{endpoint}: nothing was heard of the receiver for 60 s"
    assert pair.sender.stats.silent == 1


def test_a_receiver_that_stops_reading_keeps_no_source_block_beyond_the_deadline(
    make_pair: MakePair, clock: Clock
) -> None:
    """It still shows life: only the deadline can end this."""
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
    assert sent.wait().fault in ("expired", "refused")  # whichever side's clock is first
    pair.source.fill(range(3), 0x11)
    release.set()


def test_a_path_whose_write_never_ends_is_closed_and_its_memory_freed(pair: Pair) -> None:
    """The test is the writer, as a transport would be that cannot prove that writing has stopped."""
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
