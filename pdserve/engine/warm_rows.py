"""Steps that launch, and so compile, every kernel of an engine without graphs. Pure.

A kernel is compiled at its first launch, for a second or more, while requests wait. Which kernel a step uses depends
only on whether a row has one token, up to sixteen, or a longer chunk. These steps contain each case once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pdserve.core.types import Sampling
from pdserve.engine.interface import EngineSpec, Row

CHUNK: Final = 48  # more tokens than a kernel for few queries accepts
_GREEDY: Final = Sampling(temperature=0.0)


def warm_rows(spec: EngineSpec) -> Iterator[list[Row]]:
    """Each step overwrites the pool's first blocks, so they come before the first request."""
    limit = min(spec.max_context_tokens, spec.num_blocks * spec.block_size)
    end = min(limit, CHUNK)
    for count in (1, 2, CHUNK):
        if end >= count:
            yield [_row(spec, count, end)]


def _row(spec: EngineSpec, count: int, end: int) -> Row:
    token = 1 % spec.vocab_size
    return Row(
        tokens=[token] * count,
        start=end - count,
        blocks=list(range(-(-end // spec.block_size))),
        sample=_GREEDY,
        history=[token] * end,
        prompt_len=end,
    )
