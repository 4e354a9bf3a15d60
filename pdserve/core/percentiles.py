"""Percentiles by nearest rank: values that occurred, never values between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. `ordered` is sorted and not empty."""
    # The margin keeps a product such as 0.07 * 100 = 7.000000000000001 from counting as more than seven values.
    return ordered[min(max(math.ceil(share * len(ordered) - 1e-9) - 1, 0), len(ordered) - 1)]
