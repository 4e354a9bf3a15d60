"""Bounds of durations and waits. Pure: standard library only.

A duration that comes from a setting or the wire is at most a day: beyond that it is a mistake, and the system's own
timers overflow (poll() takes 24 days). A wait is clipped to the same bound; the waiter
checks again when it ends.
"""

from __future__ import annotations

import math
from typing import Final

from pdserve.core.errors import InvalidRequest

DAY_S: Final = 86_400.0
SHORTEST_SLO_S: Final = 1e-6  # lower bound of targets, which are divisors
MAX_DOUBLINGS: Final = 64  # doublings of a backoff; a float overflows after 1,023


def check_duration(field: str, seconds: float, low: float = 0.0, high: float = DAY_S) -> None:
    """Raises InvalidRequest if `seconds` is not a number from `low` to `high`."""
    if not low <= seconds <= high:  # also if it is not a number
        raise InvalidRequest(field, seconds, f"between {low:g} and {high:g} seconds")


def clamped_s(wait_s: float, shortest_s: float = 0.0, longest_s: float = DAY_S) -> float:
    """The wait clipped to its bounds; `longest_s` if it is not a number."""
    if math.isnan(wait_s):
        return longest_s
    return min(max(wait_s, shortest_s), longest_s)


def backoff_s(first_s: float, longest_s: float, doublings: int) -> float:
    """`first_s` doubled that many times, at most `longest_s`."""
    return min(first_s * 2.0 ** min(doublings, MAX_DOUBLINGS), longest_s)
