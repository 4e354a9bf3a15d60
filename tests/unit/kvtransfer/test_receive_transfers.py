"""Decisions of the receiver's transfer table: which chunks may be written, and which reports it makes."""

from __future__ import annotations

import pytest

from kvtransfer.protocol import receive_transfers
from kvtransfer.protocol.frames import Tag, pack
from kvtransfer.protocol.plan import Part
from kvtransfer.protocol.receive_transfers import ReceiveTransfers
from kvtransfer.protocol.transport import ReceiveOutcome
from pdserve.core.kv.kv_shape import Grant, TransferKey
from tests.unit.kvtransfer.harness import STAMPS, grant_of, unmarked_stamps


def opened(
    blocks: tuple[int, ...] = (0, 1, 2, 3), deadline_at_s: float | None = None
) -> tuple[ReceiveTransfers, Grant, Tag]:
    table, grant = ReceiveTransfers(STAMPS, grace_s=1.0), grant_of("t", 1, 1, blocks)
    assert table.expect(grant, 0.0, deadline_at_s) == []
    tag = receive_transfers.tag_of(grant.key)
    assert table.announce(tag, 1) == []
    return table, grant, tag


def outcomes_of(actions: list[receive_transfers.Action]) -> list[tuple[ReceiveOutcome, str]]:
    return [(a.received.outcome, a.received.error) for a in actions if isinstance(a, receive_transfers.ReportReceived)]


def test_an_old_chunk_gets_no_claim() -> None:
    table, _, tag = opened()
    assert table.claim(tag._replace(generation=0), 1, 0, unmarked_stamps(tag, 1), 0.0) is None
    assert table.claim(tag._replace(attempt=9), 1, 0, unmarked_stamps(tag, 1), 0.0) is None
    assert table.stats.late_messages == 2


def test_an_unannounced_chunk_gets_no_claim() -> None:
    table, _, tag = opened()
    assert table.claim(tag, 2, 0, unmarked_stamps(tag, 1), 0.0) is None
    assert table.stats.late_messages == 1


def test_an_invalid_chunk_gets_no_claim() -> None:
    table, _, tag = opened()
    assert table.claim(tag, 1, 3, unmarked_stamps(tag, 2), 0.0) is None
    assert table.claim(tag, 1, 2**31, unmarked_stamps(tag, 2**10), 0.0) is None
    assert table.claim(tag, 1, 0, unmarked_stamps(tag, 2), 0.0) is not None
    assert table.claim(tag, 1, 1, unmarked_stamps(tag, 2), 0.0) is None
    assert table.stats.duplicate_chunks == 3


def test_an_empty_grant_is_verified_at_once() -> None:
    table, grant = ReceiveTransfers(STAMPS), grant_of("t", 1, 1, ())
    assert outcomes_of(table.expect(grant, 0.0, None)) == [(ReceiveOutcome.VERIFIED, "")]
    tag = receive_transfers.tag_of(grant.key)
    assert table.announce(tag, 5) == [receive_transfers.ReplyToSender(5, tag, True)]


def test_a_gap_after_the_last_chunk_fails_the_transfer() -> None:
    table, _, tag = opened()
    claim = table.claim(tag, 1, 3, unmarked_stamps(tag, 1), 0.0)
    assert claim is not None
    actions = table.settle(claim, 1, True, True, 0.0)
    assert outcomes_of(actions) == [(ReceiveOutcome.FAILED, "3 of 4 blocks did not arrive")]
    assert receive_transfers.ReplyToSender(1, tag, False, "3 of 4 blocks did not arrive") in actions


def test_a_slow_abort_is_quarantined_then_drained() -> None:
    table, grant, tag = opened()
    claim = table.claim(tag, 1, 0, unmarked_stamps(tag, 1), 0.0)
    assert claim is not None
    assert table.enter(claim)
    assert outcomes_of(table.abort(grant.key, 10.0)) == []
    assert table.next_alarm_s == 11.0
    assert outcomes_of(table.expire(10.9)) == []
    assert outcomes_of(table.expire(11.0)) == [(ReceiveOutcome.QUARANTINED, "aborted by the receiver")]
    assert outcomes_of(table.leave(claim, 12.0)) == [(ReceiveOutcome.DRAINED, "aborted by the receiver")]
    assert (table.stats.quarantined, table.stats.cancelled) == (1, 1)


def test_a_deadline_reports_the_blocks_received() -> None:
    table, _, tag = opened(deadline_at_s=5.0)
    claim = table.claim(tag, 1, 0, unmarked_stamps(tag, 3), 0.0)
    assert claim is not None
    table.settle(claim, 3, True, False, 0.0)
    assert table.expire(4.9) == []
    error = "the deadline passed when 3 of 4 blocks had arrived"
    assert outcomes_of(table.expire(5.0)) == [(ReceiveOutcome.FAILED, error)]
    assert table.stats.expired == 1


def test_aborting_an_unknown_transfer_does_nothing() -> None:
    table, grant, _ = opened()
    table.cut(1, "gone", 0.0)
    assert table.abort(grant.key, 0.0) == []
    assert table.abort(TransferKey(transfer_id="x", attempt=1, generation=1), 0.0) == []


