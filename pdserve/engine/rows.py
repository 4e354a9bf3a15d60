"""Checks the rows of a step before any KV is written, encodes them for follower ranks, and makes rows that compile
every kernel at the start. Pure.

An invalid row is an error in the worker's bookkeeping, so it raises an InternalError that names the row and the error.
No block was changed before, so a rejected step can be repeated.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Final, final

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.interface import EngineSpec, Row


def check_rows(
    spec: EngineSpec, rows: Sequence[Row], tables: CheckedTables | None = None, adapters: Container[str] = ()
) -> None:
    """Raises InternalError unless every row can be computed and no two rows write the same block.

    `tables`: lists of blocks that earlier steps have checked, which are not checked again. `adapters`: fingerprints of
    the loaded ones.
    """
    writers: dict[int, int] = {}
    size, limit, vocab_size = spec.block_size, spec.max_context_tokens, spec.vocab_size
    for index, row in enumerate(rows):
        start, tokens, blocks, drafts = row.start, row.tokens, row.blocks, row.drafts
        count = len(tokens)
        if not count:
            raise _wrong(index, "it has no tokens")
        if start < 0:
            raise _wrong(index, f"it starts at {start}")
        end = start + count + len(drafts)
        if end > limit:
            raise _wrong(index, f"it ends at {end}, the context limit is {limit}")
        num_needed = -(-end // size)
        if len(blocks) < num_needed:
            raise _wrong(index, f"{len(blocks)} blocks cannot hold {end} tokens")
        if tables is None or not tables.has(blocks, num_needed):
            _check_table(spec, index, blocks[:num_needed])
            if tables is not None:
                tables.add(blocks, num_needed)
        for ids in (tokens, drafts, row.targets):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                raise _wrong(index, f"a token id lies outside the vocabulary of {vocab_size}")
        if row.adapter and row.adapter not in adapters:
            raise _wrong(index, f"its adapter {row.adapter} is not loaded")
        if len(row.targets) > count:
            raise _wrong(index, f"{len(row.targets)} targets for {count} tokens")
        if row.sample is not None:
            known = start + count
            if len(row.history) != known:
                raise _wrong(index, f"its history has {len(row.history)} tokens, not {known}")
            if not 0 <= row.prompt_len <= known:
                raise _wrong(index, f"its prompt_len is {row.prompt_len}")
        elif drafts:
            raise _wrong(index, "it has drafts and does not sample")
        for place in range(start // size, num_needed):
            block = blocks[place]
            if block in writers:
                raise _wrong(index, f"block {block} is also written by row {writers[block]}")
            writers[block] = index


@final
class CheckedTables:
    """Lists of blocks that were checked, by identity. Blocks are only appended to a list. A list is checked again, as a
    whole, whenever more of it is needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._checked: dict[int, tuple[Sequence[int], int]] = {}

    def has(self, blocks: Sequence[int], num_needed: int) -> bool:
        known = self._checked.get(id(blocks))
        return known is not None and known[1] == num_needed

    def add(self, blocks: Sequence[int], num_needed: int) -> None:
        if len(self._checked) >= self._most:
            self._checked.clear()
        self._checked[id(blocks)] = blocks, num_needed  # kept so that its identity is not reused


def _check_table(spec: EngineSpec, index: int, held: Sequence[int]) -> None:
    if min(held) < 0 or max(held) >= spec.num_blocks:
        raise _wrong(index, f"a block lies outside the pool of {spec.num_blocks}")
    if len(set(held)) != len(held):
        raise _wrong(index, "a block appears twice")


def _wrong(index: int, problem: str) -> InternalError:
    return InternalError(f"row {index} cannot be computed: {problem}")


# --- rows as numbers, for follower ranks ----------------------------------------------------------------------
# Histories, sampling and grammars are needed only by the leader and not sent. Each row carries whether it samples.

_FIELDS: Final = 7
_DRAWS: Final = Sampling(temperature=0.0, max_tokens=1)


def to_words(rows: Sequence[Row]) -> list[int]:
    words: list[int] = []
    for row in rows:
        lists = (row.tokens, row.blocks, row.drafts, row.targets)
        words += (*map(len, lists), row.start, row.num_top, row.sample is not None)
        for one in lists:
            words += one
    return words


def from_words(words: Sequence[int]) -> list[Row]:
    """Rows that compute the same states and logits as the rows passed to `to_words`."""
    rows: list[Row] = []
    left = iter(words)
    while fields := list(islice(left, _FIELDS)):
        tokens, blocks, drafts, targets = (_take(left, count) for count in fields[:4])
        start, num_top, is_drawing = fields[4:]
        rows.append(
            Row(
                tokens=tokens,
                start=start,
                blocks=blocks,
                sample=_DRAWS if is_drawing else None,
                drafts=drafts,
                targets=targets,
                num_top=num_top,
            )
        )
    return rows


def _take(left: Iterator[int], count: int) -> list[int]:
    return list(islice(left, count))


# --- rows that compile every kernel ---------------------------------------------------------------------------
# An engine without graphs compiles a kernel at its first launch, for a second or more, while requests wait. Which
# kernel a step uses depends only on whether a row has one token, up to sixteen, or a longer chunk. These steps contain
# each case once.

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
