"""Bounds of durations and waits. Pure: standard library only.

A duration from a setting or from the wire is at most a day. A longer one is a mistake, and would overflow the system's
own timers (poll() takes at most 24 days). A wait is clipped to the same bound, and the waiter then checks again.
"""

from __future__ import annotations

import math
from typing import Final

from pdserve.core.errors import InvalidRequest

DAY_S: Final = 86_400.0
SHORTEST_SLO_S: Final = 1e-6  # lower bound of targets, because formulas divide by them
MAX_DOUBLINGS: Final = 64  # doublings of a backoff; a float overflows after 1,023


def check_duration(field: str, seconds: float, low: float = 0.0, high: float = DAY_S) -> None:
    """Raises InvalidRequest if `seconds` is not a number from `low` to `high`."""
    if not low <= seconds <= high:  # also rejects NaN
        raise InvalidRequest(field, seconds, f"between {low:g} and {high:g} seconds")


def clamped_s(wait_s: float, shortest_s: float = 0.0, longest_s: float = DAY_S) -> float:
    """The wait, clipped to its bounds; `longest_s` for NaN."""
    if math.isnan(wait_s):
        return longest_s
    return min(max(wait_s, shortest_s), longest_s)


def backoff_s(first_s: float, longest_s: float, doublings: int) -> float:
    """`first_s` doubled `doublings` times, at most `longest_s`."""
    return min(first_s * 2.0 ** min(doublings, MAX_DOUBLINGS), longest_s)
