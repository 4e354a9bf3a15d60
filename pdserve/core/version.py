"""The version of pdserve. Pure."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"


def is_compatible(mine: str, other: str) -> bool:
    """Whether two processes may serve together: same MAJOR.MINOR, in a roll-out with another patch number. Empty: a
    release that did not send its version."""
    return not other or mine.split(".")[:2] == other.split(".")[:2]