def test_alarms_of_ended_transfers_are_dropped() -> None:
    table = ReceiveTransfers(STAMPS)
    for generation in range(5000):
        grant = grant_of("t", 1, generation, (0,))
        table.expect(grant, 0.0, 600.0)
        table.abort(grant.key, 0.0)
    assert len(table._alarms) < 300
    assert len(table._ended) <= receive_transfers.REMEMBERED


def test_a_lost_connection_closes_its_writes() -> None:
    table, grant, tag = opened()
    first, second = (table.claim(tag, 1, at, unmarked_stamps(tag, 1), 0.0) for at in (0, 1))
    assert first is not None
    assert second is not None
    assert table.enter(first)
    assert table.enter(second)
    table.leave(first, 0.0)
    assert outcomes_of(table.abort(grant.key, 1.0)) == [], "a write is open"
    assert outcomes_of(table.cut(1, "the connection broke", 2.0)) == [
        (ReceiveOutcome.DRAINED, "aborted by the receiver")
    ]


def test_the_end_of_one_shard_does_not_close_the_writes_of_another() -> None:
    table = ReceiveTransfers(STAMPS, grace_s=1.0)
    grant = grant_of("t", 1, 1, (0, 1))
    table.expect(grant, 0.0, None)
    tag = receive_transfers.tag_of(grant.key)
    claims = []
    for shard, writer in enumerate((1, 2)):
        assert table.announce(tag, writer, shard, num_shards=2) == []
        claims.append(table.claim(tag, writer, 0, shard_stamps(tag, shard), 0.0, Part(shard, 0, 1)))
    for claim in claims:
        assert claim is not None
        assert table.enter(claim)
    assert outcomes_of(table.cut(1, "the connection broke", 2.0)) == [], "the other shard still writes"
    assert outcomes_of(table.cut(2, "the connection broke", 2.0)) == [(ReceiveOutcome.FAILED, "the connection broke")]


def shard_stamps(tag: Tag, shard: int) -> bytes:
    return pack([0], tag.generation, Part(shard, 0, 1).mask)


def test_a_deadline_without_a_sender_reports_no_blocks() -> None:
    table, grant = ReceiveTransfers(STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    table.expect(grant, 0.0, 5.0)
    error = "the deadline passed when 0 of 4 blocks had arrived"
    assert outcomes_of(table.expire(5.0)) == [(ReceiveOutcome.FAILED, error)]


def test_an_unexpected_announcement_is_refused() -> None:
    table, _, tag = opened()
    unknown = tag._replace(generation=9)
    refused = "the receiver does not expect this transfer"
    assert table.announce(unknown, 1) == [receive_transfers.ReplyToSender(1, unknown, False, refused)]
    assert table.announce(tag, 2) == [
        receive_transfers.ReplyToSender(2, tag, False, f"{refused}: shard 0 has its writer")
    ]
    assert table.announce(tag, 1, shard=1) == [
        receive_transfers.ReplyToSender(1, tag, False, f"{refused}: shard 1 is not of 1")
    ]
    assert table.announce(tag, 1, shard=-1) == [
        receive_transfers.ReplyToSender(1, tag, False, f"{refused}: shard -1 is not of 1")
    ]
    assert table.stats.late_messages == 4
    assert table.announce(tag, 1) == [], "the writer repeats itself"
    assert table.stats.late_messages == 4


@pytest.mark.parametrize(("is_cancelled", "count"), [(False, "failed"), (True, "cancelled")])
def test_a_sender_that_gives_up_ends_the_transfer_at_once(is_cancelled: bool, count: str) -> None:
    table, _, tag = opened()
    assert table.retract(tag, 2, "not mine", 0.0) == [], "only the writer speaks for it"
    actions = table.retract(tag, 1, "the client left", 1.0, is_cancelled=is_cancelled)
    assert outcomes_of(actions) == [(ReceiveOutcome.FAILED, "the sender gave up: the client left")]
    assert not [one for one in actions if isinstance(one, receive_transfers.ReplyToSender)], "it knows"
    assert getattr(table.stats, count) == 1
    assert table.retract(tag, 1, "again", 2.0) == []
    assert table.stats.late_messages == 2


def test_a_clock_that_goes_back_makes_no_negative_duration() -> None:
    """It could not be encoded for the sender."""
    table, _, tag = opened()
    claim = table.claim(tag, 1, 0, unmarked_stamps(tag, 4), 5.0)
    assert claim is not None
    assert table.enter(claim)
    table.leave(claim, 2.0)
    actions = table.settle(claim, 4096, True, True, 1.0)
    assert [one.busy_s for one in actions if isinstance(one, receive_transfers.ReplyToSender)] == [0.0]
    [ended] = [one.received for one in actions if isinstance(one, receive_transfers.ReportReceived)]
    assert (ended.outcome, ended.transfer_s, ended.busy_s) == (ReceiveOutcome.VERIFIED, 0.0, 0.0)
