"""Steps that compile every kernel which an engine without graphs launches. Pure.

A kernel that a GPU meets for the first time is compiled while requests wait, for a second or more. Which one a step
takes depends on its rows in one way: whether a row brings one token, up to sixteen, or a longer chunk. These steps have
each of them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pdserve.core.types import Sampling
from pdserve.engine.interface import EngineSpec, Row

CHUNK: Final = 48  # tokens that no kernel for few queries takes
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
