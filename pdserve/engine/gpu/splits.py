"""Into how many parts the positions of a row are dealt when few rows must fill a whole device. Pure.

The number is fixed when a graph is captured and depends on nothing that changes between replays. A row takes as many
parts as its length is worth; programs that find no part return at once.
"""

from __future__ import annotations

from typing import Final

MOST_SPLITS: Final = 64  # the second kernel holds all parts of a token and head at once
LEAST_POSITIONS: Final = 128  # of a part: below, its start and the merge cost more than they gain
_WAVES: Final = 2  # programs for each multiprocessor, so that uneven rows level out


def num_splits(num_rows: int, num_kv_heads: int, num_processors: int, max_context_tokens: int) -> int:
    """A power of two. With a fixed `num_rows` for all batches the results do not depend on company."""
    wanted = _WAVES * num_processors / max(1, num_rows * num_kv_heads)
    useful = max_context_tokens / LEAST_POSITIONS
    splits = 1
    while splits * 2 <= min(wanted, useful, MOST_SPLITS):
        splits *= 2
    return splits
