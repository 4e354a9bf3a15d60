"""The version of pdserve, and the rule for processes of different versions. Pure.

A process states its version with its build (pdserve/build.py), such as 0.1.0+1a2b3c4d5e.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

VERSION: Final = "0.1.0"
UNKNOWN_BUILD: Final = "unknown"
VERSION_KEY: Final = "pdserve-version"  # of the metadata of a call
MAX_CHARS: Final = 32  # of a version that another process states
_MOST_NAMED: Final = 4


def is_compatible(mine: str, other: str) -> bool:
    """Whether two processes may serve together: same MAJOR.MINOR, in a roll-out with another patch number or build.
    Empty: a release that did not send its version."""
    return not other or release(mine).split(".")[:2] == release(other).split(".")[:2]


def release(version: str) -> str:
    """The version without its build."""
    return version.partition("+")[0]


def mismatch(mine: str, other: str) -> str:
    """What is said of a process that is not compatible."""
    return f"its version is {other[:MAX_CHARS]!r}, this process's {mine}; only the patch number and build may differ"


def versions_text(version: str, workers: Iterable[tuple[str, str]]) -> str:
    """The router's version, and those of the workers that have another one, by name; empty if unknown."""
    others = [f"{name} {other}" for name, other in workers if other not in ("", version)]
    more = [f"{len(others) - _MOST_NAMED} more"] if len(others) > _MOST_NAMED else []
    return ", ".join([f"version {version}", *others[:_MOST_NAMED], *more]) if version else ""
