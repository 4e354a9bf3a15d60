"""Known failures of other systems, first kind: another request's KV in a committed block, with status 200.

Each test names the issue that it reproduces, and shows that its mechanism cannot lead to a committed block here. Most
of these issues were reported as "wrong output under load", months later.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.protocol.frames import Frame, Kind, pack, tag_of
from kvtransfer.protocol.transfers import Push
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.core.errors import InvalidRequest
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Heard, Pair, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves, expected

MakePair = Callable[..., Pair]
A, B, C = (bytes([byte]) * BLOCK_BYTES for byte in b"abc")
EMPTY = bytes(BLOCK_BYTES)


# The four cases of vllm-project/vllm#52234.


def test_block_ids_out_of_range_are_rejected(pair: Pair, raw: RawSender) -> None:
    """vllm#52234, case 1: block ids outside the pool or the request were used as offsets into memory."""
    with pytest.raises(InvalidRequest, match=r"grant\.blocks"):
        pair.receiver.expect(pair.grant((pair.target.num_blocks,)), Heard())
    mine = pair.grant((10,))
    received, sent = pair.begin(mine)
    with pytest.raises(InvalidRequest, match="source block 64"):
        pair.sender.push(mine.key, [(0, pair.source.num_blocks)], True)
    pair.sender.abort(mine.key)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.FAILED, SendOutcome.FAILED)
    _, tag, other = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 1, A + B)
    wait_for(lambda: pair.receiver.stats.duplicate_chunks == 1, "the chunk that reaches past the grant")
    beyond = array("I", [pair.source.num_blocks]).tobytes() if raw.is_shm else A + B  # tcp: more than it announces.
    frame = Frame(Kind.CHUNK, tag, 0, 1, 0, len(beyond), b"c" * 8, False)
    raw.send(frame.encode() + pack([0], tag.generation, 1) + beyond)
    assert other.wait().outcome is ReceiveOutcome.FAILED
    assert pair.receiver.stats.protocol_errors == 1
    assert all(pair.target.block(block) == EMPTY for block in range(pair.target.num_blocks))
    assert_still_serves(pair)


def test_a_reused_reference_writes_nothing(pair: Pair, raw: RawSender) -> None:
    """vllm#52234, case 2: a reference that had been consumed was accepted a second time."""
    grant = pair.grant((1, 2))
    assert pair.move(grant, (5, 6))[0].outcome is ReceiveOutcome.VERIFIED
    pair.target.fill((1, 2), 0x5A)  # Committed, and decoding has continued in these blocks.
    again = Heard()
    pair.sender.start(grant, again)  # Without a deadline, so the answer must end it.
    pair.sender.push(grant.key, [(0, 7), (1, 8)], True)
    assert again.wait().outcome is SendOutcome.FAILED
    assert "verified before" in again.all[0].error
    raw.announce(tag_of(grant.key))
    assert raw.hear().kind is Kind.REFUSE
    raw.chunk(tag_of(grant.key), 0, A + B, is_last=True)
    wait_for(lambda: pair.receiver.stats.late_messages >= 1, "the chunk")
    assert_still_serves(pair)
    assert pair.target.block(1) + pair.target.block(2) == b"\x5a" * 2 * BLOCK_BYTES


