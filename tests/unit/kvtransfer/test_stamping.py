"""The three errors that stamps detect: another text's block, a reused source block, a reused target block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.link.dial import DataConnection, dial
from kvtransfer.protocol.frames import (
    GREETING_BYTES,
    STAMP_BYTES,
    BadFrame,
    Frame,
    Greeting,
    Kind,
    content_hashes_in,
    decode_greeting,
    difference,
    pack,
    tag_of,
)
from kvtransfer.protocol.receive_transfers import ReceiveTransfers
from kvtransfer.protocol.send_transfers import SendTransfers, StaleSource
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports.tcp import TcpReceive
from pdserve.core.errors import InvalidRequest
from pdserve.core.kv.stamps import BlockStamps
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Pair, grant_of, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves

MakePair = Callable[..., Pair]
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


# The encoding.


@given(st.lists(U64, max_size=9), U64, U32)
def test_stamps_survive_the_wire(content_hashes: list[int], generation: int, mask: int) -> None:
    packed = pack(content_hashes, generation, mask)
    assert len(packed) == STAMP_BYTES * len(content_hashes)
    assert content_hashes_in(packed) == tuple(content_hashes)
    assert difference(packed, packed) is None


@given(st.lists(U64, min_size=1, max_size=9), U32, U32, st.data())
def test_any_flipped_bit_changes_its_stamp(
    content_hashes: list[int], generation: int, mask: int, data: st.DataObject
) -> None:
    good = pack(content_hashes, generation, mask)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    found = difference(bytes(bad), good)
    assert found is not None
    assert found[0] == bit // 8 // STAMP_BYTES


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (pack([1, 9], 7, 1), "content hash 0000000000000009, expected 0000000000000002"),
        (pack([1, 2], 8, 1), "generation 8, expected 7"),
        (pack([1, 2], 7, 3), "layer groups 0x3, expected 0x1"),
        (pack([1], 7, 1), "16 bytes of stamps, expected 32"),
    ],
)
def test_a_difference_names_the_field_and_both_values(seen: bytes, said: str) -> None:
    found = difference(seen, pack([1, 2], 7, 1))
    assert found is not None
    assert found[1] == said


def test_only_the_low_half_of_a_generation_is_sent() -> None:
    assert pack([1], (5 << 32) + 7, 1) == pack([1], 7, 1)


# The tables.


def departures() -> tuple[SendTransfers, BlockStamps]:
    stamps = BlockStamps(8)
    out = SendTransfers(1, stamps)
    out.start(grant_of("t", 1, 5, (0, 1)), 0.0, None)
    out.linked()
    stamps.begin((3, 4))
    stamps.mark(3, 33)
    stamps.mark(4, 44)
    out.push(grant_of("t", 1, 5, (0, 1)).key, [(0, 3), (1, 4)], True, 0.0)
    return out, stamps


def test_stamps_come_from_the_table_at_packing() -> None:
    out, stamps = departures()
    job = out.take(2, 0.0)
    assert job is not None
    assert out.stamp(job) == pack([33, 44], 5, 1)
    stamps.mark(4, 45)  # An error of the worker, which the receiver will detect.
    assert out.stamp(job) == pack([33, 45], 5, 1)


def test_a_source_block_reused_before_packing_is_not_sent() -> None:
    out, stamps = departures()
    stamps.begin([4])
    job = out.take(2, 0.0)
    assert job is not None
    with pytest.raises(StaleSource, match="source block 4 was reassigned"):
        out.stamp(job)
    [retract, report] = out.stale(job, "source block 4 was reassigned", 0.0)
    assert (out.stats.stale_source, retract.error) == (1, report.sent.error)  # type: ignore[union-attr]
    assert report.sent.fault == "stale"  # type: ignore[union-attr]
    assert out.keys == []


def test_a_reused_source_block_fails_the_transfer() -> None:
    out, stamps = departures()
    job = out.take(2, 0.0)
    assert job is not None
    out.stamp(job)
    stamps.begin([3])
    out.written(job, 0.0)
    assert (out.stats.stale_source, out.stats.failed, out.keys) == (1, 1, [])


def test_the_epoch_at_the_push_counts() -> None:
    stamps = BlockStamps(8)
    out = SendTransfers(1, stamps)
    grant = grant_of("t", 1, 5, (0,))
    out.start(grant, 0.0, None)
    out.linked()
    pushed = stamps.epochs([3])
    stamps.begin([3])  # After the engine thread's push and before this thread's turn.
    out.push(grant.key, [(0, 3)], True, 0.0, epochs=pushed)
    job = out.take(1, 0.0)
    assert job is not None
    with pytest.raises(StaleSource):
        out.stamp(job)


def target(content_hashes: list[int] | None) -> tuple[ReceiveTransfers, BlockStamps]:
    stamps = BlockStamps(8)
    stamps.begin((5, 6))
    table, grant = ReceiveTransfers(stamps), grant_of("t", 1, 5, (5, 6))
    table.expect(grant, 0.0, None, content_hashes)
    table.announce(tag_of(grant.key), 1)
    return table, stamps


TAG = tag_of(grant_of("t", 1, 5, ()).key)


@pytest.mark.parametrize(
    "stamps", [pack([1, 3], 5, 1), pack([2, 1], 5, 1), pack([1, 2], 6, 1), pack([1, 2], 5, 2), pack([0, 0], 5, 1)]
)
def test_a_wrong_stamp_ends_the_transfer(stamps: bytes) -> None:
    table, _ = target([1, 2])
    assert table.claim(TAG, 1, 0, stamps, 0.0) is None
    answer, report = table.review(TAG, 0.0)
    assert (report.received.outcome, report.received.fault) == (ReceiveOutcome.FAILED, "mistaken")  # type: ignore[union-attr]
    assert answer.error == report.received.error  # type: ignore[union-attr]
    assert (table.stats.stamp_mismatches, table.stats.chunks, table.keys) == (1, 0, [])


def test_a_second_chunk_is_compared_with_its_own_hashes() -> None:
    table, _ = target([1, 2])
    assert table.claim(TAG, 1, 1, pack([2], 5, 1), 0.0) is not None
    assert table.claim(TAG, 1, 0, pack([2], 5, 1), 0.0) is None
    assert "the stamp of block 0 of the grant has content hash 0000000000000002" in table.review(TAG, 0.0)[0].error  # type: ignore[union-attr]


def test_without_expected_hashes_grant_and_groups_are_compared() -> None:
    table, _ = target(None)
    assert table.claim(TAG, 1, 0, pack([8], 5, 1), 0.0) is not None
    assert table.claim(TAG, 1, 1, pack([8], 4, 1), 0.0) is None


@pytest.mark.parametrize("block", [5, 6])
def test_a_reassigned_target_block_gets_no_claim(block: int) -> None:
    table, stamps = target([1, 2])
    claim = table.claim(TAG, 1, 0, pack([1, 2], 5, 1), 0.0)
    assert claim is not None
    assert table.enter(claim)
    table.leave(claim, 0.0)
    stamps.begin([block])
    assert not table.enter(claim)
    [_, report] = table.review(TAG, 0.0)
    assert report.received.fault == "stale"  # type: ignore[union-attr]
    assert report.received.error == f"block {block} was reassigned while it was granted"  # type: ignore[union-attr]
    assert table.stats.stale_target == 1


def test_a_reassigned_target_block_is_not_verified() -> None:
    table, stamps = target([1, 2])
    claim = table.claim(TAG, 1, 0, pack([1, 2], 5, 1), 0.0)
    assert claim is not None
    assert table.enter(claim)
    stamps.begin([6])
    table.leave(claim, 0.0)
    [_, report] = table.settle(claim, 2, True, True, 0.0)
    assert report.received.outcome is ReceiveOutcome.FAILED  # type: ignore[union-attr]
    assert table.stats.stale_target == 1


def test_hashes_for_another_number_of_blocks_are_refused() -> None:
    table = ReceiveTransfers(BlockStamps(8))
    with pytest.raises(InvalidRequest, match="content_hashes: got 1 hashes, expected 2, one for each granted block"):
        table.expect(grant_of("t", 1, 5, (5, 6)), 0.0, None, [1])


# Over real connections.


def ready(pair: Pair, content_hashes: dict[int, int]) -> None:
    """Fills the source blocks with these hashes."""
    pair.source_stamps.begin(content_hashes)
    for block, content_hash in content_hashes.items():
        pair.source_stamps.mark(block, content_hash)


def test_blocks_of_the_right_text_are_accepted(pair: Pair) -> None:
    ready(pair, {7: 70, 8: 80, 9: 90})
    grant = pair.grant((3, 1, 2))
    received, sent = pair.begin(grant, content_hashes=(70, 80, 90))
    pair.sender.push(grant.key, [(0, 7), (1, 8), (2, 9)], True)
    assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.SENT)
    pair.assert_equal(grant, (7, 8, 9))


def test_blocks_of_another_text_are_rejected_before_any_write(pair: Pair) -> None:
    """The sender detects nothing: checksum, coverage and grant are right."""
    ready(pair, {7: 70, 8: 80})
    pair.target.fill((1, 2), 0xEE)
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant, content_hashes=(70, 81))
    pair.sender.push(grant.key, [(0, 7), (1, 8)], True)
    end = received.wait()
    assert (end.outcome, end.fault) == (ReceiveOutcome.FAILED, "mistaken")
    assert end.error == (
        "the stamp of block 1 of the grant has content hash 0000000000000050, expected 0000000000000051"
    )
    assert sent.wait().outcome is SendOutcome.FAILED
    assert pair.target.block(1) + pair.target.block(2) == b"\xee" * 2 * BLOCK_BYTES
    assert pair.receiver.stats.stamp_mismatches == 1
    assert_still_serves(pair)


def test_an_unmarked_block_is_rejected(pair: Pair) -> None:
    pair.source_stamps.begin([7])
    grant = pair.grant((1,))
    received, _ = pair.begin(grant, content_hashes=(70,))
    pair.sender.push(grant.key, [(0, 7)], True)
    assert received.wait().fault == "mistaken"


def test_a_source_block_reused_while_waiting_is_not_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pair is being connected, the worker assigns the block to another sequence, which marks it again."""
    release = threading.Event()

    def slowly(*args: Any) -> DataConnection:
        assert release.wait(WAIT_S)
        return dial(*args)

    monkeypatch.setattr("kvtransfer.link.dial.dial", slowly)
    ready(pair, {7: 70, 8: 80})
    grant = pair.grant((1, 2))
    received, sent = pair.begin(grant, content_hashes=(70, 80))
    pair.sender.push(grant.key, [(0, 7), (1, 8)], True)
    pair.source_stamps.begin([8])
    pair.source_stamps.mark(8, 80)  # Even with the right hash.
    pair.source.fill((8,), 0x66)
    release.set()
    end = sent.wait()
    assert (end.outcome, end.fault) == (SendOutcome.FAILED, "stale")
    assert end.error == "source block 8 was reassigned while it was being sent"
    assert received.wait().error == f"the sender gave up: {end.error}"
    assert (pair.sender.stats.stale_source, pair.sender.stats.chunks) == (1, 0)
    assert_still_serves(pair)


