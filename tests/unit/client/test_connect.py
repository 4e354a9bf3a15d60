from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.client.connect import Tls, is_loopback, target
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.hosts import NO_HTTP_PROXY


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


def test_an_empty_target_names_the_argument() -> None:
    with pytest.raises(ConfigError, match="target"):
        target(" ", tls=None, token=None, connect_timeout_s=5.0)


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
