"""Allowed values of settings, and secrets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.setting import check_fields, is_hidden, setting


@dataclass(frozen=True, kw_only=True)
class Config:
    rate: float = setting("a rate", 1.0, within=(0.5, 2.0))
    mode: str = setting("a mode", "fast", choices=("fast", "safe"))
    name: str = setting("a name", "a", is_name=True)
    token: str = setting("a token", "", env="TOKEN")
    url: str = setting("an address", "", env="URL", is_url=True)


FIELDS = {one.name: one for one in dataclasses.fields(Config)}


@pytest.mark.parametrize("rate", [0.5, 1, 2.0])
def test_both_ends_of_a_range_are_allowed(rate: float) -> None:
    check_fields(Config(rate=rate, mode="safe", name="A-b_c.9"))


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"rate": 0.49}, "rate", "a number from 0.5 to 2"),
        ({"rate": 2.01}, "rate", "a number from 0.5 to 2"),
        ({"rate": math.nan}, "rate", "a number from 0.5 to 2"),
        ({"rate": "1"}, "rate", "a number from 0.5 to 2"),
        ({"mode": "slow"}, "mode", "one of fast, safe"),
        ({"name": ""}, "name", "1 to 128 letters, digits, dots, hyphens or underscores"),
        ({"name": "a" * 129}, "name", "1 to 128 letters, digits, dots, hyphens or underscores"),
        ({"name": "a b"}, "name", "1 to 128 letters, digits, dots, hyphens or underscores"),
        ({"name": 7}, "name", "1 to 128 letters, digits, dots, hyphens or underscores"),
    ],
)
def test_a_value_outside_is_rejected_with_what_is_allowed(
    changes: dict[str, object], field: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_fields(Config(**changes))  # type: ignore[arg-type]
    assert (raised.value.field, raised.value.expected) == (field, expected)


def test_secrets_are_hidden_and_an_address_only_with_its_password() -> None:
    assert is_hidden(FIELDS["token"], "")
    assert not is_hidden(FIELDS["rate"], "1")
    assert not is_hidden(FIELDS["url"], "redis://127.0.0.1:6379")
    assert is_hidden(FIELDS["url"], "redis://:secret@127.0.0.1:6379")
    assert "secret" not in repr(Config(token="secret", url="redis://:secret@h:1"))
