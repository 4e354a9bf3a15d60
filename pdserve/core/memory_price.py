"""The longest step with prompt chunks that is worth its KV memory, whatever the latency targets are. Pure.

A step reads the weights once, so longer steps compute more prompt tokens per second. But an answer of n tokens holds
its KV for n steps, and that memory cannot cache prefixes for later requests. Let a step take s seconds, of which w are
for reading the weights, and a share r is for decode rows (work that does not depend on the length of steps). Let decode
rows hold the share h of the memory. The throughput of a worker is proportional to

    (1 - r - w / s) * (1 - h) ** MEMORY_WORTH        with h in proportion to s

It has its maximum where a small increase of s gains as much in the first factor as it loses in the second:

    w / ((1 - r) s - w) = MEMORY_WORTH * h / (1 - h)        (1 - r) s = w * (1 + (1 - h) / (MEMORY_WORTH * h))

If the rows hold a tenth of the memory, a step may take 37 times as long as reading the weights. If they hold half of
it, 5 times. If they hold almost all, a step may take no longer than reading the weights.
"""

from __future__ import annotations

import math
from typing import Final

# The value of a share of the memory, relative to the same share of compute. Let the cache, in proportion to its memory,
# have a share y of the prompt tokens. Compute then serves 1 / (1 - y) times as many prompts, so memory is worth y / (1
# - y). This value is for y = 0.2, which is low for conversations. The measured hit rate cannot replace it: long steps
# reduce the hit rate, and memory would then seem worthless.
MEMORY_WORTH: Final = 0.25


def longest_step_s(weights_s: float, held_share: float) -> float:
    """The longest step that is worth its memory, without the time of decode rows. Decode rows hold `held_share` of the
    memory."""
    if held_share <= 0.0:
        return math.inf
    return weights_s * (1.0 + max(1.0 - held_share, 0.0) / (MEMORY_WORTH * held_share))


def held_share(context_tokens: float, rows: int, num_blocks: int, block_size: int) -> float:
    """Share of a worker's KV memory that its decode rows hold. It includes one free block for the growth of each
    row."""
    return (context_tokens / block_size + rows) / num_blocks
