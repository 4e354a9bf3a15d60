"""The value of KV memory, and the longest step with prompt chunks that is worth it, independent of the targets. Pure.

A step reads the weights once, so longer steps compute more prompt tokens per second. But an answer of n tokens holds
its KV for n steps, and held memory cannot keep prefixes for later requests. Let steps take s seconds, w of them for the
weights, and the share r for decode rows (work that does not depend on the length of steps). Let decode rows hold the
share h of the memory. The throughput of a worker is in proportion to

    (1 - r - w / s) * (1 - h) ** MEMORY_WORTH        with h in proportion to s

which is largest where a small increase of s gains as much by the first factor as it loses by the second:

    w / ((1 - r) s - w) = MEMORY_WORTH * h / (1 - h)        (1 - r) s = w * (1 + (1 - h) / (MEMORY_WORTH * h))

If the rows hold a tenth of the memory, steps may take 37 times the time of reading the weights; if they hold half of
it, 5 times; if they hold almost all, no longer than reading the weights.
"""

from __future__ import annotations

import math
from typing import Final

# The value of a share of the memory relative to the same share of compute. Let the share y of prompt tokens be found in
# the cache, in proportion to its memory. Compute then serves 1 / (1 - y) times as many prompts, so memory is worth y /
# (1 - y). This is for y = 0.2, a low value for conversations. The recent hit rate is no substitute: long steps reduce
# it, and memory would seem worthless exactly then.
MEMORY_WORTH: Final = 0.25


def longest_step_s(weights_s: float, held_share: float) -> float:
    """The longest step that is worth its memory, without the time of decode rows; `held_share` is held by decode
    rows."""
    if held_share <= 0.0:
        return math.inf
    return weights_s * (1.0 + max(1.0 - held_share, 0.0) / (MEMORY_WORTH * held_share))


def held_share(context_tokens: float, rows: int, num_blocks: int, block_size: int) -> float:
    """Share of a worker's KV memory that its decode rows hold, including the block that is kept free for each to
    grow."""
    return (context_tokens / block_size + rows) / num_blocks
