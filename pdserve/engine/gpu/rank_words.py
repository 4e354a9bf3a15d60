"""Encodes the orders for a step of the graph engine to tensor-parallel ranks as numbers. Pure.

The leader manages the block tables of all ranks: changes of the tables are sent, and the fields of each row that the
graph reads. A step has a part for a graph, or a part without a graph, or both in this order.
"""

# Shapes: B rows of a step.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, final

import numpy as np

from pdserve.core.types import Sampling
from pdserve.engine import row_words as words_of_rows
from pdserve.engine.gpu.plain_rows import PlainRows
from pdserve.engine.gpu.tables import Update
from pdserve.engine.interface import Row

ROWS: Final = 0  # first number of a part: rows without a graph
PLAIN: Final = 1
DRAFTED: Final = 2
_DRAWS: Final = Sampling(temperature=0.0, max_tokens=1)  # the leader samples
Words = Sequence[int] | np.ndarray[Any, Any]
_READ: Final = ("token_B", "follows_B", "seq_slot_B", "start_B", "block_B")  # of PlainRows, by the graph


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """Exactly one of `rows`, `plain` and `drafted` is set."""

    rows: Sequence[Row] = ()
    plain: PlainRows | None = None
    drafted: Sequence[Row] = ()
    update: Update = field(default_factory=lambda: Update([], [], []))


@final
class LastBlocks(Sequence[int]):
    """The blocks of a sequence from number `first` on; earlier ones are unknown."""

    def __init__(self, first: int, blocks: Sequence[int]) -> None:
        self._first, self._blocks = first, blocks

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # callers pass numbers only
        if index < self._first:
            raise IndexError(index)
        return self._blocks[index - self._first]

    def __len__(self) -> int:
        return self._first + len(self._blocks)


def row_words(rows: Sequence[Row]) -> list[int]:
    return [ROWS, *words_of_rows.to_words(rows)]


def plain_words(plain: PlainRows, update: Update) -> Words:
    head = np.array([PLAIN, len(plain.seq_slot_B), len(update.at), *update.at, *update.block], np.int64)
    return np.concatenate([head, *(getattr(plain, name) for name in _READ)])


def drafted_words(rows: Sequence[Row], update: Update, block_size: int) -> list[int]:
    words = [DRAFTED, len(rows), len(update.at), *update.at, *update.block, *update.seq_slots]
    for row in rows:
        first = row.start // block_size
        num_blocks = (row.start + row.num_queries - 1) // block_size + 1 - first
        words += (row.start, row.tokens[0], num_blocks, len(row.drafts))
        words += (row.blocks[first + index] for index in range(num_blocks))
        words += row.drafts
    return words


def from_words(words: Words, block_size: int) -> FollowedStep:
    """The arguments of the functions above, as far as a rank needs them."""
    left = iter(words)
    kind = next(left)
    if kind == ROWS:
        return FollowedStep(rows=words_of_rows.from_words(list(left)))
    num_rows, num_changes = islice(left, 2)
    at, block = _take(left, num_changes), _take(left, num_changes)
    if kind == PLAIN:
        arrays = {name: np.array(_take(left, num_rows), np.int64) for name in _READ}
        plain = PlainRows(number=0, prompt_len_B=np.zeros(num_rows, np.int64), tables=[], **arrays)
        return FollowedStep(plain=plain, update=Update([], at, block))
    seq_slots = _take(left, num_rows)
    drafted = []
    for _ in range(num_rows):
        start, token, num_blocks, num_drafts = islice(left, 4)
        blocks = LastBlocks(start // block_size, _take(left, num_blocks))
        drafts = _take(left, num_drafts)
        drafted.append(Row(tokens=(token,), start=start, blocks=blocks, sample=_DRAWS, drafts=drafts))
    return FollowedStep(drafted=drafted, update=Update(seq_slots, at, block))


def _take(left: Iterator[int], count: int) -> list[int]:
    return list(islice(left, count))
