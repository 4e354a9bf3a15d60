"""KV connections between hosts with TLS: nothing is sent in plain text, and wrong certificates are rejected."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.link.channel import RECORD_BYTES, TlsSocket, accepted, secured
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from pdserve.tls.certificates import ReloadingCertificates
from tests.support.tls_files import TestAuthority
from tests.unit.kvtransfer.harness import WAIT_S, Pair, wait_for

MakePair = Callable[..., Pair]


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair("tcp+tls", num_blocks=64, block_bytes=65_536)


def present(pair: Pair, tls: ReloadingCertificates) -> None:
    """From now on, the sender connects with these certificates."""
    pair.sender.plain.config = replace(pair.sender.plain.config, tls=tls)


def address_of(pair: Pair) -> tuple[str, int]:
    host, _, port = pair.host.open(pair.sender).address.rpartition(":")
    return host, int(port)


def error_of(pair: Pair) -> str:
    grant = pair.grant((1,))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 0)], True)
    assert sent.wait().outcome is SendOutcome.FAILED
    pair.receiver.abort(grant.key)
    received.wait()
    return str(sent.wait().error)


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_plain_text_gets_no_application_bytes(pair: Pair, words: bytes) -> None:
    with socket.create_connection(address_of(pair)) as sock:
        sock.settimeout(WAIT_S)
        sock.sendall(words)
        heard = b""
        with contextlib.suppress(ConnectionError):  # the receiver may have reset the connection already
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(4096):
                heard += data
    assert heard == b"" or heard[0] == 21, "at most a TLS alert"
    wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal to be counted")
    assert pair.move(pair.grant((3,)), (3,))[0].outcome is ReceiveOutcome.VERIFIED


def test_a_sender_without_a_certificate_is_rejected(pair: Pair, tls_authority: TestAuthority) -> None:
    context = ssl.create_default_context(cafile=str(tls_authority.ca))
    with context.wrap_socket(socket.create_connection(address_of(pair)), server_hostname="127.0.0.1") as sock:
        sock.settimeout(WAIT_S)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            sock.recv(1)  # In TLS 1.3, the client learns of it with the first bytes.


def test_a_certificate_of_another_ca_is_rejected(pair: Pair, tmp_path: Path) -> None:
    present(pair, TestAuthority(tmp_path, "another CA").tls("stranger"))
    assert "its certificate is not from a CA that this side trusts" in error_of(pair)


def test_a_receiver_of_another_ca_gets_no_greeting(pair: Pair, tmp_path: Path) -> None:
    stranger = TestAuthority(tmp_path, "another CA").tls("stranger")
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        secured(socket.create_connection(address_of(pair)), stranger, "127.0.0.1")


def test_a_receiver_with_another_name_is_rejected(pair: Pair, tls_authority: TestAuthority) -> None:
    files = tls_authority.files("elsewhere")
    present(pair, ReloadingCertificates(files, peer_name="other.example", is_mutual=True))
    assert "its certificate is for another host name" in error_of(pair)


def test_a_pair_whose_certificates_were_rotated_continues(make_pair: MakePair, tls_authority: TestAuthority) -> None:
    first = make_pair("tcp+tls")
    assert first.move(first.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED
    tls = first.sender.config.tls
    assert tls is not None
    before = tls.current()
    tls_authority.files("worker")
    assert tls.current() is not before
    assert first.move(first.grant((2,)), (2,))[0].outcome is ReceiveOutcome.VERIFIED, "on the old connection"
    second = make_pair("tcp+tls")
    assert second.move(second.grant((3,)), (3,))[0].outcome is ReceiveOutcome.VERIFIED


def test_small_buffers_share_a_record_and_arrive_in_order(tls_authority: TestAuthority) -> None:
    near, far = connected(tls_authority.tls("worker"))
    sizes = [1, 40, RECORD_BYTES, 7, RECORD_BYTES - 7, 3 * RECORD_BYTES + 5, 0, 2]
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    whole, sent, heard = b"".join(buffers), 0, bytearray()
    while len(heard) < len(whole):
        with contextlib.suppress(BlockingIOError):
            sent += near.sendmsg([whole[sent : sent + 10], whole[sent + 10 :]]) if sent < len(whole) else 0
        into = bytearray(10_000)
        try:
            count, *_ = far.recvmsg_into([memoryview(into)[:4000], memoryview(into)[4000:]])
        except BlockingIOError:
            continue
        heard += into[:count]
    assert heard == whole
    near.close()
    far.close()


def test_an_ended_connection_is_the_end_of_the_stream(tls_authority: TestAuthority) -> None:
    near, far = connected(tls_authority.tls("worker"))
    near.close()
    far.setblocking(True)
    assert far.recvmsg_into([bytearray(1)])[0] == 0
    far.close()


def test_an_expired_certificate_is_rejected(pair: Pair, tls_authority: TestAuthority) -> None:
    expired = tls_authority.files("expired", valid=-datetime.timedelta(minutes=1))
    present(pair, ReloadingCertificates(expired))
    error = error_of(pair)
    assert "expired" in error or "client certificate" in error, error


def connected(tls: ReloadingCertificates) -> tuple[TlsSocket, TlsSocket]:
    """Two non-blocking ends after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        client = socket.create_connection(door.getsockname())
        server = accepted(door.accept()[0], tls.current().peer_server)
    handshake = threading.Thread(target=server.do_handshake)
    handshake.start()
    near = secured(client, tls, "127.0.0.1")
    handshake.join(WAIT_S)
    for one in (near, server):
        one.setblocking(False)
    return near, server
