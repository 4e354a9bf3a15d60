"""Known failures of other systems, second kind: blocks that are never freed, transfers that never end.

Each test names the issue that it reproduces. Where the issue mentions a timeout of minutes, the test sets none: the
protocol itself must end the transfer at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.protocol.frames import Frame, Kind, Tag, pack, tag_of
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.kv.kv_shape import Grant
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Heard, Pair, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves

MakePair = Callable[..., Pair]
FAILED_BOTH = (ReceiveOutcome.FAILED, SendOutcome.FAILED)


def kept(pair: Pair) -> dict[str, int]:
    """Sizes of all tables that contain transfers, on both sides."""
    table = pair.receiver._table
    outbounds = list(pair.sender.plain._pairs.values())
    return {
        "grants": len(table._open),
        "owners of targets": len(pair.receiver._reports),
        "transfers of the sender": len(pair.sender.plain._transfers),
        "departures": sum(len(one._table._open) for one in outbounds),
        "owners of departures": sum(len(one._owners) for one in outbounds),
        "jobs": sum(len(one._jobs) for one in outbounds),
        "words unsaid": sum(len(one._table._unsent) for one in outbounds),
    }


def assert_nothing_is_kept(pair: Pair) -> None:
    wait_for(lambda: not any(kept(pair).values()), f"{kept(pair)} to be empty")


# Missing reports.


def test_unclaimed_blocks_are_freed_at_the_deadline(pair: Pair) -> None:
    """vllm#46283: in push mode the decode side's blocks were freed only after a message of the prefill side."""
    received = Heard()
    pair.receiver.expect(pair.grant((1, 2)), received, deadline_s=0.2)
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert "deadline" in received.all[0].error
    assert_nothing_is_kept(pair)


def test_an_unexpected_sender_is_refused_at_once(pair: Pair) -> None:
    """vllm PR#41269: a request that was rejected before admission left its prefill blocks held for 480 s."""
    sent, grant = Heard(), pair.grant((1, 2))
    pair.sender.start(grant, sent)
    pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert "does not expect" in sent.all[0].error
    assert_nothing_is_kept(pair)


@pytest.mark.parametrize("side", ["receiver", "sender"])
@pytest.mark.parametrize("is_connected", [False, True])
def test_an_abort_frees_the_other_side_at_once(pair: Pair, side: str, is_connected: bool) -> None:
    """vllm PR#19223, dynamo PR#7489: a client that left early stranded the other worker's blocks."""
    received, sent = pair.begin(grant := pair.grant((1, 2)))
    if is_connected:
        wait_for(lambda: bool(pair.receiver._table._open[tag_of(grant.key)].shards), "the first word")
    getattr(pair, side).abort(grant.key)
    received.wait()
    sent.wait()
    assert_nothing_is_kept(pair)


def test_idle_sides_keep_their_deadlines(pair: Pair) -> None:
    """TensorRT-LLM PR#12313: timeouts were checked only when a new request came, which the leak prevented."""
    grant = pair.grant((1, 2))
    received, sent = Heard(), Heard()
    pair.receiver.expect(grant, received, deadline_s=0.3)
    pair.sender.start(grant, sent, deadline_s=0.4)
    pair.sender.push(grant.key, [(0, 5)], False)  # The last block never comes, and nothing else happens.
    assert (received.wait().outcome, sent.wait().outcome) == FAILED_BOTH
    assert_nothing_is_kept(pair)


# Many failed transfers.


def test_orphaned_transfers_do_not_exhaust_the_sender(pair: Pair) -> None:
    """vllm PR#51236: twenty orphaned transfers filled the sender's pool of workers for good."""
    orphans = [pair.grant((index,)) for index in range(60)]
    heard = [Heard() for _ in orphans]
    for grant, sent in zip(orphans, heard, strict=True):
        pair.sender.start(grant, sent)  # The receiver does not expect them.
    assert_still_serves(pair)
    assert [sent.wait().outcome for sent in heard] == [SendOutcome.FAILED] * len(orphans)
    assert_nothing_is_kept(pair)


def _give_up(pair: Pair, turn: int, grant: Grant) -> None:
    match turn % 4:
        case 0:
            pair.receiver.abort(grant.key)
        case 1:
            pair.sender.abort(grant.key)
        case 2:
            pair.sender.push(grant.key, [(0, 5)], True)  # A gap.
        case 3:
            pair.sender.push(grant.key, [(0, 5), (0, 5)], False)  # A block that is pushed twice.


def test_failed_transfers_leave_no_state(pair: Pair) -> None:
    """sglang#9266, #23272, #11648, dynamo#4178, vllm#57705: entries of failed requests filled the tables over days."""
    for turn in range(40):
        received, sent = pair.begin(grant := pair.grant((1, 2)))
        _give_up(pair, turn, grant)
        assert received.wait().outcome in (ReceiveOutcome.FAILED, ReceiveOutcome.DRAINED)
        assert sent.wait().outcome is SendOutcome.FAILED
    assert_nothing_is_kept(pair)
    assert len(pair.receiver._table._alarms) <= 64 + 2
    assert_still_serves(pair)


