"""Checks the rows of a step before any KV is written. Pure.

A wrong row is our own fault (the worker's bookkeeping), so it is an InternalError that says which row and what,
raised while every block still holds what it held: a refused step can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.core.errors import InternalError
from pdserve.engine.interface import EngineSpec, Row


def check_rows(spec: EngineSpec, rows: Sequence[Row]) -> None:
    """Raises InternalError unless every row can be computed and no two rows write the same block."""
    writers: dict[int, int] = {}
    for index, row in enumerate(rows):
        end = row.start + row.num_queries
        _require(index, len(row.tokens) > 0, "it has no tokens")
        _require(index, row.start >= 0, f"it starts at {row.start}")
        _require(
            index, end <= spec.max_context_tokens, f"it ends at {end}, the context limit is {spec.max_context_tokens}"
        )
        num_needed = -(-end // spec.block_size)
        _require(index, len(row.blocks) >= num_needed, f"{len(row.blocks)} blocks cannot hold {end} tokens")
        held = row.blocks[:num_needed]
        in_range = min(held) >= 0 and max(held) < spec.num_blocks
        _require(index, in_range, f"a block lies outside the pool of {spec.num_blocks}")
        _require(index, len(set(held)) == num_needed, "a block appears twice")
        given = (row.tokens, row.drafts, row.targets)
        in_vocab = all(min(ids) >= 0 and max(ids) < spec.vocab_size for ids in given if ids)
        _require(index, in_vocab, f"a token id lies outside the vocabulary of {spec.vocab_size}")
        num_targets = len(row.targets)
        _require(index, num_targets <= len(row.tokens), f"{num_targets} targets for {len(row.tokens)} tokens")
        if row.sample is not None:
            known = row.start + len(row.tokens)
            _require(index, len(row.history) == known, f"its history has {len(row.history)} tokens, not {known}")
            _require(index, 0 <= row.prompt_len <= known, f"its prompt_len is {row.prompt_len}")
        else:
            _require(index, not row.drafts, "it has drafts and does not sample")
        for block in held[row.start // spec.block_size :]:
            _require(index, block not in writers, f"block {block} is also written by row {writers.get(block)}")
            writers[block] = index


def _require(index: int, holds: bool, problem: str) -> None:
    if not holds:
        raise InternalError(f"row {index} cannot be computed: {problem}")
