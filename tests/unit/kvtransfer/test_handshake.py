"""Which peers may connect, over which transports, and how others are rejected."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvtransfer.link.channel import secured
from kvtransfer.link.dial import DataConnection, dial, open_request
from kvtransfer.link.gate import MAX_TICKETS, TICKET_TTL_S, host_of
from kvtransfer.link.inbound import AUTHENTICATION_S, Accepted, Inbound
from kvtransfer.link.receiver import MAX_PENDING
from kvtransfer.protocol.frames import ANSWER_BYTES, GREETING_BYTES, Checksum
from kvtransfer.protocol.transport import ReceiveOutcome
from kvtransfer.transports.common.registry import TRANSPORTS, choose, name_of
from kvtransfer.transports.common.slots import host_id
from kvtransfer.transports.nccl import NCCL
from kvtransfer.transports.tcp import TcpSend, host_and_port
from pdserve.build import FULL_VERSION
from pdserve.core.access.proof import ClusterSecret
from pdserve.core.errors import TransferFailed, Unavailable
from pdserve.core.installation import VERSION, mismatch
from pdserve.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.wire import peers
from tests.support.transfer_proxy import read_exactly
from tests.unit.kvtransfer.harness import WAIT_S, Clock, GrpcHost, Heard, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import GARBAGE, RawSender, assert_still_serves, connect, greet


def connect_from(host: str, answer: transfer_pb2.OpenResponse) -> socket.socket:
    """Of the whole network 127.0.0.0/8, each address is a host of its own."""
    to, port = answer.address.split(":")
    return socket.create_connection((to, int(port)), WAIT_S, (host, 0))


def is_cut(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # with bytes that were not read
        return True


@pytest.mark.parametrize(
    "first_bytes", [b"\0" * 16, GARBAGE, b"GET / HTTP/1.1\r\n\r\n"], ids=["zeros", "noise", "http"]
)
def test_without_its_ticket_a_connection_is_closed(pair: Pair, first_bytes: bytes) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as sock:
        sock.sendall(first_bytes)
        connection = DataConnection(sock, TcpSend(), "tcp", "", Checksum.XXH3_64, 1)
        assert RawSender.is_cut(type("S", (), {"connection": connection})())  # type: ignore[arg-type]
    wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")
    assert_still_serves(pair)


def test_a_ticket_admits_once(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as first, connect(pair, answer) as second:
        first.sendall(greet(pair, answer))
        wait_for(lambda: len(pair.receiver.peers) == 1, "the first")
        second.sendall(greet(pair, answer))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_ticket_for_one_transport_does_not_admit_to_another(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("auto")
    shm = pair.host.open(pair.sender)
    tcp = pair.host.open(pair.sender, transports=choose("tcp"))
    with connect(pair, tcp) as sock:
        sock.sendall(greet(pair, shm, transport=2))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_a_sender_that_offers_no_pool_times_out(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender with a ticket for shm that stops before it offers its memory."""
    pair = make_pair("shm")
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as sock, monkeypatch.context() as patch:
        patch.setattr("kvtransfer.transports.shm.HANDSHAKE_S", 0.05)
        sock.sendall(greet(pair, answer))
        wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the end of its patience")
    assert_still_serves(pair)


