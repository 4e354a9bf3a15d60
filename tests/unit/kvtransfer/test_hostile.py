"""Messages of unknown and faulty peers to the handshake and the data port have no effect on other transfers."""

from __future__ import annotations

import contextlib
import logging
import random
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.protocol.frames import HEADER_BYTES, Frame, Kind, Tag, encode_text, pack
from kvtransfer.protocol.plan import Part
from kvtransfer.protocol.transport import ReceiveOutcome
from pdserve.outage_log import LogLimit
from tests.support.examples import examples
from tests.unit.kvtransfer.harness import BLOCK_BYTES, Pair, wait_for
from tests.unit.kvtransfer.raw import GARBAGE, RawSender, assert_still_serves, connect, expected, numbers


def test_a_duplicate_chunk_changes_nothing_and_is_counted(pair: Pair, raw: RawSender) -> None:
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES)
    raw.chunk(tag, 0, b"b" * BLOCK_BYTES)
    raw.chunk(tag, 1, b"c" * BLOCK_BYTES, is_last=True)
    raw.chunk(tag, 1, b"d" * BLOCK_BYTES)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert raw.hear().kind is Kind.DONE
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the last chunk, which came after the end")
    assert pair.target.block(1) + pair.target.block(2) == b"a" * BLOCK_BYTES + b"c" * BLOCK_BYTES
    assert pair.receiver.stats.duplicate_chunks == 1


def test_chunks_of_old_generations_are_counted_and_dropped(pair: Pair, raw: RawSender) -> None:
    grant, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    for old in (tag._replace(generation=0), tag._replace(attempt=0), tag._replace(transfer=b"x" * 16)):
        raw.chunk(old, 0, b"z" * BLOCK_BYTES)
    raw.announce(tag._replace(generation=0))
    assert raw.hear() == Frame(Kind.REFUSE, tag._replace(generation=0), length=42)
    assert pair.receiver.stats.late_messages == 4
    assert pair.target.block(1) == bytes(BLOCK_BYTES)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


def test_a_chunk_without_an_announcement_writes_nothing(pair: Pair, raw: RawSender) -> None:
    grant, tag, received = expected(pair, (1,))
    raw.chunk(tag, 0, b"z" * BLOCK_BYTES, is_last=True)
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the chunk")
    assert pair.target.block(1) == bytes(BLOCK_BYTES)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


def test_a_sender_cannot_affect_anothers_transfer(pair: Pair, raw: RawSender) -> None:
    _, tag, received = expected(pair, (1,))
    thief = RawSender(pair, "thief")
    raw.announce(tag)
    wait_for(lambda: len(pair.receiver.peers) == 2, "both")
    raw.announce(tag._replace(attempt=9))
    assert raw.hear().kind is Kind.REFUSE  # so the first announcement has been heard
    thief.announce(tag)
    assert thief.hear().kind is Kind.REFUSE
    thief.chunk(tag, 0, b"z" * BLOCK_BYTES, is_last=True)
    thief.send(encode_text(Kind.RETRACT, tag, "mine"))
    wait_for(lambda: pair.receiver.stats.late_messages == 4, "the thief's words")
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES, is_last=True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.target.block(1) == b"a" * BLOCK_BYTES
    thief.close()


def test_an_abort_during_a_write_is_quarantined(pair: Pair, raw: RawSender) -> None:
    """The test acts as the writer, like a transport with slow DMA."""
    pair.receiver._table.grace_s = 0.05
    grant, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.announce(tag._replace(generation=0))
    raw.hear()  # so the first announcement has been heard
    [writer] = pair.receiver._connections
    claim = pair.receiver.claim(Frame(Kind.CHUNK, tag, 0, 2), writer, pack([0, 0], tag.generation, 1))
    assert claim is not None
    assert pair.receiver.enter(claim)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.QUARANTINED
    assert not pair.receiver.enter(claim)
    pair.receiver.leave(claim)
    assert received.wait(2).outcome is ReceiveOutcome.DRAINED
    assert received.outcomes == ["quarantined", "drained"]
    assert pair.receiver.stats.quarantined == 1


def with_crc(header: bytes) -> bytes:
    end = HEADER_BYTES - 4
    return header[:end] + struct.pack("<I", zlib.crc32(header[:end]))


