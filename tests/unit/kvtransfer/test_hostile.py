"""What strangers and broken peers may send to the handshake and to the data port: nothing of it may do harm."""

from __future__ import annotations

import random
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.transfer_proxy import read_exactly
from kvtransfer.checksum import Checksum, hasher
from kvtransfer.dial import Line, _host_and_port, dial
from kvtransfer.frames import HEADER_BYTES, Frame, Kind, Tag, decode, encode_text, tag_of
from kvtransfer.gate import MAX_TICKETS, SHM
from kvtransfer.host import host_id
from kvtransfer.inbound import AUTHENTICATION_S
from kvtransfer.transport import Grant, ReceiveOutcome
from pdserve.v1 import transfer_pb2
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Heard, Pair, fingerprint, wait_for

GARBAGE = random.Random(1).randbytes(4096)


class RawSender:
    """Speaks frames by hand, over a connection that was opened as it should be."""

    def __init__(self, pair: Pair, name: str = "raw") -> None:
        caller = replace(pair.sender.caller, worker_id=name)
        self.line: Line = dial(caller, pair.host.endpoint, "d0-1")
        self.line.socket.settimeout(WAIT_S)
        self._digest = hasher(self.line.checksum)

    def send(self, data: bytes) -> None:
        self.line.socket.sendall(data)

    def announce(self, tag: Tag) -> None:
        self.send(Frame(Kind.ANNOUNCE, tag).encode())

    def chunk(self, tag: Tag, first: int, payload: bytes, slot: int = 0, is_last: bool = False) -> None:
        count, checksum = len(payload) // BLOCK_BYTES, self._digest([memoryview(payload)])
        if self.line.ring is None:
            frame = Frame(Kind.CHUNK, tag, first, count, 0, len(payload), checksum, is_last)
            self.send(frame.encode() + payload)
        else:
            self.line.ring.slot(slot, len(payload))[:] = payload
            self.send(Frame(Kind.CHUNK, tag, first, count, slot, 0, checksum, is_last).encode())

    def hear(self) -> Frame:
        """The next frame that is not a credit."""
        while True:
            frame = decode(read_exactly(self.line.socket, HEADER_BYTES), 0)
            read_exactly(self.line.socket, frame.length)
            if frame.kind is not Kind.CREDIT:
                return frame

    def is_cut(self) -> bool:
        try:
            while self.line.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.line.close()


@pytest.fixture
def raw(pair: Pair) -> Iterator[RawSender]:
    sender = RawSender(pair)
    yield sender
    sender.close()


def expected(pair: Pair, blocks: tuple[int, ...]) -> tuple[Grant, Tag, Heard]:
    grant, received = pair.grant(blocks), Heard()
    pair.receiver.expect(grant, received)
    return grant, tag_of(grant.key), received


def assert_still_serves(pair: Pair) -> None:
    assert pair.receiver.is_healthy
    assert pair.move(pair.grant((60,)), (7,))[0].outcome is ReceiveOutcome.VERIFIED


def test_a_duplicate_chunk_changes_nothing_and_is_counted(pair: Pair, raw: RawSender) -> None:
    _, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.chunk(tag, 0, b"a" * BLOCK_BYTES)
    raw.chunk(tag, 0, b"b" * BLOCK_BYTES, slot=1)
    raw.chunk(tag, 1, b"c" * BLOCK_BYTES, slot=2, is_last=True)
    raw.chunk(tag, 1, b"d" * BLOCK_BYTES, slot=3)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert raw.hear().kind is Kind.DONE
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the last chunk, which came after the end")
    assert pair.landing.block(1) + pair.landing.block(2) == b"a" * BLOCK_BYTES + b"c" * BLOCK_BYTES
    assert pair.receiver.stats.duplicate_chunks == 1


def test_old_generations_and_attempts_write_nothing_and_are_counted(pair: Pair, raw: RawSender) -> None:
    grant, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    for number, old in enumerate(
        (tag._replace(generation=0), tag._replace(attempt=0), tag._replace(transfer=b"x" * 16))
    ):
        raw.chunk(old, 0, b"z" * BLOCK_BYTES, slot=number)
    raw.announce(tag._replace(generation=0))
    assert raw.hear() == Frame(Kind.REFUSE, tag._replace(generation=0), length=42)
    assert pair.receiver.stats.late_messages == 4
    assert pair.landing.block(1) == bytes(BLOCK_BYTES)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


