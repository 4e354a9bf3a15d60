"""Joining the parts of a transfer: single rules, and every order of events of up to three members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent
from kvtransfer.ranks.joint import (
    EndPart,
    JointTransfers,
    Opened,
    ReportJoint,
    join_received,
    join_sent,
    rank_grant,
    rank_key,
    rank_pairs,
)
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.kv_shape import Fingerprint, KvShape, TransferKey
from tests.unit.kvtransfer.harness import grant_of

KEY = TransferKey(transfer_id="t", attempt=1, generation=5)


def received(outcome: ReceiveOutcome, fault: str = "", **fields: Any) -> Received:
    error = fault and f"it was {fault}"
    return Received(key=KEY, outcome=outcome, error=error, fault=fault, **fields)


VERIFIED = received(ReceiveOutcome.VERIFIED)
CUT = received(ReceiveOutcome.FAILED, "cut")
CANCELLED = received(ReceiveOutcome.FAILED, "cancelled")
DRAINED = received(ReceiveOutcome.DRAINED, "aborted")
QUARANTINED = received(ReceiveOutcome.QUARANTINED, "aborted")


def joint(members: Sequence[int] = (0, 1), unopened: Sequence[int] = ()) -> JointTransfers[int, Received]:
    table: JointTransfers[int, Received] = JointTransfers(join_received)
    table.open(KEY, members, unopened)
    return table


def test_a_joint_transfer_needs_every_part() -> None:
    table = joint((0, 1, 2))
    for member, num_bytes in ((2, 10), (0, 20)):
        assert table.ended(KEY, member, replace(VERIFIED, num_bytes=num_bytes, transfer_s=member)) == []
    [report] = table.ended(KEY, 1, replace(VERIFIED, num_bytes=30, busy_s=0.5))
    assert report == ReportJoint(replace(VERIFIED, num_bytes=60, transfer_s=2, busy_s=0.5))
    assert table.keys == []


def test_a_failed_part_aborts_the_others() -> None:
    table = joint((0, 1, 2))
    assert table.ended(KEY, 0, VERIFIED) == []
    assert table.ended(KEY, 1, CUT) == [EndPart(KEY, 2, "another rank's part failed: it was cut")]
    [report] = table.ended(KEY, 2, received(ReceiveOutcome.FAILED, "refused"))
    assert report == ReportJoint(CUT)


def test_a_part_that_was_cancelled_cancels_the_others() -> None:
    table = joint()
    assert table.ended(KEY, 1, CANCELLED) == [EndPart(KEY, 0, "")]
    [report] = table.ended(KEY, 0, DRAINED)
    assert isinstance(report, ReportJoint)
    assert (report.end.outcome, report.end.is_cancelled) == (ReceiveOutcome.FAILED, True)


def test_a_failure_outweighs_an_earlier_cancel() -> None:
    """Both reports have one cause: a failing sender does not cancel other shards on purpose."""
    table = joint()
    table.ended(KEY, 1, CANCELLED)
    assert table.ended(KEY, 0, CUT) == [ReportJoint(CUT)]


def test_quarantine_is_reported_once_before_the_end() -> None:
    table = joint()
    assert table.ended(KEY, 0, QUARANTINED) == [], "nobody has aborted"
    assert table.abort(KEY) == [EndPart(KEY, 0, ""), EndPart(KEY, 1, "")]
    assert table.abort(KEY) == []
    assert table.ended(KEY, 1, QUARANTINED) == [ReportJoint(QUARANTINED)]
    assert table.ended(KEY, 0, QUARANTINED) == []
    assert table.ended(KEY, 0, DRAINED) == []
    assert table.ended(KEY, 1, DRAINED) == [ReportJoint(DRAINED)]
    assert table.abort(KEY) == []
    assert table.ended(KEY, 1, DRAINED) == []


def test_an_abort_reaches_the_remaining_parts() -> None:
    table = joint((0, 1, 2))
    table.ended(KEY, 0, CUT)
    assert table.abort(KEY) == [EndPart(KEY, 1, ""), EndPart(KEY, 2, "")]
    table.ended(KEY, 1, DRAINED)
    assert table.ended(KEY, 2, DRAINED) == [ReportJoint(replace(CUT, outcome=ReceiveOutcome.DRAINED))]


def test_an_abort_after_verification_has_no_effect() -> None:
    table = joint()
    table.ended(KEY, 0, VERIFIED)
    table.abort(KEY)
    assert table.ended(KEY, 1, VERIFIED) == [ReportJoint(VERIFIED)], "the sender was told that it is"


def test_a_grant_is_open_when_every_rank_has_opened_it() -> None:
    table = joint((0, 1, 2), unopened=(1, 2))
    assert table.opened(KEY, 2) == []
    assert table.opened(KEY, 2) == []
    assert table.opened(KEY, 0) == []
    assert table.opened(KEY, 1) == [Opened(KEY)]
    assert table.opened(KEY, 1) == []


@pytest.mark.parametrize("ends", ["abort", "fail"])
def test_an_abandoned_grant_is_not_reported(ends: str) -> None:
    table = joint((0, 1), unopened=(1,))
    if ends == "abort":
        table.abort(KEY)
    else:
        table.ended(KEY, 0, CUT)
    assert table.opened(KEY, 1) == []


def test_a_key_in_use_is_rejected() -> None:
    table = joint()
    with pytest.raises(InvalidRequest, match=r"grant\.key"):
        table.open(KEY, (0,))
    table.forget(KEY)
    assert KEY not in table.keys
    table.open(KEY, (0,))
    assert table.members(KEY) == [0]


def test_sent_parts_add_up() -> None:
    ends = [
        Sent(key=KEY, outcome=SendOutcome.SENT, num_bytes=5, send_s=1.0, busy_s=0.1, exposed_s=0.3, early_bytes=2),
        Sent(key=KEY, outcome=SendOutcome.SENT, num_bytes=7, send_s=0.5, busy_s=0.4, exposed_s=0.2, wire_dtype="int8"),
    ]
    assert join_sent(KEY, ends, is_aborted=False) == Sent(
        key=KEY,
        outcome=SendOutcome.SENT,
        num_bytes=12,
        send_s=1.0,
        busy_s=0.4,
        exposed_s=0.3,
        early_bytes=2,
        wire_dtype="int8",
    )
    lost = Sent(key=KEY, outcome=SendOutcome.FAILED, error="gone", fault="cut")
    joined = join_sent(KEY, [ends[0], lost], is_aborted=False)
    assert (joined.outcome, joined.error, joined.fault) == (SendOutcome.FAILED, "gone", "cut")


# Every order of events. A member is a rank of a receiver, which ends by itself or after an order to give up.


@dataclass(frozen=True)
class Rank:
    """The state of a member: the orders that it got, and the reports that it made."""

    told: tuple[str, ...] = ()
    is_quarantined: bool = False
    end: Received | None = None

    def can_say(self) -> Iterator[Received]:
        if self.end is not None:
            return
        yield VERIFIED
        yield CUT
        yield CANCELLED
        if "" in self.told:
            yield DRAINED
            if not self.is_quarantined:
                yield QUARANTINED


def explore(num_members: int) -> int:
    """Explores all sequences of events depth first, and returns the number of complete ones."""

    def run(history: list[Any]) -> tuple[JointTransfers[int, Received], list[Rank], list[Received], bool]:
        table = joint(range(num_members))
        ranks, told, is_aborted = [Rank() for _ in range(num_members)], [], False
        for event in history:
            if event == "abort":
                actions: Sequence[Any] = table.abort(KEY)
                is_aborted = True
            else:
                member, end = event
                rank = ranks[member]
                if end is QUARANTINED:
                    ranks[member] = replace(rank, is_quarantined=True)
                else:
                    ranks[member] = replace(rank, end=end)
                actions = table.ended(KEY, member, end)
            for action in actions:
                if isinstance(action, EndPart):
                    rank = ranks[action.member]
                    assert rank.end is None, "a part that has ended received a message"
                    ranks[action.member] = replace(rank, told=(*rank.told, action.error))
                else:
                    told.append(action.end)
        return table, ranks, told, is_aborted

    def check(history: list[Any]) -> bool:
        table, ranks, told, is_aborted = run(history)
        ends = [rank.end for rank in ranks]
        is_over = all(end is not None for end in ends)
        last = [end for end in told if end.outcome is not ReceiveOutcome.QUARANTINED]
        assert len(last) == is_over, "one end, when the last part has ended and not before"
        assert bool(table.keys) is not is_over
        assert len(told) - len(last) <= is_aborted, "quarantine at most once, and only after an abort"
        if any(end is not None and end is not VERIFIED for end in ends) or is_aborted:
            assert all(rank.told or rank.end for rank in ranks), "a part goes on although the transfer is lost"
        if is_over:
            assert told[-1] is last[0], "nothing comes after the end"
            assert (last[0].outcome is ReceiveOutcome.VERIFIED) == (ends == [VERIFIED] * num_members)
            if last[0].outcome is not ReceiveOutcome.VERIFIED:
                assert (last[0].outcome is ReceiveOutcome.DRAINED) == is_aborted
                assert last[0].is_cancelled == (CUT not in ends)
        return is_over

    complete, todo = 0, [[]]
    while todo:
        history: list[Any] = todo.pop()
        if check(history):
            complete += 1
            continue
        _, ranks, _, is_aborted = run(history)
        todo += [[*history, (member, end)] for member, rank in enumerate(ranks) for end in rank.can_say()]
        if not is_aborted:
            todo.append([*history, "abort"])
    return complete


def test_every_order_of_two_ranks_ends_correctly() -> None:
    assert explore(2) > 100


@pytest.mark.slow
def test_every_order_of_three_ranks_ends_correctly() -> None:
    assert explore(3) > 1000


def test_the_exploration_finds_a_join_that_commits_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(key: TransferKey, ends: Sequence[Received], is_aborted: bool) -> Received:
        return ends[0]

    monkeypatch.setitem(globals(), "join_received", first)
    with pytest.raises(AssertionError):
        explore(2)


# Which ranks transfer which heads.

SHAPE = KvShape(layout="block-major.v1", dtype="float32", num_layers=2, num_kv_heads=4, head_dim=8, block_size=16)


@pytest.mark.parametrize(
    ("degrees", "pairs"),
    [
        ((1, 1), [(0, 0)]),
        ((1, 2), [(0, 0), (0, 1)]),
        ((2, 1), [(0, 0), (1, 0)]),
        ((2, 2), [(0, 0), (1, 1)]),
        ((2, 4), [(0, 0), (0, 1), (1, 2), (1, 3)]),
        ((4, 2), [(0, 0), (1, 0), (2, 1), (3, 1)]),
        ((8, 2), [(0, 0), (2, 0), (4, 1), (6, 1)]),  # Eight ranks for four heads: pairs of ranks have the same head.
        ((2, 8), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]),
    ],
)
def test_each_rank_sends_to_the_owners_of_its_heads(degrees: tuple[int, int], pairs: list[tuple[int, int]]) -> None:
    source, target = (replace(SHAPE, tp_degree=degree) for degree in degrees)
    assert rank_pairs(source, target) == pairs


def test_each_rank_grants_the_same_block_numbers() -> None:
    facts = Fingerprint(protocol=1, model="m", engine="e", shape=replace(SHAPE, tp_degree=2))
    grant = replace(grant_of("t", 1, 5, (3, 4)), fingerprint=facts, endpoint="a:1", rank_endpoints=("b:2",))
    one = rank_grant(grant, 1)
    assert (one.key, one.endpoint, one.blocks) == (rank_key(grant.key, 1), "b:2", grant.blocks)
    assert one.key.transfer_id == "t/1"
    assert (one.fingerprint.shape.tp_rank, one.rank_endpoints) == (1, ())
    assert rank_grant(grant, 0).endpoint == "a:1"
    alone = replace(grant, fingerprint=replace(facts, shape=SHAPE), rank_endpoints=())
    assert rank_grant(alone, 0) == alone
