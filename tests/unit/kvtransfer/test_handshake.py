"""Who may connect, over what, and what everybody else is told."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable

import grpc
import pytest

from kvtransfer.checksum import Checksum
from kvtransfer.dial import Line
from kvtransfer.frames import greeting
from kvtransfer.gate import MAX_TICKETS, TICKET_LIFE_S
from kvtransfer.host import host_id
from kvtransfer.inbound import AUTHENTICATION_S
from kvtransfer.paths.shm import SHM
from kvtransfer.paths.tcp import TcpSend, host_and_port
from kvtransfer.transport import ReceiveOutcome
from pdserve.core.errors import Unavailable
from pdserve.v1 import transfer_pb2
from tests.unit.kvtransfer.harness import WAIT_S, Clock, Heard, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import GARBAGE, RawSender, assert_still_serves


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
        line = Line(sock, TcpSend(), "tcp", "", Checksum.XXH3_64, 1)
        assert RawSender.is_cut(type("S", (), {"line": line})())  # type: ignore[arg-type]
    wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")
    assert_still_serves(pair)


def test_a_ticket_admits_once(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as first, connect(pair, answer) as second:
        first.sendall(greeting(answer.ticket))
        wait_for(lambda: len(pair.receiver.peers) == 1, "the first")
        second.sendall(greeting(answer.ticket))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_ticket_for_one_transport_does_not_admit_to_another(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("auto")
    shm = pair.host.open(pair.sender)
    tcp = pair.host.open(pair.sender, transports=(2,))
    with connect(pair, tcp) as sock:
        sock.sendall(greeting(shm.ticket))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_pool_that_is_never_offered_is_given_up(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender with a ticket for shm that stops before it has said which memory."""
    pair = make_pair("shm")
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as sock, monkeypatch.context() as patch:
        patch.setattr("kvtransfer.paths.shm.HANDSHAKE_S", 0.05)
        sock.sendall(greeting(answer.ticket))
        wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the end of its patience")
    assert_still_serves(pair)


def test_a_silent_connection_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.inbound.AUTHENTICATION_S", 0.05)
    assert AUTHENTICATION_S == 5.0
    with connect(pair, pair.host.open(pair.sender)):
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_running_out_of_descriptors_costs_connections_and_not_the_receiver(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    sock = socket.socket(socket.AF_UNIX if answer.transport == SHM else socket.AF_INET)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(sock.fileno()))
        sock.connect("\0" + answer.address if answer.transport == SHM else host_and_port(answer.address, ""))
        wait_for(lambda: pair.receiver.stats.refused_connections >= 1, "the refusal")
        assert pair.receiver.is_healthy
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.close()
    assert_still_serves(pair)


def test_a_sender_without_descriptors_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("os.pipe", no_more)
        with pytest.raises(
            Unavailable, match=r"no KV connection to 127\.0\.0\.1:\d+ can be made: .*Too many open files"
        ):
            pair.sender.start(pair.grant((1,)), Heard())
    assert_still_serves(pair)


@pytest.mark.parametrize(
    ("changes", "field", "seen", "expected"),
    [
        ({"model": "n"}, "fingerprint.model", "'n'", "'m'"),
        ({"shape": fingerprint(64).shape}, "kv_shape.head_dim", "1", "64"),
        ({"protocol": 9}, "fingerprint.protocol", "9", "2"),
    ],
)
def test_open_refuses_another_fingerprint_naming_the_field_and_both_values(
    pair: Pair, changes: dict[str, object], field: str, seen: str, expected: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender, fingerprint=fingerprint(**changes))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == f"{field}: got {seen}, expected {expected}, as on the receiving worker"
    assert pair.receiver.stats.refused_opens == 1


def test_open_refuses_transports_checksums_and_names_that_do_not_fit(pair: Pair, transport: str) -> None:
    for changes, details in (
        ({"transports": (3,)}, f"transports: got nccl, expected {transport}"),
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
    answer = auto.host.open(auto.sender)
    assert (answer.transport, answer.transport_reason) == (2, "shm needs one host")
    assert auto.move(auto.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


@pytest.mark.parametrize(
    ("name", "chosen", "reason"),
    [
        ("auto", "shm", "the sender's first choice"),
        ("shm", "shm", "the sender asks for no other"),
        ("tcp", "tcp", "the sender asks for no other"),
    ],
)
def test_each_link_says_how_kv_travels_and_why(
    make_pair: Callable[..., Pair], name: str, chosen: str, reason: str
) -> None:
    pair = make_pair(name)
    assert pair.sender.links == []
    pair.move(pair.grant((1,)), (1,))
    [link] = pair.sender.links
    assert (link.endpoint, link.transport, link.reason) == (pair.host.endpoint, chosen, reason)
    pair.sender.close()
    assert pair.sender.links == []


def test_the_host_id_is_of_this_boot_and_stable() -> None:
    assert host_id() == host_id() != ""


def test_auto_falls_back_to_tcp_when_shared_memory_cannot_be_had(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptors for you")

    monkeypatch.setattr("kvtransfer.paths.shm.offer", refuse)
    pair = make_pair("auto")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_tickets_are_bounded_and_leave_with_time(
    make_pair: Callable[..., Pair], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.gate.MAX_TICKETS", 5)
    pair = make_pair("tcp", clock=clock)
    for _ in range(5):
        answer = pair.host.open(pair.sender)
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    clock.added_s += TICKET_LIFE_S
    with connect(pair, answer) as sock:
        sock.sendall(greeting(answer.ticket))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal of a ticket that is too old")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED
    assert MAX_TICKETS == 256


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
    assert host_and_port(address, endpoint) == target
