"""Which addresses are one caller."""

from __future__ import annotations

import pytest

from pdserve.core.access.hosts import network_of


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
