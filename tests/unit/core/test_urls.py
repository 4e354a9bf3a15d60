"""Hides passwords in URLs."""

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.urls import has_password, hide_password, place


@pytest.mark.parametrize(
    ("url", "shown", "where"),
    [
        ("redis://host:6379/0", "redis://host:6379/0", "host:6379"),
        ("redis://:pa55@host:6379/0", "redis://***@host:6379/0", "host:6379"),
        ("redis://user:pa55@host:6379/0", "redis://***@host:6379/0", "host:6379"),
        ("rediss://:pa55/with@signs@host:6379/0", "rediss://***@host:6379/0", "host:6379"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", "/run/redis.sock"),
        ("unix://:pa55@/run/redis.sock?db=0", "unix://***@/run/redis.sock?db=0", "/run/redis.sock"),
        ("unix:///run/redis.sock?db=0&password=pa55", "unix:///run/redis.sock?db=0&password=***", "/run/redis.sock"),
        ("redis://host/0?password=pa55&db=1", "redis://host/0?password=***&db=1", "host"),
        ("", "", ""),
    ],
)
def test_passwords_are_hidden(url: str, shown: str, where: str) -> None:
    assert (hide_password(url), place(url)) == (shown, where)
    assert has_password(url) is ("pa55" in url)


def test_errors_hide_passwords() -> None:
    error = ConfigError("redis", "redis://:pa55@host/0", "another")
    assert "pa55" not in str(error)
    assert "redis://***@host/0" in str(error)
