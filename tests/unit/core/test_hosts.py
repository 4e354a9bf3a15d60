"""The form HOST:PORT, which addresses in settings, flags and the registry have."""

from __future__ import annotations

import pytest

from pdserve.client.connect import target
from pdserve.config import RouterConfig, WorkerConfig
from pdserve.core.access.hosts import check_endpoint, endpoint_of, network_of
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.prefix.registry import Registration

WRONG = [
    "",
    " ",
    "h",
    "h:",
    ":1",
    "h:0",
    "h:65536",
    "h:99999",
    "h:x",
    "h:1 ",
    "h:-1",
    "h:+1",
    "h:\u0661",
    "a b:1",
    "::1",
    "::1:1",
]
WRONG += [
    "[::1]",
    "[::1:1",
    "[]:1",
    "[::g]:1",
    "[1:2]:1",
    "[h]:1",
    "h:1/",
    "u@h:1",
    "a:1,b:2",
    "h:1:2",
    "h:" + "0" * 5000,
]


@pytest.mark.parametrize("text", WRONG)
def test_every_address_has_the_same_form(text: str) -> None:
    assert endpoint_of(text) is None
    refused = [
        lambda: check_endpoint("name", text),
        lambda: target(text, tls=None, token=None, connect_timeout_s=1.0),
        lambda: RouterConfig(model="m", workers=(text,)),
        lambda: Registration(worker_id="d0", incarnation="1", role=Role.DECODE, endpoint=text),
    ]
    if text:  # none
        refused.append(
            lambda: WorkerConfig(model="m", worker_id="d0", tensor_parallel=2, local_ranks=1, rendezvous=text)
        )
    if text and not text.endswith("/"):
        refused.append(lambda: RouterConfig(model="m", otlp=text))
    for make in refused:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            make()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("h:1", "h", 1),
        ("a_b.c-d:65535", "a_b.c-d", 65535),
        ("[::1]:50051", "::1", 50051),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_host_and_port_are_split(text: str, host: str, port: int) -> None:
    assert endpoint_of(text) == check_endpoint("name", text) == (host, port)


@pytest.mark.parametrize("text", ["http://h:1", "https://[::1]:1/"])
def test_a_scheme_is_allowed_by_name(text: str) -> None:
    RouterConfig(model="m", otlp=text)
    with pytest.raises(ConfigError, match="HOST:PORT without a scheme, such as 10"):
        check_endpoint("name", text)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(model="m", otlp="http://user:secret@h:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_addresses_of_one_ipv6_network_are_one_caller(host: str, network: str) -> None:
    assert network_of(host) == network
