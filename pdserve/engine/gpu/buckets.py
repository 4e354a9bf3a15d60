"""The numbers of rows for which graphs are captured, and the graph of a step. Pure.

A matrix product of up to some hundred rows takes little longer than that of one row, so padding is cheap, but each
graph costs capture time and memory. From 16 rows on, the buckets keep padding under a fifth.
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
    """The maximum number of tokens of a step with drafts that uses a graph. It is not larger than the largest bucket of
    rows, because logits take memory."""
    return max(most_rows, min(SIZES[-1], most_rows * most_queries))


def choose(buckets: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket for the rows; None if there is none."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None
