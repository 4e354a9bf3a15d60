"""Declares one setting: its help, its default, and its allowed values. Pure: standard library only.

A range is declared once, and checked for every source of the value: a flag, `--set`, a TOML file or a test.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.core.errors import ConfigError
from pdserve.core.urls import has_password

LARGEST_COUNT: Final = 2**31 - 1  # limit of fields that are sent as int32
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")  # used in Redis keys and file names


@dataclass(frozen=True, slots=True)
class Range:
    """A closed range. NaN and infinity are outside every range."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:.15g} to {self.high:.15g}"


def setting(
    text: str,
    default: Any = dataclasses.MISSING,
    *,
    env: str = "",
    within: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
    is_name: bool = False,
    is_url: bool = False,
    is_live: bool = False,
) -> Any:
    """Declares a dataclass field.

    `env` names the environment variable of a secret, which has no flag. With `is_url`, the value is a secret only if it
    contains a password. With `is_name`, the value must match NAME. With `is_live`, a running process takes a new value.
    """
    allowed = None if within is None else Range(*within)
    metadata = {
        "help": text,
        "env": env,
        "range": allowed,
        "choices": choices,
        "is_name": is_name,
        "is_url": is_url,
        "is_live": is_live,
    }
    return dataclasses.field(default=default, repr=not env, metadata=metadata)


def live_names(kind: Any) -> list[str]:
    """The fields of a dataclass that a running process takes new values of."""
    return [one.name for one in dataclasses.fields(kind) if one.metadata.get("is_live")]


def is_hidden(one: dataclasses.Field[Any], value: str) -> bool:
    """Whether `value` must not be on a command line, which other users can read."""
    return bool(one.metadata["env"]) and (not one.metadata["is_url"] or has_password(value))


def check_fields(config: Any) -> None:
    """Raises ConfigError for the first field that is outside its range or its choices."""
    for one in dataclasses.fields(config):
        check_value(one, getattr(config, one.name), one.name)


def check_value(one: dataclasses.Field[Any], value: object, name: str) -> None:
    """Raises ConfigError about the setting `name` if `value` is outside the field's range or choices."""
    allowed, choices = one.metadata.get("range"), one.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(name, value, "one of " + ", ".join(choices))
    if allowed is not None and value not in allowed:
        raise ConfigError(name, value, str(allowed))
    if one.metadata.get("is_name") and not (isinstance(value, str) and NAME.fullmatch(value)):
        raise ConfigError(name, repr(value), "1 to 128 letters, digits, dots, hyphens or underscores")
