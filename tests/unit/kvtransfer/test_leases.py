"""If a peer is silent or stalled, all blocks are freed at the deadline, or at the end of the lease if there is none."""

from __future__ import annotations

import pytest

from kvtransfer.protocol import receive_transfers
from kvtransfer.protocol.frames import pack, tag_of
from kvtransfer.protocol.lease import Heartbeat, Lease
from kvtransfer.protocol.plan import WHOLE
from kvtransfer.protocol.receive_transfers import ReceiveTransfers, Sever
from kvtransfer.protocol.send_transfers import ReportSent, Retract, SendTransfers
from kvtransfer.protocol.transfers import Claim
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import Grant
from pdserve.core.kv.stamps import BlockStamps
from tests.unit.kvtransfer.harness import grant_of

GRANT = grant_of("t", 1, 5, (3, 4))
TAG = tag_of(GRANT.key)


def test_heartbeats_are_due_and_silence_is_detected() -> None:
    heartbeat = Heartbeat(Lease(beat_s=1.0, silence_s=3.0), 10.0)
    assert (heartbeat.is_due(10.9), heartbeat.left_s(10.9)) == (False, pytest.approx(0.1))
    assert heartbeat.is_due(11.0)
    assert not heartbeat.is_due(11.5)
    assert not heartbeat.is_silent(12.9)
    assert heartbeat.is_silent(13.0)
    heartbeat.heard(13.0)
    assert not heartbeat.is_silent(15.9)
    assert heartbeat.left_s(100.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "field"), [({"beat_s": 0}, "beat_s"), ({"silence_s": 0.9}, "silence_s"), ({"stall_s": 1e9}, "stall_s")]
)
def test_a_lease_that_cannot_work_is_a_config_error(changes: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"lease\.{field}"):
        Lease(**changes)


def table(deadline_at_s: float | None = None) -> ReceiveTransfers:
    table = ReceiveTransfers(BlockStamps(8), grace_s=1.0, quarantine_s=4.0, stall_s=60.0, unclaimed_s=120.0)
    table.expect(GRANT, 0.0, deadline_at_s)
    return table


def ends_of(actions: list[receive_transfers.Action]) -> list[tuple[str, str]]:
    return [
        (one.received.outcome.value, one.received.error)
        for one in actions
        if isinstance(one, receive_transfers.ReportReceived)
    ]


def rung(it: ReceiveTransfers, until_s: float) -> list[receive_transfers.Action]:
    """Runs every alarm up to a time, like the receiver's thread."""
    actions: list[receive_transfers.Action] = []
    while it.next_alarm_s is not None and it.next_alarm_s <= until_s:
        actions += it.expire(it.next_alarm_s)
    return actions


def test_an_unclaimed_grant_without_a_deadline_ends() -> None:
    it = table()
    assert rung(it, 119.9) == []
    assert ends_of(rung(it, 120.0)) == [("failed", "no sender announced it; 0 of 2 blocks had arrived")]
    assert it.stats.expired == 1


def test_a_transfer_without_deadline_ends_if_it_stalls() -> None:
    it = table()
    it.announce(TAG, 1, now_s=100.0)
    assert rung(it, 150.0) == []
    claim = it.claim(TAG, 1, 0, pack([0], 5, 1), 150.0)
    assert claim is not None
    it.settle(claim, 1, True, False, 150.0)
    assert rung(it, 209.9) == [], "the block has extended it"
    assert ends_of(rung(it, 210.0))[0][1] == "no block came for 60 s; 1 of 2 blocks had arrived"


def test_a_deadline_replaces_the_lease() -> None:
    it = table(deadline_at_s=500.0)
    assert rung(it, 499.0) == []
    assert ends_of(rung(it, 500.0)) == [("failed", "the deadline passed when 0 of 2 blocks had arrived")]


def writing(it: ReceiveTransfers) -> Claim:
    it.announce(TAG, 7)
    claim = it.claim(TAG, 7, 0, pack([0, 0], 5, 1), 0.0, WHOLE)
    assert claim is not None
    assert it.enter(claim)
    return claim


def test_an_overdue_write_closes_its_connection() -> None:
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


def test_a_timely_write_severs_no_connection() -> None:
    it = table(deadline_at_s=500.0)
    claim = writing(it)
    it.abort(GRANT.key, 20.0)
    assert ends_of(it.leave(claim, 20.5)) == [("drained", "aborted by the receiver")]
    assert rung(it, 100.0) == []
    assert it.stats.severed == it.stats.quarantined == 0


def test_a_stalled_send_without_a_deadline_ends() -> None:
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
    """A transfer whose last block is on the wire at 10 s."""
    out = SendTransfers(1, BlockStamps(8), stall_s=60.0, unconfirmed_s=5.0)
    out.start(grant, 0.0, deadline_at_s, num_shards=num_shards)
    out.linked()
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    job = out.take(2, 1.0)
    assert job is not None
    out.written(job, 10.0)
    return out


@pytest.mark.parametrize("deadline_at_s", [None, 500.0])
def test_an_unconfirmed_transfer_leaves_time_for_another(deadline_at_s: float | None) -> None:
    out = sent_whole(GRANT, deadline_at_s)
    assert out.next_alarm_s == 15.0
    assert out.expire(14.9) == []
    retract, report = out.expire(15.0)
    assert isinstance(retract, Retract)
    assert isinstance(report, ReportSent)
    assert report.sent.fault == "expired"
    assert report.sent.error == retract.error == "the receiver did not confirm it within 5 s of its last block"
    assert out.done(TAG, 15.1) == [], "too late"


def test_an_empty_last_push_does_not_delay_the_end() -> None:
    """The last push may be empty, and may come when all blocks are already on the wire."""
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


def test_reading_sources_after_the_end_closes_the_connection() -> None:
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
