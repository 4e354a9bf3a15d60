"""Decisions of the sender's transfer table: the order of chunks, and the reports."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvtransfer.protocol import receive_transfers, send_transfers
from kvtransfer.protocol.send_transfers import SendTransfers
from kvtransfer.protocol.transport import SendOutcome
from tests.unit.kvtransfer.harness import STAMPS, grant_of


def test_chunks_of_two_transfers_take_turns() -> None:
    out = SendTransfers(1, STAMPS)
    out.linked()
    for name in ("long", "short"):
        grant = grant_of(name, 1, 1, tuple(range(4)))
        out.start(grant, 0.0, None)
        out.push(grant.key, [(i, i) for i in range(4)], True, 0.0)
    order = []
    while (job := out.take(2, 0.0)) is not None:
        out.stamp(job)
        order.append((job.transfer.grant.key.transfer_id, job.chunk.first, job.transfer.is_stamped))
        out.written(job, 0.0)
    assert order == [("long", 0, False), ("short", 0, False), ("long", 2, True), ("short", 2, True)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_last_chunk_is_the_last_one_sent(order: tuple[int, ...]) -> None:
    """Copies on several streams end in any order. If "last" is sent too early, the receiver reports missing blocks."""
    out = SendTransfers(1, STAMPS)
    out.linked()
    grant = grant_of("t", 1, 1, tuple(range(6)))
    out.start(grant, 0.0, None)
    out.push(grant.key, [(i, i) for i in range(6)], True, 0.0)
    jobs = [out.take(2, 0.0) for _ in range(3)]
    says_last = []
    for number in order:
        job = jobs[number]
        assert job is not None
        out.stamp(job)
        says_last.append(job.transfer.is_stamped)
    assert says_last == [False, False, True]


@pytest.mark.parametrize(("groups", "pieces"), [(1, "1 of 2 blocks"), (2, "1 of 4 parts of blocks")])
def test_a_deadline_reports_the_blocks_sent(groups: int, pieces: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, 5.0, groups=groups)
    out.push(grant.key, [(0, 0)], False, 1.0, groups=range(1))
    job = out.take(1, 1.0)
    assert job is not None
    out.written(job, 1.0)
    assert out.expire(4.9) == []
    [sent] = [one.sent for one in out.expire(5.0) if isinstance(one, send_transfers.ReportSent)]
    assert sent.error == f"the deadline passed when {pieces} were sent"


def test_a_block_that_is_pushed_twice_is_named() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], False, 0.0)
    [sent] = [
        one.sent
        for one in out.push(grant.key, [(1, 1), (2, 2)], False, 0.0)
        if isinstance(one, send_transfers.ReportSent)
    ]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, "blocks 1..2 of 4 were pushed twice")


def test_a_transfer_aborted_early_is_retracted() -> None:
    """The receiver is informed, so it does not wait for its own deadline."""
    out, grant, empty = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1)), grant_of("empty", 1, 1, ())
    for each in (grant, empty):
        out.start(each, 0.0, None)
        out.abort(each.key, 1.0)
    assert out.needs_link
    retract = send_transfers.Retract(receive_transfers.tag_of(grant.key), "aborted by the sender", True)
    assert out.linked() == [retract], "the grant of nothing needs no word"
    assert not out.needs_link
    assert out.linked() == []


def test_a_cut_connection_closes_reads_silently() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    assert out.take(1, 0.0) is not None
    [report] = out.cut("the connection broke", 1.0)
    assert isinstance(report, send_transfers.ReportSent)
    assert (report.sent.outcome, report.sent.error) == (SendOutcome.FAILED, "the connection broke")
    assert out.keys == []
    assert not out.needs_link
    assert out.linked() == [], "the receiver saw the end of the connection"


def test_a_verified_transfer_is_not_retracted() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0,))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0)], True, 0.0)
    job = out.take(1, 0.0)
    assert job is not None
    out.written(job, 0.0)
    [report] = out.done(receive_transfers.tag_of(grant.key), 1.0)
    assert isinstance(report, send_transfers.ReportSent)
    assert report.sent.outcome is SendOutcome.SENT
    assert not out.needs_link
    assert out.linked() == []


@pytest.mark.parametrize(("groups", "pieces"), [(1, "2 of 4 blocks"), (2, "6 of 8 parts of blocks")])
def test_a_last_push_that_leaves_a_gap_fails_the_transfer(groups: int, pieces: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1, 2, 3))
    out.linked()
    out.start(grant, 0.0, None, groups=groups)
    actions = out.push(grant.key, [(0, 0), (3, 3)], True, 0.0, groups=range(1))
    [sent] = [one.sent for one in actions if isinstance(one, send_transfers.ReportSent)]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, f"the last push leaves {pieces} out")


@pytest.mark.parametrize(("is_cancelled", "count"), [(False, "failed"), (True, "cancelled")])
def test_a_refusal_ends_the_senders_transfer(is_cancelled: bool, count: str) -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    tag = receive_transfers.tag_of(grant.key)
    out.linked()
    out.start(grant, 0.0, None)
    [report] = out.refused(tag, "no memory", 1.0, is_cancelled=is_cancelled)
    assert isinstance(report, send_transfers.ReportSent), "the receiver knows, so that nothing is said to it"
    assert (report.sent.outcome, report.sent.error) == (SendOutcome.FAILED, "the receiver refused: no memory")
    assert getattr(out.stats, count) == 1
    assert out.refused(tag, "again", 2.0) == []
    assert out.done(tag, 2.0) == []
    assert out.stats.late_messages == 2


def test_a_refusal_while_a_block_is_read_waits_for_the_read() -> None:
    out, grant = SendTransfers(1, STAMPS), grant_of("t", 1, 1, (0, 1))
    tag = receive_transfers.tag_of(grant.key)
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)], True, 0.0)
    job = out.take(1, 0.0)
    assert job is not None
    assert out.refused(tag, "no memory", 1.0) == []
    assert out.refused(tag, "again", 1.0) == []
    assert out.stats.late_messages == 1
    assert out.take(1, 1.0) is None, "no further block is read"
    [report] = out.written(job, 2.0)
    assert isinstance(report, send_transfers.ReportSent)
    assert report.sent.error == "the receiver refused: no memory"


@pytest.mark.parametrize(
    ("is_sent", "ends_at_s", "error"),
    [
        (False, 8.0, "nothing was pushed or taken for 7 s"),
        (True, 4.0, "the receiver did not confirm it within 3 s of its last block"),
    ],
)
def test_a_transfer_without_a_deadline_ends_by_its_lease(is_sent: bool, ends_at_s: float, error: str) -> None:
    out, grant = SendTransfers(1, STAMPS, stall_s=7.0, unconfirmed_s=3.0), grant_of("t", 1, 1, (0, 1))
    out.linked()
    out.start(grant, 0.0, None)
    out.push(grant.key, [(0, 0), (1, 1)] if is_sent else [(0, 0)], is_sent, 1.0)
    job = out.take(2, 1.0)
    assert job is not None
    out.written(job, 1.0)
    assert out.next_alarm_s == ends_at_s
    assert out.expire(ends_at_s - 0.1) == []
    [sent] = [one.sent for one in out.expire(ends_at_s) if isinstance(one, send_transfers.ReportSent)]
    assert (sent.outcome, sent.error) == (SendOutcome.FAILED, error)
    assert (out.stats.failed, out.next_alarm_s) == (1, None)
