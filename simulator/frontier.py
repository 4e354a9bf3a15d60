"""The attainment frontier: which pairs of targets a set of requests met. Pure.

A pair of a TTFT and a TPOT target is attained if at least `share` of all requests met both. Requests without an answer
are misses of every pair.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable


def frontier(times: Iterable[tuple[float, float]], total: int, share: float) -> list[tuple[float, float]]:
    """The tightest attained pairs (TTFT, TPOT), TTFT ascending and TPOT descending; empty if too few were answered.
    `times`: TTFT and TPOT of each answered request, of `total` requests."""
    needed = max(1, math.ceil(share * total - 1e-9))
    kept: list[float] = []  # the `needed` lowest TPOTs so far, negated
    found: list[tuple[float, float]] = []
    for ttft_s, tpot_s in sorted(times):
        if len(kept) < needed:
            heapq.heappush(kept, -tpot_s)
        else:
            heapq.heappushpop(kept, -tpot_s)
        if len(kept) == needed and (not found or -kept[0] < found[-1][1]):
            if found and found[-1][0] == ttft_s:
                found.pop()
            found.append((ttft_s, -kept[0]))
    return found


def staircase(corners: list[tuple[float, float]], most_x: float, most_y: float) -> list[tuple[float, float]]:
    """The points of the line between attained and missed pairs, up to the ends of the axes."""
    if not corners:
        return []
    points = [(corners[0][0], most_y)]
    for ttft_s, tpot_s in corners:
        points += [(ttft_s, points[-1][1]), (ttft_s, tpot_s)]
    return [*points, (most_x, points[-1][1])]
