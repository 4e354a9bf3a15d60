"""What KV memory is worth, and so how long a step that reads prompts may be, whatever was promised. Pure.

A step pays for the reading of the weights once, so longer steps read more prompt tokens a second. But an answer of n
tokens holds its KV for n steps: KV held is tokens x seconds, and what is held keeps no prefixes for those who come. Let
steps take s seconds, w of them for the weights and the share r for decode rows (work that stays the same however it
is cut into steps), and let who answers hold the share h of the memory. A worker serves in proportion to

    (1 - r - w / s) * (1 - h) ** MEMORY_WORTH        with h in proportion to s

which is largest where a little more of s gains as much by its first part as it loses by its second:

    w / ((1 - r) s - w) = MEMORY_WORTH * h / (1 - h)        (1 - r) s = w * (1 + (1 - h) / (MEMORY_WORTH * h))

Beside rows that hold a tenth of the memory steps may be 37 times the weights' time, with half of it 5 times, and
where there is hardly any left no longer than that.
"""

from __future__ import annotations

import math
from typing import Final

# A share of the memory is worth so much of the same share of the computing. Let the share y of prompts be found in the
# cache, in proportion to the memory that it has: computing serves 1 / (1 - y) times as many prompts, so memory is worth
# y / (1 - y). This is y = a fifth, a low figure for conversations. What is found of late is no measure: where steps are
# long little is found, and memory would look worthless just there.
MEMORY_WORTH: Final = 0.25


def longest_step_s(weights_s: float, held_share: float) -> float:
    """The longest step that is worth the memory it holds, decode rows' time aside; `held_share` by decode rows."""
    if held_share <= 0.0:
        return math.inf
    return weights_s * (1.0 + max(1.0 - held_share, 0.0) / (MEMORY_WORTH * held_share))


def held_share(context_tokens: float, rows: int, num_blocks: int, block_size: int) -> float:
    """Of a worker's KV memory: what its decode rows hold, and the block that is kept free for each of them to grow."""
    return (context_tokens / block_size + rows) / num_blocks
