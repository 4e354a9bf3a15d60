"""Reduces long lists of points to as many as a chart can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeVar

_MOST_POINTS: Final = 360  # of a timeline or a distribution; more would not be visible
T = TypeVar("T")


def means(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most this many points; each is the mean of its neighbours."""
    size = math.ceil(len(points) / most) if points else 1
    if size == 1:
        return list(points)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(sum(px for px, _ in group) / len(group), sum(py for _, py in group) / len(group)) for group in groups]


def thinned(points: Sequence[T], most: int = _MOST_POINTS) -> list[T]:
    """At most this many points and the last one."""
    size = math.ceil(len(points) / most) if points else 1
    kept = list(points[::size])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]
