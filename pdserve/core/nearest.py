"""The known name that is nearest to a mistyped one. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

MAX_NAME_CHARS: Final = 64  # of a mistyped name; comparing takes quadratic time, and no known name is longer


def nearest(name: str, known: Iterable[str], cutoff: float | None = None) -> str | None:
    """`cutoff`: least similarity; by default lower for short names, of which one typing error changes more."""
    if cutoff is None:
        cutoff = 0.6 if len(name) < 5 else 0.7
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), None) if len(name) <= MAX_NAME_CHARS else None


def did_you_mean(found: str | None) -> str:
    """The end of an error message; empty without a suggestion."""
    return f"; did you mean {found}?" if found else ""
