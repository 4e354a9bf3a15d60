"""Percentiles by nearest rank: always one of the values, never interpolated."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value such that at least `share` of all values do not exceed it. `ordered` is sorted and not
    empty."""
    # With the margin, a product such as 0.07 * 100 = 7.000000000000001 counts as seven values, not eight.
    return ordered[min(max(math.ceil(share * len(ordered) - 1e-9) - 1, 0), len(ordered) - 1)]
