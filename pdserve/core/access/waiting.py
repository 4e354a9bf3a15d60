"""Which connection is closed when too many wait: those without a request, or without a proof of the secret. Pure.

A connection that sends nothing costs its caller the least. So a flood of these can take only a quarter of the places
from those that have sent something.
"""

from __future__ import annotations

from typing import Final

SILENT_SHARE: Final = 4  # the silent ones keep one of so many places


def closes_silent(num_silent: int, num_active: int) -> bool:
    """Whether one that has sent nothing makes room, rather than one that has."""
    return (SILENT_SHARE - 1) * num_silent > num_active
