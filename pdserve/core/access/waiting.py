"""Which connection is closed when too many wait: those without a request, or without a proof of the secret. Pure.

A connection that sends nothing costs its caller the least. So a flood of these can take only a quarter of the places
from those that have sent something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeVar

SILENT_SHARE: Final = 4  # the silent ones keep one of so many places
Silent = TypeVar("Silent")
Active = TypeVar("Active")


def closes_silent(num_silent: int, num_active: int) -> bool:
    """Whether one that has sent nothing makes room, rather than one that has."""
    return (SILENT_SHARE - 1) * num_silent > num_active


def to_close(silent: Mapping[Silent, str], active: Mapping[Active, str]) -> Silent | Active | None:
    """Each connection with its caller's host; those that were heard least recently come first. The host with the most
    connections loses its first one, so no host takes the places of others."""
    return _first(silent) if closes_silent(len(silent), len(active)) else _first(active)


def _first(waiting: Mapping[Silent, str]) -> Silent | None:
    num_of = Counter(waiting.values())
    most = max(num_of.values(), default=0)
    return next((one for one, host in waiting.items() if num_of[host] == most), None)