def test_a_sender_that_resets_before_it_offers_its_pool_is_no_internal_error(
    make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair("shm")
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as sock:
        sock.sendall(greet(pair, answer))
        sock.recv(1, socket.MSG_PEEK)  # the answer, which stays unread, so that closing resets the connection
    wait_for(lambda: not pair.receiver.peers, "the end of the connection")
    assert_still_serves(pair)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_a_silent_connection_times_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.link.inbound.AUTHENTICATION_S", 0.05)
    assert AUTHENTICATION_S == 3.0
    with connect(pair, pair.host.open(pair.sender)):
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")


def test_the_receiver_survives_descriptor_exhaustion(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own listeners: a limit of the whole process could fail other threads."""
    answer, accept = pair.host.open(pair.sender), socket.socket.accept

    def full(listener: socket.socket) -> Any:
        if listener in pair.receiver._listeners.values():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", full)
        with connect(pair, answer):
            wait_for(lambda: pair.receiver.stats.refused_connections >= 1, "the refusal")
        assert pair.receiver.is_healthy
    assert_still_serves(pair)


def test_a_sender_reports_descriptor_exhaustion(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_open_rejects_another_fingerprint(
    pair: Pair, changes: dict[str, object], field: str, seen: str, expected: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender, fingerprint=fingerprint(**changes))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == f"{field}: got {seen}, expected {expected}, as on the receiving worker"
    assert pair.receiver.stats.refused_opens == 1


def test_a_transport_of_a_later_version_is_ignored(pair: Pair, transport: str) -> None:
    later: Any = SimpleNamespace(kind=99)
    answer = pair.host.open(pair.sender, transports=(later, *pair.sender.config.transports))
    assert name_of(answer.transport) == transport
    assert answer.transport_reason == "the receiver has no 99"


def test_open_rejects_unsupported_transports_and_checksums(pair: Pair, transport: str) -> None:
    for changes, details in (
        ({"transports": (TRANSPORTS[NCCL],)}, f"transports: got nccl, expected {transport}"),
        ({"transports": ()}, f"transports: got none, expected {transport}"),
        ({"checksums": ()}, "checksums: got none that this worker supports, expected xxh3-64 or blake2b-64"),
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
    monkeypatch.setattr("kvtransfer.link.dial.host_id", lambda: "elsewhere")
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
        ("shm", "shm", "the sender offers no other"),
        ("tcp", "tcp", "the sender offers no other"),
    ],
)
def test_each_link_reports_its_transport_and_reason(
    make_pair: Callable[..., Pair], name: str, chosen: str, reason: str
) -> None:
    pair = make_pair(name)
    assert pair.sender.links == []
    pair.move(pair.grant((1,)), (1,))
    [link] = pair.sender.links
    assert (link.endpoint, link.transport, link.reason) == (pair.host.endpoint, chosen, reason)
    pair.sender.close()
    assert pair.sender.links == []


def test_the_host_id_is_stable() -> None:
    assert host_id() == host_id() != ""


def test_auto_falls_back_to_tcp(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptors for you")

    monkeypatch.setattr("kvtransfer.transports.shm.offer", refuse)
    pair = make_pair("auto")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def test_tickets_are_bounded_and_expire(
    make_pair: Callable[..., Pair], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.link.gate.MAX_TICKETS", 5)
    pair = make_pair("tcp", clock=clock)
    for _ in range(5):
        answer = pair.host.open(pair.sender)
    with pytest.raises(grpc.RpcError) as refused:
        pair.host.open(pair.sender)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    clock.added_s += TICKET_TTL_S
    with connect(pair, answer) as sock:
        sock.sendall(greet(pair, answer))
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal of a ticket that is too old")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED
    assert MAX_TICKETS == 256


def test_a_sender_does_not_take_the_tickets_of_others(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets tickets, but its data connections fail, for example at a firewall."""
    monkeypatch.setattr("kvtransfer.link.gate.MAX_TICKETS", 5)
    pair = make_pair("tcp")
    for _ in range(5):
        pair.host.open(pair.sender)
    for number in range(3):
        dial(replace(pair.sender.config, worker_id=f"p{number + 1}"), pair.host.endpoint, "d0-1").close()
    assert len(pair.receiver._gate._tickets) == 4


def test_two_ends_without_xxhash_agree_on_blake2b(
    make_pair: Callable[..., Pair], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.protocol.frames.available_checksums", lambda: (Checksum.BLAKE2B_64,))
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
def test_a_wildcard_receiver_is_reached_at_its_grpc_host(address: str, endpoint: str, target: tuple[str, int]) -> None:
    assert host_and_port(address, endpoint) == target


# -- the cluster's secret --------------------------------------------------------------------------------------


def test_a_stolen_ticket_is_useless(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    stranger = ClusterSecret("a guess of the secret")
    for words in (
        greet(pair, answer, stranger),
        greet(pair, answer, sender="thief/1"),
        greet(pair, answer)[:-1] + b"?",
    ):
        with connect(pair, answer) as sock:
            sock.sendall(words)
            assert sock.recv(1) == b""
    assert pair.receiver.stats.unproven == 3
    assert pair.receiver.peers == []
    with connect(pair, answer) as sock:  # And the worker to which it was issued can still use it.
        sock.sendall(greet(pair, answer))
        assert len(read_exactly(sock, ANSWER_BYTES)) == ANSWER_BYTES
        wait_for(lambda: pair.receiver.peers == ["p0"], "the sender")


def test_a_greeting_cannot_be_replayed(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    words = greet(pair, answer)
    with connect(pair, answer) as first, connect(pair, answer) as second:
        first.sendall(words)
        read_exactly(first, ANSWER_BYTES)
        second.sendall(words)
        assert second.recv(1) == b""


def test_a_sender_with_another_secret_gets_no_ticket(pair: Pair) -> None:
    stranger = replace(pair.sender.config, secret=ClusterSecret("a guess of the secret"))
    with pytest.raises(TransferFailed, match="did not prove that it knows the cluster's secret"):
        dial(stranger, pair.host.endpoint, "d0-1")
    request = open_request(stranger, stranger.transports)
    with grpc.insecure_channel(pair.host.endpoint) as channel, pytest.raises(grpc.RpcError) as refused:
        transfer_pb2_grpc.TransferServiceStub(channel).Open(request, timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert pair.receiver._gate._tickets == {}
    assert_still_serves(pair)


@pytest.mark.parametrize(
    ("module", "own", "seen", "expected"),
    [("gate", "9.9.9+a", FULL_VERSION, "9.9.9+a"), ("dial", "9.9.9+a", "9.9.9+a", FULL_VERSION)],
)
def test_workers_of_other_releases_exchange_no_kv(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, module: str, own: str, seen: str, expected: str
) -> None:
    monkeypatch.setattr(f"kvtransfer.link.{module}.FULL_VERSION", own)
    with pytest.raises(TransferFailed) as refused:
        dial(pair.sender.config, pair.host.endpoint, "d0-1")
    assert f"the sender: {mismatch(expected, seen)}" in refused.value.message
    assert pair.receiver.stats.refused_opens == 1


def test_workers_of_another_patch_or_build_exchange_kv(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.link.dial.FULL_VERSION", VERSION.rpartition(".")[0] + ".999+another")
    dial(pair.sender.config, pair.host.endpoint, "d0-1").close()


def test_a_sender_checks_an_older_receiver_itself(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.link.gate.is_compatible", lambda mine, other: True)
    monkeypatch.setattr("kvtransfer.link.dial.FULL_VERSION", "9.9.9")
    with pytest.raises(TransferFailed, match=r"its version is .*, this process's 9\.9\.9; only the patch"):
        dial(pair.sender.config, pair.host.endpoint, "d0-1")


def test_a_ticket_admits_only_the_caller(pair: Pair) -> None:
    """The request names another sender than the proof."""
    me = pair.sender.config
    request = open_request(replace(me, worker_id="p1"), me.transports)
    with grpc.insecure_channel(pair.host.endpoint) as channel:
        proof = peers.prove_blocking(channel, peers.introduce(me.identity, peers.OPEN, pair.host.endpoint), WAIT_S)
        with pytest.raises(grpc.RpcError) as refused:
            transfer_pb2_grpc.TransferServiceStub(channel).Open(request, timeout=WAIT_S, metadata=proof)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert pair.receiver.stats.refused_opens == 1


def test_nothing_is_sent_to_an_unproven_data_port(pair: Pair) -> None:
    """A process that took over a decode worker's port receives the greeting, but no KV and no pool."""

    class Elsewhere(transfer_pb2_grpc.TransferServiceServicer):
        async def Open(self, request: transfer_pb2.OpenRequest, context: Any) -> transfer_pb2.OpenResponse:
            answer = await pair.receiver.servicer.Open(request, context)
            answer.address = address
            return answer

    is_shm = pair.transport == "shm"
    listener = socket.socket(socket.AF_UNIX if is_shm else socket.AF_INET)
    listener.bind(f"\0kv-false-{os.getpid()}" if is_shm else ("127.0.0.1", 0))
    address = f"kv-false-{os.getpid()}" if is_shm else f"127.0.0.1:{listener.getsockname()[1]}"
    listener.listen()
    host, sent, heard = GrpcHost(Elsewhere()), Heard(), []
    pair.sender.start(pair.grant((1,), endpoint=host.endpoint), sent)
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(WAIT_S)
        heard.append(read_exactly(sock, GREETING_BYTES))
        sock.sendall(b"\0" * ANSWER_BYTES)
        heard.append(sock.recv(1))
    listener.close()
    assert sent.wait().error.endswith("the receiver did not prove that it knows the cluster's secret")
    assert heard[1] == b""
    host.stop()
    assert_still_serves(pair)


def test_unproven_connections_do_not_block_senders(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    assert MAX_PENDING == 32
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(pair, answer)) for _ in range(40)]
        for oldest in idle[:36]:
            assert oldest.recv(1) == b""
        assert len(pair.receiver._accepted) <= 4
        assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED
    wait_for(lambda: pair.receiver.stats.refused_connections == 40, "their ends")


@pytest.mark.parametrize("name", ["tcp", "shm"])
def test_silent_connections_do_not_end_a_slow_proof(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair(name)
    answer = pair.host.open(pair.sender)
    greeting = greet(pair, answer)
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connect(pair, answer))
        slow.sendall(greeting[:20])
        silent = [stack.enter_context(connect(pair, answer)) for _ in range(40)]
        for oldest in silent[:37]:
            assert oldest.recv(1) == b""
        slow.sendall(greeting[20:])
        assert len(read_exactly(slow, ANSWER_BYTES)) == ANSWER_BYTES


def test_silent_connections_do_not_end_a_tls_handshake(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair("tcp+tls")
    answer = pair.host.open(pair.sender)
    tls = pair.sender.config.tls
    assert tls is not None
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.current().client.wrap_bio(received, sent, server_hostname="127.0.0.1")
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connect(pair, answer))
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        hello = sent.read()
        slow.sendall(hello[:20])
        silent = [stack.enter_context(connect(pair, answer)) for _ in range(40)]
        for oldest in silent[:37]:
            assert oldest.recv(1) == b""
        slow.sendall(hello[20:])
        assert slow.recv(1) == b"\x16"  # the server's part of the handshake


def test_a_host_does_not_take_the_places_of_others(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each of its connections sends the beginning of a greeting."""
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender)
    greeting = greet(pair, answer)
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(connect(pair, answer))
        slow.sendall(greeting[:20])
        others = []
        for _ in range(20):
            others.append(stack.enter_context(connect_from("127.0.0.2", answer)))
            others[-1].sendall(greeting[:1])
        for oldest in others[:17]:
            assert is_cut(oldest)
        slow.sendall(greeting[20:])
        assert len(read_exactly(slow, ANSWER_BYTES)) == ANSWER_BYTES


def test_bytes_without_a_step_keep_no_place(make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send a byte now and then do not outlast a younger one that waits for its next step."""
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender, transports=choose("tcp"))
    greeting = greet(pair, answer)
    with contextlib.ExitStack() as stack:
        dripping = [stack.enter_context(connect_from(f"127.0.0.{2 + one}", answer)) for one in range(3)]
        for one in dripping:
            one.sendall(greeting[:1])
        wait_for(lambda: sum(one.has_sent for one in pair.receiver._accepted.values()) == 3, "their first bytes")
        slow = stack.enter_context(connect_from("127.0.0.5", answer))
        slow.sendall(greeting[:20])
        wait_for(lambda: sum(one.has_sent for one in pair.receiver._accepted.values()) == 4, "its first bytes")
        for one in dripping:
            one.sendall(greeting[1:2])
        wait_for(
            lambda: sorted(len(one._data) for one in pair.receiver._accepted.values()) == [2, 2, 2, 20], "their bytes"
        )
        for number, oldest in enumerate(dripping):
            stack.enter_context(connect_from(f"127.0.0.{6 + number}", answer)).sendall(greeting[:1])
            assert is_cut(oldest)
        slow.sendall(greeting[20:])
        assert len(read_exactly(slow, ANSWER_BYTES)) == ANSWER_BYTES


def test_a_tls_handshake_outlasts_older_connections_without_one(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair("tcp+tls")
    answer = pair.host.open(pair.sender)
    tls = pair.sender.config.tls
    assert tls is not None
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(connect_from("127.0.0.2", answer))
        slow = stack.enter_context(secured(plain, tls, "127.0.0.1"))
        wait_for(lambda: any(one.is_secured for one in pair.receiver._accepted.values()), "the handshake")
        later = []
        for number in range(20):
            later.append(stack.enter_context(connect_from(f"127.0.0.{3 + number}", answer)))
            later[-1].sendall(b"\x16")
        for oldest in later[:17]:
            assert is_cut(oldest)
        slow.sendall(greet(pair, answer))
        assert len(read_exactly(slow, ANSWER_BYTES)) == ANSWER_BYTES


def test_an_incomplete_greeting_has_no_thread(pair: Pair) -> None:
    """Threads would be started under a lock for which each chunk waits, or would outlive the receiver."""
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as slow:
        slow.sendall(greet(pair, answer)[:1])
        wait_for(lambda: any(one.has_sent for one in pair.receiver._accepted.values()), "the byte")
        assert not pair.receiver._connections
        pair.receiver.close()
        assert is_cut(slow)


def test_no_sender_is_admitted_after_close(
    new_threads: Callable[[], list[threading.Thread]], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() runs while the listening thread reads a greeting."""
    inside, go_on, advance = threading.Event(), threading.Event(), Accepted.advance

    def wait(accepted: Accepted) -> Any:
        inside.set()
        assert go_on.wait(WAIT_S)
        return advance(accepted)

    monkeypatch.setattr(Accepted, "advance", wait)
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as late:
        late.sendall(greet(pair, answer))
        assert inside.wait(WAIT_S)
        closing = threading.Thread(target=pair.receiver.close)
        closing.start()
        wait_for(lambda: pair.receiver._is_closed, "close() to begin")
        go_on.set()
        closing.join(WAIT_S)
        assert is_cut(late)
    assert not pair.receiver.peers
    assert not [one for one in new_threads() if isinstance(one, Inbound)]


def test_a_thread_starts_without_the_lock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    start, is_locked = Inbound.start, list[bool]()

    def seen(inbound: Inbound) -> None:
        is_locked.append(pair.receiver._lock.locked())
        start(inbound)

    monkeypatch.setattr(Inbound, "start", seen)
    assert_still_serves(pair)
    assert is_locked == [False]


def test_a_proof_that_has_arrived_makes_no_room(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes come after the listening thread has looked, and before it accepts others."""
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 1)
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender)
    first = connect(pair, answer)
    wait_for(lambda: len(pair.receiver._accepted) == 1, "the connection")
    admits, transport = type(pair.receiver).__dict__["_accept"], next(iter(pair.receiver._listeners))
    assert transport.name == "tcp"

    def late(receiver: Any, *given: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 1)
        first.sendall(greet(pair, answer))
        admits(receiver, *given)

    monkeypatch.setattr(type(pair.receiver), "_accept", late)
    with first, connect(pair, answer):
        assert len(read_exactly(first, ANSWER_BYTES)) == ANSWER_BYTES


def test_a_burst_of_first_bytes_does_not_delay_a_sender(make_pair: Callable[..., Pair]) -> None:
    """All that wait in the kernel are accepted at once, and only a proven one costs a thread."""
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender)
    first = greet(pair, answer)[:1]
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            one = stack.enter_context(connect_from("127.0.0.2", answer))
            with contextlib.suppress(OSError):  # it was closed already
                one.sendall(first)
        dial(pair.sender.config, pair.host.endpoint, "d0-1").close()
        numbers = [one.number for one in pair.receiver._connections.values()]
        assert numbers in ([], [1])
        assert len(pair.receiver._accepted) <= MAX_PENDING


def test_connections_with_tickets_take_no_share(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on one node open their connections at the same time."""
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 5)
    pair = make_pair("tcp")
    answers = [pair.host.open(pair.sender) for _ in range(3)]
    greetings = [greet(pair, one) for one in answers]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(connect(pair, one)) for one in answers]
        for rank, greeting in zip(ranks, greetings, strict=True):
            rank.sendall(greeting[:20])
        wait_for(lambda: sum(one.has_sent for one in pair.receiver._accepted.values()) == 3, "their first bytes")
        others = []
        for number in range(6):
            others.append(stack.enter_context(connect_from(f"127.0.0.{2 + number % 2}", answers[0])))
            others[-1].sendall(greetings[0][:1])
        for oldest in others[:4]:
            assert is_cut(oldest)
        for rank, greeting in zip(ranks, greetings, strict=True):
            rank.sendall(greeting[20:])
            assert len(read_exactly(rank, ANSWER_BYTES)) == ANSWER_BYTES


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4242", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4242", "::1"),
        ("ipv6:[2001:db8::1]:4242", "2001:db8::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4242", "10.0.0.1"),
        ("unix:", ""),
        ("unix:/tmp/a:1", ""),
    ],
)
def test_the_host_of_a_call(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_a_silent_connection_has_no_thread_and_ends_with_the_receiver(pair: Pair) -> None:
    answer = pair.host.open(pair.sender)
    with connect(pair, answer) as silent:
        wait_for(lambda: len(pair.receiver._accepted) == 1, "the connection")
        assert not pair.receiver._connections
        pair.receiver.close()
        assert silent.recv(1) == b""


def test_a_connection_that_is_gone_takes_no_place(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.link.receiver.MAX_PENDING", 4)
    pair = make_pair("tcp")
    answer = pair.host.open(pair.sender)

    def gone(*_: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(pair, answer))
        wait_for(lambda: len(pair.receiver._accepted) == 4, "the connections")
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "getpeername", gone)
            assert stack.enter_context(connect(pair, answer)).recv(1) == b""
        assert len(pair.receiver._accepted) == 4
