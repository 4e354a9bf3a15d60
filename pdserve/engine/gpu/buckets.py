"""For which numbers of rows a graph is captured, and which one a step takes. Pure.

Matrix products with up to some hundred rows take nearly the time of one, so padding costs little; each graph costs
capture time and some memory. Steps of 16 and more keep the padding under a fifth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def buckets_for(most_rows: int) -> tuple[int, ...]:
    """Ascending, the last one holding `most_rows`."""
    smaller = [size for size in SIZES if size < most_rows]
    return (*smaller, most_rows)


def verified_tokens(most_rows: int, most_queries: int) -> int:
    """Most tokens of a step with drafts that takes a graph: all rows may have some, but no step is made larger than the
    largest bucket for it, as its logits take memory."""
    return max(most_rows, min(SIZES[-1], most_rows * most_queries))


def choose(buckets: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket that holds the rows; None where none does."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None
