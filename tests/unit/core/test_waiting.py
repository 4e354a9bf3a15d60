"""Which waiting connection makes room for another one."""

from __future__ import annotations

import pytest

from pdserve.core.access.hosts import network_of
from pdserve.core.access.waiting import to_close


def hosts(names: str) -> dict[str, str]:
    """`a1 a2 b1`: connections of hosts a and b."""
    return {one: one[0] for one in names.split()}


@pytest.mark.parametrize(
    ("silent", "active", "closed"),
    [
        ("", "", None),
        ("a1", "", "a1"),
        ("", "a1 a2", "a1"),
        ("a1", "a2 a3", "a1"),
        ("a1", "a2 a3 a4", "a2"),  # a quarter is silent
        ("a1 b1 b2", "", "b1"),
        ("", "a1 b1 b2", "b1"),
        ("", "a1 b1 b2 a2", "a1"),
    ],
)
def test_the_host_with_the_most_loses_one(silent: str, active: str, closed: str | None) -> None:
    assert to_close(hosts(silent), hosts(active)) == closed


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
