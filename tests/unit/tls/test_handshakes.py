"""Clients that send nothing, or do not finish a TLS handshake, are disconnected in time, and do not delay others."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from pdserve.config import GatewayConfig
from pdserve.core.access.shares import SILENT_SHARE
from pdserve.gateway.server import GatewayHost
from pdserve.telemetry.metrics import MAX_CONNECTIONS, MetricsServer
from pdserve.testing import Cluster
from tests.support.tls_files import TestAuthority

WAIT_S = 60.0


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


@contextmanager
def gateway(ours: TestAuthority, **settings: float) -> Iterator[GatewayHost]:
    certificate = {name: value for name, value in ours.settings("gateway").items() if name != "tls_ca"}
    with Cluster(prefill=0) as cluster:
        host = GatewayHost(GatewayConfig(router=cluster.address, port=0, **certificate, **settings))
        host.start()
        try:
            yield host
        finally:
            host.stop()


def address_of(host: GatewayHost) -> tuple[str, int]:
    return "127.0.0.1", int(host.address.rpartition(":")[2])


def is_closed(sock: socket.socket) -> bool:
    """Waits for the end of the connection."""
    sock.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def answer(host: GatewayHost, ours: TestAuthority) -> int:
    http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(ours.ca)))
    with openai.OpenAI(base_url=f"https://{host.address}/v1", api_key="x", max_retries=5, http_client=http) as client:
        found = client.completions.create(model="toy", prompt="hello", max_tokens=2, temperature=0)
        assert found.usage is not None
        return found.usage.completion_tokens


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_https_closes_a_handshake_that_takes_too_long(ours: TestAuthority, first: bytes) -> None:
    with gateway(ours, header_s=0.3) as host, socket.create_connection(address_of(host)) as sock:
        sock.sendall(first)
        assert is_closed(sock)


def test_open_handshakes_do_not_block_callers(ours: TestAuthority) -> None:
    with gateway(ours, max_connections=4, header_s=600.0) as host:
        waiting = [socket.create_connection(address_of(host)) for _ in range(12)]
        assert answer(host, ours) == 2
        for one in waiting[:8]:
            assert is_closed(one), "the longest idle ones made room"
        for one in waiting:
            one.close()


def test_a_request_that_comes_with_the_end_of_the_handshake_is_not_lost(ours: TestAuthority) -> None:
    """Its bytes may be in the same packet as the last ones of the handshake."""
    request = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    context = ssl.create_default_context(cafile=str(ours.ca))
    with gateway(ours) as host:
        for _ in range(20):
            to_us, to_them = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(to_us, to_them, server_hostname="127.0.0.1")
            with socket.create_connection(address_of(host)) as sock:
                sock.settimeout(WAIT_S)
                while True:
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        sock.sendall(to_them.read())
                        to_us.write(sock.recv(65_536))
                tls.write(request)
                sock.sendall(to_them.read())  # Finished and the request, at once
                heard = b""
                with contextlib.suppress(ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    while True:
                        try:
                            data = tls.read(4096)
                        except ssl.SSLWantReadError:
                            received = sock.recv(65_536)
                            to_us.write(received) if received else to_us.write_eof()
                            continue
                        if not data:
                            break
                        heard += data
            assert heard.startswith(b"HTTP/1.1 200 OK"), heard


def test_failed_handshakes_are_logged_at_intervals(ours: TestAuthority, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), gateway(ours) as host:
        for _ in range(20):
            with socket.create_connection(address_of(host)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert is_closed(sock)
    told = [one for one in caplog.records if one.getMessage() == "TLS handshakes failed"]
    assert len(told) == 1


@pytest.fixture
def metrics(ours: TestAuthority) -> Iterator[MetricsServer]:
    def app(environ: object, start: object) -> list[bytes]:
        start("200 OK", [])  # type: ignore[operator]
        return [b"pdserve_up 1"]

    server = MetricsServer("127.0.0.1", 0, app, ours.tls("worker"))
    yield server
    server.close()


def scrape(server: MetricsServer, ours: TestAuthority) -> bytes:
    context = ssl.create_default_context(cafile=str(ours.ca))
    with (
        socket.create_connection(("127.0.0.1", server.server_port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        heard = b""
        while data := sock.recv(4096):
            heard += data
        return heard


def test_metrics_are_served_during_a_stalled_handshake(metrics: MetricsServer, ours: TestAuthority) -> None:
    with socket.create_connection(("127.0.0.1", metrics.server_port)):
        assert scrape(metrics, ours).endswith(b"pdserve_up 1")


def connected(stack: contextlib.ExitStack, server: MetricsServer, first: bytes, host: str) -> socket.socket:
    """A connection from an address of this host, which has sent `first`."""
    address = ("127.0.0.1", server.server_port)
    sock = stack.enter_context(socket.create_connection(address, source_address=(host, 0)))
    sock.sendall(first)
    return sock


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("first", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_open_connections_do_not_keep_others_from_metrics(
    metrics: MetricsServer, ours: TestAuthority, first: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_CONNECTIONS):
            connected(stack, metrics, first, "127.0.0.1")
        assert scrape(metrics, ours).endswith(b"pdserve_up 1")


def test_a_host_with_many_connections_to_metrics_makes_room(metrics: MetricsServer, ours: TestAuthority) -> None:
    with contextlib.ExitStack() as stack:
        other = connected(stack, metrics, b"\x16", "127.0.0.2")
        waiting = [connected(stack, metrics, b"\x16", "127.0.0.1") for _ in range(2 * MAX_CONNECTIONS)]
        assert scrape(metrics, ours)
        assert sum(map(is_open, waiting)) < MAX_CONNECTIONS - 1
        assert is_open(other)


def test_silent_connections_keep_a_quarter_of_the_places_of_metrics(metrics: MetricsServer) -> None:
    with contextlib.ExitStack() as stack:
        speaking = [connected(stack, metrics, b"\x16", "127.0.0.1") for _ in range(MAX_CONNECTIONS)]
        silent = [connected(stack, metrics, b"", "127.0.0.1") for _ in range(4 * MAX_CONNECTIONS)]
        most = MAX_CONNECTIONS // SILENT_SHARE + 1  # the newest one may be beyond it
        for one in silent[:-most]:
            assert is_closed(one), "the oldest ones made room"
        assert sum(map(is_open, speaking)) == MAX_CONNECTIONS - most


def test_metrics_show_a_new_certificate_to_a_new_client(metrics: MetricsServer, ours: TestAuthority) -> None:
    assert scrape(metrics, ours)
    other = TestAuthority(ours.folder / "other", "another CA")
    other.files("worker")
    for file in ("ca.crt", "tls.key", "tls.crt"):
        (other.folder / "worker" / file).replace(ours.folder / "worker" / file)
    with pytest.raises(ssl.SSLCertVerificationError):
        scrape(metrics, ours)
    assert scrape(metrics, other)
