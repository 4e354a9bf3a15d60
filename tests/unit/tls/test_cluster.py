"""A running cluster with TLS: no plain text on any port, and wrong certificates are rejected with a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import AsyncClient, Client, Tls
from pdserve.config import GatewayConfig, RouterConfig
from pdserve.core.errors import Unavailable
from pdserve.core.setting import CA
from pdserve.gateway.server import GatewayHost
from pdserve.testing import toy_answer
from pdserve.tls.authority import write_private
from router.service.program import RouterHost
from tests.support.tls_files import TestAuthority
from tests.unit.tls.conftest import TlsCluster, tls_cluster

WAIT_S = 60.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
WORDS = [b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", HTTP2, b"PING\r\n", bytes(256), b"\x16\x03\x01\x00\x05hello"]
ANSWER = toy_answer("hello", 4)


def heard_in_plain_text(address: tuple[str, int], words: bytes) -> bytes:
    heard = b""
    with socket.create_connection(address) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(WAIT_S)
        sock.sendall(words)
        with contextlib.suppress(OSError):  # it has closed the connection already
            sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(4096):
            heard += data
    return heard


def connection(address: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    host, port = address.split(":")
    return context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host)


@pytest.mark.parametrize("words", WORDS)
def test_no_port_answers_plain_text(served: TlsCluster, words: bytes) -> None:
    assert len(served.ports) >= 5, "router, gateway, two workers, KV"
    for port in sorted(served.ports):
        heard = heard_in_plain_text(("127.0.0.1", port), words)
        assert heard[:1] in (b"", b"\x15"), f"{port} said {heard!r}, which is no TLS alert"


def test_callers_that_know_the_ca_are_served(served: TlsCluster) -> None:
    with Client(served.cluster.address, tls=served.ca) as client:
        assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER
    assert over_https(served) == ANSWER


async def test_the_async_client_is_served(served: TlsCluster) -> None:
    async with AsyncClient(served.cluster.address, tls=Tls.from_files(ca=served.ca)) as client:
        assert (await client.generate("hello", max_tokens=4, temperature=0.0)).text == ANSWER


def error_of(address: str, tls: Tls | None) -> str:
    with Client(address, tls=tls, timeout_s=WAIT_S) as client, pytest.raises(Unavailable) as raised:
        client.generate("hello", max_tokens=1)
    return raised.value.message


def test_another_ca_is_not_trusted(served: TlsCluster, tmp_path: Path) -> None:
    other = TestAuthority(tmp_path, "another CA")
    message = error_of(served.cluster.address, Tls.from_files(ca=other.ca))
    assert message.endswith("its certificate is not from a CA that this side trusts")
    with pytest.raises(openai.APIConnectionError):
        over_https(replace(served, authority=other))


def test_a_caller_without_tls_gets_the_reason(served: TlsCluster) -> None:
    assert "it may require TLS" in error_of(served.cluster.address, None)


def test_a_caller_is_told_that_a_server_has_no_tls(served: TlsCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = door.accept()
                    one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    one.close()

        threading.Thread(target=answer, daemon=True).start()
        message = error_of(f"127.0.0.1:{door.getsockname()[1]}", Tls.from_files(ca=served.ca))
    assert message.endswith("it does not speak TLS")


def test_a_certificate_for_another_name_is_rejected(tmp_path: Path) -> None:
    with tls_cluster(tmp_path) as served:
        address = served.cluster.address
        tls = Tls.from_files(ca=served.ca, server_name="other.example")
        assert error_of(address, tls).endswith("its certificate is for another host name")


def test_workers_require_a_certificate(served: TlsCluster) -> None:
    roots = Path(served.ca).read_bytes()
    for worker in Client(served.cluster.address, tls=served.ca).topology().workers:
        with grpc.secure_channel(worker.endpoint, grpc.ssl_channel_credentials(roots)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_callers_need_a_certificate_of_the_client_ca(mutual: TlsCluster, tmp_path: Path) -> None:
    assert mutual.callers is not None
    address = mutual.cluster.address
    stranger = TestAuthority(tmp_path, "strangers").files("caller")
    for files in ({}, {"cert": stranger.cert, "key": stranger.key}):
        assert "a client certificate" in error_of(address, Tls.from_files(ca=mutual.ca, **files))
        with pytest.raises(openai.APIConnectionError):
            over_https(mutual, **files)
    known = mutual.callers.files("caller")
    with Client(address, tls=Tls.from_files(ca=mutual.ca, cert=known.cert, key=known.key)) as client:
        assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER
    assert over_https(mutual, cert=known.cert, key=known.key) == ANSWER


def test_a_gateway_with_a_public_certificate_shows_the_router_the_clusters(mutual: TlsCluster, tmp_path: Path) -> None:
    """Because the router takes certificates of the cluster's CA and of its callers' CA only."""
    assert mutual.callers is not None
    public, own = TestAuthority(tmp_path / "public", "public CA"), mutual.authority.settings("gateway-1")
    files = {**public.settings("gateway-1"), "tls_ca": own["tls_ca"], "tls_client_ca": mutual.callers.ca.as_posix()}
    host = GatewayHost(
        GatewayConfig(
            router=mutual.cluster.address, port=0, **files, router_cert=own["tls_cert"], router_key=own["tls_key"]
        )
    )
    host.start()
    try:
        known = mutual.callers.files("caller")
        served = replace(mutual, authority=public, gateway=host)
        assert over_https(served, cert=known.cert, key=known.key) == ANSWER
    finally:
        host.stop()


def over_https(served: TlsCluster, cert: str = "", key: str = "") -> str:
    """The gateway's answer to a caller with that certificate. The gateway calls the router for each."""
    context = ssl.create_default_context(cafile=served.ca)
    if cert:
        context.load_cert_chain(cert, key)
    http = openai.DefaultHttpxClient(verify=context)
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, http_client=http) as client:
        found = client.completions.create(model="toy", prompt="hello", max_tokens=4, temperature=0)
        return str(found.choices[0].text)