def test_a_chunk_without_an_announcement_writes_nothing(pair: Pair, raw: RawSender) -> None:
    grant, tag, received = expected(pair, (1,))
    raw.chunk(tag, 0, b"z" * BLOCK_BYTES, is_last=True)
    wait_for(lambda: pair.receiver.stats.late_messages == 1, "the chunk")
    assert pair.landing.block(1) == bytes(BLOCK_BYTES)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.DRAINED


def test_one_sender_cannot_write_into_or_end_anothers_transfer(pair: Pair, raw: RawSender) -> None:
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
    assert pair.landing.block(1) == b"a" * BLOCK_BYTES
    thief.close()


def test_an_abort_under_a_write_that_does_not_end_is_quarantined_until_it_does(pair: Pair, raw: RawSender) -> None:
    """The test is the writer here, as a transport with slow DMA would be."""
    pair.receiver._book.grace_s = 0.05
    grant, tag, received = expected(pair, (1, 2))
    raw.announce(tag)
    raw.announce(tag._replace(generation=0))
    raw.hear()  # so the first announcement has been heard
    [writer] = pair.receiver._connections
    claim = pair.receiver.claim(tag, writer, 0, 2)
    assert claim is not None
    assert pair.receiver.enter(claim)
    pair.receiver.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.QUARANTINED
    assert not pair.receiver.enter(claim)
    pair.receiver.leave(claim)
    assert received.wait(2).outcome is ReceiveOutcome.DRAINED
    assert received.outcomes == ["quarantined", "drained"]
    assert pair.receiver.stats.quarantined == 1


def bad_frames(tag: Tag) -> dict[str, bytes]:
    good = Frame(Kind.CHUNK, tag, 0, 1, 0, 0, b"c" * 8)
    oversized = replace(good, count=2**20, length=2**32 - 1)
    return {
        "garbage": GARBAGE,
        "oversized length": oversized.encode(),
        "more blocks than bytes": replace(good, count=2**31, length=BLOCK_BYTES).encode() + bytes(BLOCK_BYTES),
        "no blocks": replace(good, count=0).encode(),
        "bytes that are no whole block": replace(good, length=BLOCK_BYTES - 1).encode() + bytes(BLOCK_BYTES),
        "a slot that is not there": replace(good, slot=2**31).encode(),
        "a receiver's word": Frame(Kind.DONE, tag).encode(),
        "an unknown kind": good.encode()[:5] + b"\x63" + good.encode()[6:],
        "another version": good.encode()[:4] + b"\x63" + good.encode()[5:],
        "a flipped header bit": bytes([*good.encode()[:20], good.encode()[20] ^ 1, *good.encode()[21:]]),
    }


