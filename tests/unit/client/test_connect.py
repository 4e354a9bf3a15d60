from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve import AsyncClient, Client
from pdserve.client.connect import Tls, is_loopback, target
from pdserve.config import RouterConfig
from pdserve.core.access.hosts import NO_HTTP_PROXY
from pdserve.core.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/tmp/socket", True),
        ("localhost", True),
        ("localhost.example.com:1", False),
        ("10.0.0.1:50051", False),
        ("0.0.0.0:50051", False),
        ("dns:///router:50051", False),
        ("[2001:db8::1]:50051", False),
    ],
)
def test_loopback_addresses_are_recognised(address: str, holds: bool) -> None:
    assert is_loopback(address) is holds


@pytest.mark.parametrize(("address", "is_here"), [("localhost:50051", True), ("router:50051", False)])
def test_only_calls_to_this_host_bypass_an_http_proxy(address: str, is_here: bool) -> None:
    options = target(address, tls=None, token=None, connect_timeout_s=5.0).channel_options()
    assert (NO_HTTP_PROXY in options) is is_here


def test_connect_refuses_a_plain_text_token_for_another_host() -> None:
    with pytest.raises(ConfigError, match="token"):
        target("router:50051", tls=None, token="secret", connect_timeout_s=5.0)


def test_a_token_may_be_sent_over_tls_or_to_this_host() -> None:
    assert target("router:50051", tls=True, token="secret", connect_timeout_s=5.0).credentials() is not None
    here = target("localhost:1", tls=None, token="secret", connect_timeout_s=5.0)
    assert ("authorization", "Bearer secret") in here.metadata()


@pytest.mark.parametrize(
    "address",
    ["", " ", "localhost", "127.0.0.1", "::1", "[::1]", "localhost:", "localhost:x", ":50051", "localhost:0", "a b:1",
     "localhost:50051/", "a:1,b:2", "localhost:99999999"],
)  # fmt: skip
def test_an_address_without_a_port_names_the_form(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        target(address, tls=None, token=None, connect_timeout_s=5.0)
    expected = "HOST:PORT with a port from 1 to 65535, such as localhost:50051"
    assert caught.value.message == f"target: got {address!r}, expected {expected}"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["http://localhost:50051", "https://localhost", "grpc://h:1", "HTTP://h:1"])
def test_an_address_with_a_scheme_names_the_form(address: str, kind: type[Client | AsyncClient]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(address)
    expected = "HOST:PORT without a scheme, such as localhost:50051"
    assert caught.value.message == f"target: got {address!r}, expected {expected}"


@pytest.mark.parametrize(
    "address",
    ["router:50051", "[::1]:50051", "[fe80::1%eth0]:1", "dns:///router:50051", "dns://8.8.8.8/router:1", "unix:/a",
     "unix-abstract:a", "unix:///tmp/a", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1,[::2]:1", "dns:router",
     "a_b.c-d:1"],
)  # fmt: skip
def test_names_of_grpc_are_taken_as_they_are(address: str) -> None:
    assert target(address, tls=None, token=None, connect_timeout_s=5.0).address == address


@pytest.mark.parametrize("token", ["", "é", "two\nlines", "end ", "x" * 5000])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    """gRPC raises an internal error when it sends one."""
    with pytest.raises(ConfigError, match=r"^token: got a value that no header can carry"):
        target("localhost:1", tls=None, token=token, connect_timeout_s=5.0)
    if token:
        with pytest.raises(ConfigError, match=r"^token: got a value that no header can carry"):
            RouterConfig(model="m", token=token)


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_file_that_is_not_pem_is_named(name: str, tmp_path: Path) -> None:
    """gRPC would report a server that does not answer."""
    file = tmp_path / "file"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match=rf"^tls_{name}: got {re.escape(str(file))}, expected a PEM file with "):
        Tls.from_files(**{name: file})