async def test_rotation_keeps_streams_open(tmp_path: Path) -> None:
    with tls_cluster(tmp_path) as served:
        before = fingerprint_of(served.gateway.address, served.ca), fingerprint_of(served.cluster.address, served.ca)
        async with AsyncClient(served.cluster.address, tls=served.ca) as client:
            stream = client.stream("hello", max_tokens=2000, temperature=0.0, ignore_eos=True)
            first = await anext(stream)
            served.rotate()
            after = fingerprint_of(served.gateway.address, served.ca), fingerprint_of(served.cluster.address, served.ca)
            assert not set(before) & set(after)
            assert await asyncio.to_thread(over_https, served) == ANSWER, "the gateway calls the router with new files"
            text = first.text + "".join([piece.text async for piece in stream])
        assert text == toy_answer("hello", 2000)
        with Client(served.cluster.address, tls=served.ca) as client_after:
            assert client_after.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER


def test_broken_files_keep_the_old_certificate(tmp_path: Path) -> None:
    with tls_cluster(tmp_path) as served:
        before = fingerprint_of(served.cluster.address, served.ca), fingerprint_of(served.gateway.address, served.ca)
        for name in ("router", "gateway"):
            Path(served.authority.folder / name / "tls.crt").write_text("half a certificate")
        after = fingerprint_of(served.cluster.address, served.ca), fingerprint_of(served.gateway.address, served.ca)
        assert after == before
        with Client(served.cluster.address, tls=served.ca) as client:
            assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER


def test_the_ca_can_be_replaced_while_the_cluster_serves(tmp_path: Path) -> None:
    """Both CAs first, then the certificates, then the new CA alone."""
    with tls_cluster(tmp_path / "old", connection_age_s=0.1) as served:  # so that the gateway connects again
        assert over_https(served) == ANSWER
        new = TestAuthority(tmp_path / "new", "the new CA")
        folders = [served.authority.folder / name for name in ("router", "worker", "gateway")]
        both = Path(served.ca).read_bytes() + new.ca.read_bytes()
        for folder in folders:
            write_private(folder / CA, both)
        assert over_https(served) == ANSWER
        for folder in folders:
            new.authority.write(folder, folder.name, ["127.0.0.1"])
            write_private(folder / CA, both)
        with pytest.raises(openai.APIConnectionError):
            over_https(served)
        renewed = replace(served, authority=new)
        assert over_https(renewed) == ANSWER
        for folder in folders:
            write_private(folder / CA, new.ca.read_bytes())
        assert over_https(renewed) == ANSWER
        with Client(served.cluster.address, tls=renewed.ca) as client:
            assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER


def test_an_expired_certificate_is_rejected_by_callers(tmp_path: Path) -> None:
    """A server that has been given one before it expired: the rule of the files would not take it any more."""
    authority = TestAuthority(tmp_path)
    files = authority.files("old", valid=-datetime.timedelta(minutes=1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=shake_hands, args=(door, context), daemon=True).start()
        message = error_of(f"127.0.0.1:{door.getsockname()[1]}", Tls.from_files(ca=authority.ca))
    assert message.endswith("its certificate has expired")


def shake_hands(door: socket.socket, context: ssl.SSLContext) -> None:
    with contextlib.suppress(OSError):
        while True:
            one, _ = door.accept()
            with contextlib.suppress(OSError):
                context.wrap_socket(one, server_side=True)


def fingerprint_of(address: str, ca: str) -> bytes:
    """The certificate that a new connection sees."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with connection(address, context) as sock:
        return sock.getpeercert(binary_form=True) or b""


class Rejections(logging.Handler):
    """The router's messages about rejected workers."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self.has_one = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "a worker is rejected":
            self.reasons.append(record.why)  # type: ignore[attr-defined]
            self.has_one.set()


def test_a_router_reports_why_a_workers_certificate_is_rejected(served: TlsCluster, tmp_path: Path) -> None:
    with Client(served.cluster.address, tls=served.ca) as client:
        endpoint = client.topology().workers[0].endpoint
    certificate = TestAuthority(tmp_path, "another CA").settings("router")
    rejections, log = Rejections(), logging.getLogger("router.service.workers")
    log.addHandler(rejections)
    host = RouterHost(
        RouterConfig(model="toy", port=0, workers=(endpoint,), cluster_secret="of another cluster", **certificate)
    )
    host.start()
    try:
        assert rejections.has_one.wait(WAIT_S)
    finally:
        host.stop()
        log.removeHandler(rejections)
    assert rejections.reasons == ["its certificate is not from a CA that this side trusts"]