@pytest.mark.parametrize("name", sorted(bad_frames(Tag(b"x" * 16, 1, 1))))
def test_a_frame_that_no_sender_makes_costs_only_its_own_connection(pair: Pair, raw: RawSender, name: str) -> None:
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
    raw.chunk(tag, 2**32 - 1, b"z" * BLOCK_BYTES, slot=1)
    raw.chunk(tag, 0, b"a" * 2 * BLOCK_BYTES, slot=2, is_last=True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert pair.landing.block(0) + pair.landing.block(3) == bytes(2 * BLOCK_BYTES)
    assert pair.receiver.stats.duplicate_chunks == 2


def connect(pair: Pair, answer: transfer_pb2.OpenResponse) -> socket.socket:
    if answer.transport == SHM:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + answer.address)
    else:
        host, port = answer.address.split(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(WAIT_S)
    return sock


@pytest.mark.parametrize(
    "first_bytes", [b"\0" * 16, GARBAGE, b"GET / HTTP/1.1\r\n\r\n"], ids=["zeros", "noise", "http"]
)
def test_without_its_ticket_a_connection_is_closed(pair: Pair, first_bytes: bytes) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as sock:
        sock.sendall(first_bytes)
        assert RawSender.is_cut(type("S", (), {"line": Line(sock, None, Checksum.XXH3_64, 1)})())  # type: ignore[arg-type]
    wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")
    assert_still_serves(pair)


def test_a_ticket_admits_once(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as first, connect(pair, answer) as second:
        first.sendall(answer.ticket)
        wait_for(lambda: len(pair.receiver.peers) == 1, "the first")
        second.sendall(answer.ticket)
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_ticket_for_one_transport_does_not_admit_to_another(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("auto")
    shm = pair.host.open(pair.sender)
    tcp = pair.host.open(pair.sender, transports=(2,))
    with connect(pair, tcp) as sock:
        sock.sendall(shm.ticket)
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_silent_connection_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.inbound.AUTHENTICATION_S", 0.05)
    assert AUTHENTICATION_S == 5.0
    with connect(pair, pair.host.open(pair.sender)):
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


@pytest.mark.parametrize(
    ("changes", "field", "seen", "expected"),
    [
        ({"dtype": "bfloat16"}, "dtype", "'bfloat16'", "'float32'"),
        ({"block_bytes": 8}, "block_bytes", "8", "4096"),
        ({"protocol": 9}, "protocol", "9", "1"),
    ],
)
def test_open_refuses_another_fingerprint_naming_the_field_and_both_values(
    pair: Pair, changes: dict[str, object], field: str, seen: str, expected: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender, fingerprint=fingerprint(**changes))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == (
        f"fingerprint.{field}: got {seen}, expected {expected}, as on the receiving worker"
    )
    assert pair.receiver.stats.refused_opens == 1


def test_open_refuses_transports_checksums_and_names_that_do_not_fit(pair: Pair, transport: str) -> None:
    for changes, details in (
        ({"transports": (3,)}, f"transports: got 3, expected {transport}"),
        ({"transports": ()}, f"transports: got none, expected {transport}"),
        ({"checksums": ()}, "checksums: got none that is known, expected xxh3-64 or blake2b-64"),
        ({"worker_id": ""}, "sender_id: got 0 characters, expected 1 to 256"),
        ({"worker_id": "x" * 999}, "sender_id: got 999 characters, expected 1 to 256"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            pair.host.open(pair.sender, **changes)  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == details


def test_shared_memory_is_not_offered_to_another_host(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    shm, auto = make_pair("shm"), make_pair("auto")
    monkeypatch.setattr("kvtransfer.dial.host_id", lambda: "elsewhere")
    with pytest.raises(grpc.RpcError) as refused:
        shm.host.open(shm.sender)
    assert refused.value.details() == "transports: got shm (another host, so not shm), expected shm"
    assert auto.host.open(auto.sender).transport == 2
    assert auto.move(auto.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_the_host_id_is_of_this_boot_and_stable() -> None:
    assert host_id() == host_id() != ""


def test_auto_falls_back_to_tcp_when_shared_memory_cannot_be_had(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptors for you")

    monkeypatch.setattr("kvtransfer.ring.Ring.accept", refuse)
    pair = make_pair("auto")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_tickets_are_bounded_and_leave_with_time(pair: Pair) -> None:
    for _ in range(MAX_TICKETS):
        pair.host.open(pair.sender)
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_two_ends_without_xxhash_agree_on_blake2b(
    make_pair: Callable[..., Pair], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.checksum.available", lambda: (Checksum.BLAKE2B_64,))
    pair = make_pair(transport)
    assert pair.host.open(pair.sender).checksum == transfer_pb2.CHECKSUM_KIND_BLAKE2B_64
    received, _ = pair.move(pair.grant((1, 2)), (3, 4))
    assert received.outcome is ReceiveOutcome.VERIFIED


@pytest.mark.parametrize(
    ("address", "endpoint", "target"),
    [
        ("127.0.0.1:5", "h:1", ("127.0.0.1", 5)),
        ("0.0.0.0:5", "10.0.0.7:1", ("10.0.0.7", 5)),
        ("[::]:5", "[fd00::7]:1", ("fd00::7", 5)),
        ("[fd00::1]:5", "h:1", ("fd00::1", 5)),
    ],
)
def test_a_receiver_on_every_address_is_reached_where_its_grpc_server_is(
    address: str, endpoint: str, target: tuple[str, int]
) -> None:
    assert _host_and_port(address, endpoint) == target


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A valid conversation, damaged; CRCs are repaired half of the time so that the fields are reached."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    if rng.random() < 0.5 and len(damaged) >= HEADER_BYTES:
        damaged[60:64] = struct.pack("<I", zlib.crc32(bytes(damaged[:60])))
    return bytes(damaged)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_fuzzed_frames_never_crash_the_receiver_or_verify_anything(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    grant, tag, received = expected(pair, (1, 2, 3))
    raw = RawSender(pair)
    raw.announce(tag)
    chunk = Frame(Kind.CHUNK, tag, 0, 1, 0, 0 if raw.line.ring else BLOCK_BYTES, b"c" * 8).encode()
    try:
        for _ in range(rng.randint(1, 5)):
            message = rng.choice([chunk + bytes(0 if raw.line.ring else BLOCK_BYTES), raw_word(rng, tag)])
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