def bad_frames(tag: Tag) -> dict[str, bytes]:
    good = Frame(Kind.CHUNK, tag, 0, 1, 0, 0, b"c" * 8)
    stamp = pack([0], tag.generation, 1)
    oversized = replace(good, count=2**20, length=2**32 - 1)
    return {
        "garbage": GARBAGE,
        "oversized length": oversized.encode(),
        "more blocks than bytes": replace(good, count=2**31, length=BLOCK_BYTES).encode() + bytes(BLOCK_BYTES),
        "no blocks": replace(good, count=0).encode(),
        "bytes that are no whole block": replace(good, length=BLOCK_BYTES - 1).encode() + bytes(BLOCK_BYTES),
        "a slot that is not there": replace(good, slot=2**31, length=4).encode() + stamp + numbers(range(1)),
        "a source block that is not there": replace(good, length=4).encode() + stamp + b"\xff" * 4,
        "a receiver's word": Frame(Kind.DONE, tag).encode(),
        "an unknown kind": good.encode()[:5] + b"\x63" + good.encode()[6:],
        "an unknown kind whose CRC is right": with_crc(good.encode()[:5] + b"\x63" + good.encode()[6:]),
        "groups that the layers do not make": Frame(Kind.ANNOUNCE, tag, part=Part(0, 0, 3)).encode(),
        "a shard of another rank": Frame(Kind.ANNOUNCE, tag, part=Part(1, 0, 1)).encode(),
        "another version": good.encode()[:4] + b"\x63" + good.encode()[5:],
        "a flipped header bit": bytes([*good.encode()[:20], good.encode()[20] ^ 1, *good.encode()[21:]]),
    }


@pytest.mark.parametrize("name", sorted(bad_frames(Tag(b"x" * 16, 1, 1))))
def test_an_invalid_frame_ends_only_its_connection(pair: Pair, raw: RawSender, name: str) -> None:
    _, tag, received = expected(pair, (1, 2))
    _, other_tag, other = expected(pair, (10,))
    good = RawSender(pair, "good")
    good.announce(other_tag)
    raw.announce(tag)
    raw.send(bad_frames(tag)[name])
    end = received.wait()
    assert end.outcome is ReceiveOutcome.FAILED
    assert end.error.startswith("sender raw: protocol error: ")
    assert raw.is_cut()
    assert pair.receiver.stats.protocol_errors == 1
    good.chunk(other_tag, 0, b"g" * BLOCK_BYTES, is_last=True)
    assert other.wait().outcome is ReceiveOutcome.VERIFIED
    good.close()
    assert_still_serves(pair)


def test_indices_outside_the_grant_write_nothing(pair: Pair, raw: RawSender) -> None:
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 1, b"z" * 2 * BLOCK_BYTES)
    raw.chunk(tag, 2**32 - 1, b"z" * BLOCK_BYTES)
    raw.chunk(tag, 0, b"a" * 2 * BLOCK_BYTES, is_last=True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.target.block(0) + pair.target.block(3) == bytes(2 * BLOCK_BYTES)
    assert pair.receiver.stats.duplicate_chunks == 2


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A valid conversation with damage. CRCs are repaired half of the time, so that the fields are parsed."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    if rng.random() < 0.5 and len(damaged) >= HEADER_BYTES:
        damaged[:HEADER_BYTES] = with_crc(bytes(damaged[:HEADER_BYTES]))
    return bytes(damaged)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_fuzzed_frames_never_crash_the_receiver_or_verify_anything(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    grant, tag, received = expected(pair, (1, 2, 3))
    raw = RawSender(pair)
    raw.announce(tag)
    body = numbers(range(1)) if raw.is_shm else bytes(BLOCK_BYTES)
    chunk = Frame(Kind.CHUNK, tag, 0, 1, 0, len(body), b"c" * 8).encode()
    try:
        for _ in range(rng.randint(1, 5)):
            message = rng.choice([chunk + pack([0], tag.generation, 1) + body, raw_word(rng, tag)])
            raw.send(mutate(message, rng))
    except ConnectionError:
        pass
    raw.close()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    pair.receiver.abort(grant.key)
    assert pair.receiver.is_healthy
    assert received.outcomes == ["failed"]


def raw_word(rng: random.Random, tag: Tag) -> bytes:
    return rng.choice(
        [Frame(Kind.ANNOUNCE, tag).encode(), encode_text(Kind.RETRACT, tag, "why"), Frame(Kind.DONE, tag).encode()]
    )


def test_refused_connections_are_counted_and_logged_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    answer = pair.host.open(pair.sender)
    for _ in range(10):
        with connect(pair, answer) as sock:
            sock.sendall(GARBAGE)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
    wait_for(lambda: pair.receiver.stats.refused_connections == 10, "the refusals")
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [
        "kv connections were refused"
    ]


def test_log_lines_are_limited_and_counted() -> None:
    limit = LogLimit(every_s=10.0)
    assert [limit.due(now_s) for now_s in (0.0, 1.0, 9.9, 10.0, 10.1, 30.0)] == [1, 0, 0, 3, 0, 2]