def test_a_stale_reference_writes_nothing(pair: Pair, raw: RawSender) -> None:
    """vllm#52234, case 3: the blocks of a stale reference belonged to another request by then."""
    old = pair.grant((1, 2), "same")
    received = Heard()
    pair.receiver.expect(old, received)
    raw.announce(tag_of(old.key))
    raw.chunk(tag_of(old.key), 0, A)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "half of the old transfer")
    pair.receiver.abort(old.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    new, heard = pair.grant((1, 2), "same"), Heard()
    pair.receiver.expect(new, heard)
    raw.announce(tag_of(new.key))
    raw.chunk(tag_of(old.key), 1, A, is_last=True)
    raw.chunk(tag_of(new.key), 0, B)
    raw.chunk(tag_of(old.key), 0, A)
    raw.chunk(tag_of(new.key), 1, C, is_last=True)
    assert heard.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.target.block(1) + pair.target.block(2) == B + C
    assert pair.receiver.stats.late_messages == 2


def test_chunks_under_another_requests_name_write_nothing(pair: Pair, raw: RawSender) -> None:
    """vllm#52234, case 4: a request id that did not belong to the reference was not noticed."""
    _, mine, received = expected(pair, (1,))
    _, other, others = expected(pair, (2,))
    raw.announce(mine)
    raw.announce(other)
    raw.chunk(other._replace(transfer=mine.transfer), 0, C)
    raw.chunk(mine._replace(attempt=mine.attempt + 1), 0, C)
    thief = RawSender(pair, "thief")
    thief.chunk(mine, 0, C, is_last=True)
    wait_for(lambda: pair.receiver.stats.late_messages == 3, "what came under a wrong name")
    raw.chunk(mine, 0, A, is_last=True)
    raw.chunk(other, 0, B, is_last=True)
    assert [received.wait().outcome, others.wait().outcome] == [ReceiveOutcome.VERIFIED] * 2
    assert (pair.target.block(1), pair.target.block(2)) == (A, B)
    thief.close()


# The other reports.


def test_blocks_of_another_prompt_are_rejected(pair: Pair) -> None:
    """TensorRT-LLM PR#19545, LMCache#2181 and similar: the right request's reference, another prompt's blocks.

    Every checksum matches, because the sent bytes have arrived. Only the receiver's copy of the prompt reveals the
    error.
    """
    for block, name in ((5, 0x55), (6, 0x66), (7, 0x77)):
        pair.source_stamps.mark(block, name)
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant, content_hashes=(0x55, 0x66))
    pair.sender.push(grant.key, [(0, 5), (1, 7)], True)
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.wait().outcome is SendOutcome.FAILED
    assert "expected 0000000000000066" in received.all[0].error
    assert pair.receiver.stats.stamp_mismatches == 1
    right = pair.grant((1, 2))
    received, _ = pair.begin(right, content_hashes=(0x55, 0x66))
    pair.sender.push(right.key, [(0, 5), (1, 6)], True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED


def test_a_reassigned_source_block_is_not_sent(pair: Pair) -> None:
    """TensorRT-LLM#12542: a block was evicted between the end of the prefill and the sending of its bytes."""
    received, sent = pair.begin(grant := pair.grant((1, 2)))
    pair.sender.push(grant.key, [(0, 5)], False)
    wait_for(lambda: pair.receiver.stats.chunks == 1, "the first block")
    outbound, _ = pair.sender.plain._transfers[grant.key]
    pushed = Push(grant.key, ((1, 6),), pair.source_stamps.epochs([6]), True, None)
    pair.source_stamps.begin([6])  # While the push was queued.
    outbound.post(pushed)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert "source block 6 was reassigned" in sent.all[0].error
    assert received.wait().outcome is ReceiveOutcome.FAILED


def test_reused_source_blocks_are_never_committed(pair: Pair) -> None:
    """vllm#21570, TensorRT-LLM#12542: the prefill side timed out and reused blocks that the decode side then read."""
    grant, received, sent = pair.grant((1, 2)), Heard(), Heard()
    before = [pair.source.block(block) for block in (5, 6)]
    assert_still_serves(pair)  # So that they are connected.
    [outbound] = pair.sender.plain._pairs.values()
    before_chunks = outbound.stats.chunks
    pair.receiver.expect(grant, received)
    with pair.receiver._lock:  # So that the receiver's thread has claimed nothing when the sender aborts.
        pair.sender.start(grant, sent)
        pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
        wait_for(lambda: bool(outbound._jobs) or outbound.stats.chunks > before_chunks, "the chunk to be under way")
        pair.sender.abort(grant.key)
        assert sent.wait().outcome is SendOutcome.FAILED
        pair.source.fill((5, 6), 0x77)
    if received.wait().outcome is ReceiveOutcome.VERIFIED:  # tcp: the bytes were already sent.
        assert [pair.target.block(block) for block in (1, 2)] == before
    else:
        assert received.all[0].outcome is ReceiveOutcome.FAILED


@pytest.mark.parametrize("block", [0, 3])
def test_bytes_that_differ_at_the_destination_are_rejected(make_pair: MakePair, transport: str, block: int) -> None:
    """vllm#44238: the source's hash was right, and the destination's bytes were not."""

    def corrupt(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK and frame.first <= block < frame.first + frame.count:
            body[(block - frame.first) * BLOCK_BYTES + 17] ^= 1
        return message

    pair = make_pair(transport, hook=corrupt)
    received, sent = pair.move(pair.grant((9, 3, 4, 12)), (5, 6, 7, 8))
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.FAILED, SendOutcome.FAILED)
    assert "checksum" in received.error
    assert pair.receiver.stats.checksum_mismatches == 1


def test_memory_is_not_freed_during_a_write(pair: Pair) -> None:
    """sglang#24527, #32564, PR#35049, Mooncake#4247: pages were reused while an aborted transfer still wrote."""
    may_leave, is_inside = threading.Event(), threading.Event()
    leave = pair.receiver.leave

    def held(claim: object) -> None:
        is_inside.set()
        assert may_leave.wait(WAIT_S)
        leave(claim)  # type: ignore[arg-type]

    pair.receiver.leave = held  # type: ignore[method-assign, assignment]
    pair.receiver._table.grace_s = 0.05
    grant = pair.grant((1, 2))
    received, _ = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
    assert is_inside.wait(WAIT_S)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.QUARANTINED
    assert pair.receiver.open_keys == [grant.key]
    may_leave.set()
    assert received.wait(2).outcome is ReceiveOutcome.DRAINED
    pair.target.fill((1, 2), 0x5A)
    assert_still_serves(pair)
    assert pair.target.block(1) + pair.target.block(2) == b"\x5a" * 2 * BLOCK_BYTES


def test_regranted_blocks_hold_the_last_contents(pair: Pair) -> None:
    """sglang#23020: accuracy fell from 96 to 46 % over hours, as late writes damaged more and more pages."""
    for turn in range(100):
        grant = pair.grant((3, 1, 2), "again")
        sources = tuple((turn * step) % pair.source.num_blocks for step in (1, 3, 5))
        if turn % 3 == 2:  # Aborted half-way, so that its chunks are late.
            received, _ = pair.begin(grant)
            pair.sender.push(grant.key, [(0, sources[0])], False)
            pair.receiver.abort(grant.key)
            assert received.wait().outcome is ReceiveOutcome.DRAINED
        else:
            assert pair.move(grant, sources)[0].outcome is ReceiveOutcome.VERIFIED
            pair.assert_equal(grant, sources)


def test_concurrent_attempts_do_not_mix(pair: Pair) -> None:
    """sglang#22716: two requests shared a metadata index, and one's data went to the other."""
    first = pair.grant((1, 2), "one")
    second = replace(pair.grant((3, 4), "one"), key=replace(first.key, attempt=2))
    heard = [pair.begin(grant)[0] for grant in (first, second)]
    for index in range(2):
        pair.sender.push(first.key, [(index, 10 + index)], index == 1)
        pair.sender.push(second.key, [(index, 20 + index)], index == 1)
    assert [one.wait().outcome for one in heard] == [ReceiveOutcome.VERIFIED] * 2
    pair.assert_equal(first, (10, 11))
    pair.assert_equal(second, (20, 21))


def test_each_side_numbers_its_blocks_itself(pair: Pair) -> None:
    """sglang#31471: a physical block number was used in place of a virtual one."""
    grant = pair.grant((40, 7, 6, 21, 22), num_cached_blocks=3)  # A grant's indices begin after the cached blocks.
    sources = (2, 63, 0, 30, 11)
    assert pair.move(grant, sources)[0].outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, sources)
    untouched = set(range(pair.target.num_blocks)) - set(grant.blocks)
    assert all(pair.target.block(block) == EMPTY for block in untouched)
