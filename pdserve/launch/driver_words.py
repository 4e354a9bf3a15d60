"""Messages from Ray's driver to the launcher, and from the actors to the driver."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHealth:
    """The state of an actor; `error` is why its worker could not start."""

    pid: int
    address: str
    is_healthy: bool
    error: str
    memory: str = ""  # how it is divided, as JSON


def emit(name: str, text: str) -> None:
    sys.stdout.write(f"@{name} {text}\n")
    sys.stdout.flush()


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
