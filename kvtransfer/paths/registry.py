"""Which transports there are. A new one is one file here and one line below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtransfer.paths.path import Transport
from kvtransfer.paths.shm import Shm
from kvtransfer.paths.tcp import Tcp
from pdserve.core.errors import ConfigError

_IN_ORDER: Final[tuple[Transport, ...]] = (Shm(), Tcp())  # the preferred first
TRANSPORTS: Final[dict[int, Transport]] = {one.kind: one for one in _IN_ORDER}
NAMES: Final = ("auto", *(one.name for one in _IN_ORDER))


def kinds(name: str) -> tuple[int, ...]:
    """Numbers of TransportKind, the preferred first; auto: all that this system has. Raises ConfigError."""
    if name not in NAMES:
        raise ConfigError("transport", name, "one of " + ", ".join(NAMES))
    if name == "auto":
        return tuple(one.kind for one in _IN_ORDER if not one.why_not())
    [chosen] = [one for one in _IN_ORDER if one.name == name]
    if why_not := chosen.why_not():
        raise ConfigError("transport", name, f"another on this system: {why_not}")
    return (chosen.kind,)


def name_of(kind: int) -> str:
    return TRANSPORTS[kind].name if kind in TRANSPORTS else str(int(kind))


def names_of(numbers: Sequence[int]) -> str:
    return ", ".join(name_of(kind) for kind in numbers)