def test_a_burst_of_cancellations_does_not_block_the_pair(make_pair: MakePair, transport: str) -> None:
    """TensorRT-LLM PR#13713, PR#13056: after a burst of cancelled long prompts every later request timed out."""
    pair = make_pair(transport, num_blocks=512)
    grants = [pair.grant(tuple(range(16 * index, 16 * index + 16))) for index in range(24)]
    heard = [pair.begin(grant) for grant in grants]
    for index, grant in enumerate(grants):
        pair.sender.push(grant.key, list(enumerate(range(16 * index, 16 * index + 16))), True)
        (pair.receiver if index % 2 else pair.sender).abort(grant.key)
    for received, sent in heard:
        assert received.wait().outcome in (ReceiveOutcome.FAILED, ReceiveOutcome.DRAINED, ReceiveOutcome.VERIFIED)
        sent.wait()
    assert_nothing_is_kept(pair)
    assert_still_serves(pair)


def test_ungranted_announcements_use_no_memory(pair: Pair, raw: RawSender) -> None:
    """sglang#39428: each unknown room that was named made an entry that stayed."""
    before = kept(pair)
    remembered = len(pair.receiver._table._ended)
    for number in range(500):
        raw.announce(Tag(number.to_bytes(16, "little"), 1, 1))
        assert raw.hear().kind is Kind.REFUSE
    assert kept(pair) == before
    assert len(pair.receiver._table._ended) == remembered
    assert len(pair.receiver._connections) == 1


# A side that waits.


def test_a_sender_stopped_in_a_chunk_holds_nothing(pair: Pair, raw: RawSender) -> None:
    """vllm#42839: the receiving thread waited on a condition without a timeout, for ever."""
    grant = pair.grant((1, 2))
    received = Heard()
    pair.receiver.expect(grant, received, deadline_s=0.3)
    tag = tag_of(grant.key)
    raw.announce(tag)
    length = 4 if raw.is_shm else BLOCK_BYTES
    frame = Frame(Kind.CHUNK, tag, 0, 1, 0, length, b"c" * 8, False).encode() + pack([0], tag.generation, 1)
    raw.send(frame + bytes(length // 2))
    assert_still_serves(pair)  # Another connection is not delayed.
    assert received.wait().outcome is ReceiveOutcome.FAILED
    again, _ = pair.begin(second := pair.grant((1, 2)))  # The same blocks, while the old chunk is still incomplete.
    pair.sender.push(second.key, [(0, 5), (1, 6)], True)
    assert again.wait().outcome is ReceiveOutcome.VERIFIED
    raw.send(bytes(length - length // 2))
    raw.announce(tag._replace(generation=0))
    assert raw.hear().kind is Kind.REFUSE  # The rest of the transfer that the deadline ended.
    assert raw.hear().kind is Kind.REFUSE  # So the rest of the chunk has been read.
    pair.assert_equal(second, (5, 6))


def test_a_waiting_transfer_delays_no_other(pair: Pair) -> None:
    """vllm PR#18242, PR#10502: sends and receives of a pair had to match in order, or both sides hung."""
    received, sent = pair.begin(waiting := pair.grant((1, 2)))
    pair.sender.push(waiting.key, [(0, 5)], False)
    for turn in range(5):
        assert pair.move(pair.grant((10 + turn,)), (20 + turn,))[0].outcome is ReceiveOutcome.VERIFIED
    pair.sender.push(waiting.key, [(1, 6)], True)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)


def test_nothing_is_dropped_if_buffers_are_full(make_pair: MakePair, transport: str) -> None:
    """P2pNccl dropped tensors beyond its buffer without a word, and the other side waited (vllm#42839, #44854)."""
    pair = make_pair(transport, num_blocks=4096)
    grants = [pair.grant(tuple(range(512 * index, 512 * index + 512))) for index in range(8)]
    heard = [pair.begin(grant) for grant in grants]
    for index, grant in enumerate(grants):
        pair.sender.push(grant.key, list(enumerate(range(512 * index, 512 * index + 512))), True)
    assert {received.wait().outcome for received, _ in heard} == {ReceiveOutcome.VERIFIED}
    assert {sent.wait().outcome for _, sent in heard} == {SendOutcome.SENT}


def test_a_silent_handshake_ends_at_the_deadline(pair: Pair) -> None:
    """nccl#829, #1013 and similar: if a rank never joins, the others stay in init for ever."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # Accepts connections, but sends nothing.
        grant = pair.grant((1,), endpoint=f"127.0.0.1:{silent.getsockname()[1]}")
        sent = Heard()
        pair.sender.start(grant, sent, deadline_s=0.3)
        pair.sender.push(grant.key, [(0, 5)], True)
        assert sent.wait().outcome is SendOutcome.FAILED
        assert_still_serves(pair)


@pytest.mark.parametrize("field", ["model", "engine", "protocol"])
def test_incompatible_workers_are_reported_at_once(pair: Pair, field: str) -> None:
    """llm-d#2433, local-inference-lab/vllm#191, #192: a configuration that did not match showed as a client's hang."""
    facts = pair.grant((1,)).fingerprint
    mine = getattr(facts, field)
    theirs: Any = mine + 1 if isinstance(mine, int) else f"another {mine}"
    grant = pair.grant((1,), fingerprint=replace(facts, **{field: theirs}))
    sent = Heard()
    pair.sender.start(grant, sent)  # No deadline.
    assert sent.wait().outcome is SendOutcome.FAILED
    assert f"fingerprint.{field}" in sent.all[0].error
    assert str(mine) in sent.all[0].error
    assert str(theirs) in sent.all[0].error
    assert_nothing_is_kept(pair)