def test_a_reused_target_block_is_not_written(make_pair: MakePair, transport: str) -> None:
    held, release = threading.Event(), threading.Event()

    def hook(frame: Frame, message: bytearray, body: memoryview) -> bytearray:
        if frame.kind is Kind.CHUNK and frame.tag.generation == 1:
            held.set()
            assert release.wait(WAIT_S)
        return message

    pair = make_pair(transport, hook=hook)
    ready(pair, {7: 70})
    grant = pair.grant((1,))
    received, sent = pair.begin(grant, content_hashes=(70,))
    pair.sender.push(grant.key, [(0, 7)], True)
    assert held.wait(WAIT_S)
    pair.target_stamps.begin([1])  # The worker has reassigned the block under an open grant, which is its own error.
    pair.target.fill((1,), 0x77)
    release.set()
    end = received.wait()
    assert (end.outcome, end.fault) == (ReceiveOutcome.FAILED, "stale")
    assert end.error == "block 1 was reassigned while it was granted"
    assert sent.wait().outcome is SendOutcome.FAILED
    assert pair.target.block(1) == b"\x77" * BLOCK_BYTES
    assert pair.receiver.stats.stale_target == 1
    assert_still_serves(pair)


def test_another_protocol_version_is_named(pair: Pair) -> None:
    with pytest.raises(BadFrame, match="frame version 99, expected 3"):
        decode_greeting(b"PDKV\x63")
    with pytest.raises(BadFrame, match="does not begin with the magic bytes"):
        decode_greeting(b"GET /")
    words = Greeting(b"t" * 16, b"n" * 16, b"m" * 32)
    assert decode_greeting(words.encode()) == words
    assert len(words.encode()) == GREETING_BYTES
    assert decode_greeting(words.encode()[:-1]) is None
    raw = RawSender(pair)
    good = Frame(Kind.ANNOUNCE, TAG).encode()
    raw.send(good[:4] + b"\x63" + good[5:])
    assert raw.is_cut()
    wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the count")
    raw.close()
    assert_still_serves(pair)


def test_each_transport_checks_its_frames() -> None:
    """A tcp chunk of the wrong length cannot be skipped, so its connection ends."""

    class Link:
        def size_of(self, frame: Frame) -> int:
            return 8 * frame.count

    path = TcpReceive(Link())  # type: ignore[arg-type]
    path.check(Frame(Kind.CHUNK, TAG, 0, 2, length=16))
    with pytest.raises(BadFrame, match="a chunk of 2 blocks with 15 bytes, expected 16"):
        path.check(replace(Frame(Kind.CHUNK, TAG, 0, 2), length=15))
