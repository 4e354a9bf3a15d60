"""Who computes how much in one decode step; the engine's rows are made when somebody asks for them. Pure.

A simulator never asks: it has no engine, and rows of a long prompt are copies of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from decode_worker.resident import Resident, Stage
from pdserve.core.attempt import AttemptKey
from pdserve.core.effects import StepAccount
from pdserve.engine.interface import Row


@dataclass(kw_only=True)  # no slots: of cached_property
class Step:
    """`decoding` compute one position each, and their drafts where there are any; `reading` so many of a prompt."""

    decoding: list[Resident]
    drafts: list[list[int]] | None  # one list for each of `decoding`
    reading: list[tuple[Resident, int]]
    account: StepAccount
    block_size: int
    follows: list[int | None] | None = None  # for each of `decoding`: whose draw in the step before is its token

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.reading

    def shares(self) -> Iterator[tuple[Resident, int]]:
        """Each sequence and how many of its positions are computed, drafts aside; in the order of `rows`."""
        for resident in self.decoding:
            yield resident, 1
        yield from self.reading

    @property
    def keys(self) -> list[AttemptKey]:
        return [resident.key for resident, _ in self.shares()]

    def rows_again(self) -> list[Row | None]:
        """The rows once every token before them is known, to be computed anew; None for who has left."""
        again: list[Row | None] = []
        for resident, count in self.shares():
            is_here = resident.stage is Stage.RUNNING and bool(resident.blocks)
            again.append(resident.row(count, self.block_size) if is_here else None)
        return again

    @cached_property
    def rows(self) -> list[Row]:
        """For the engine, as of when they are first asked for: before anything else changes."""
        size = self.block_size
        if self.follows is not None:
            rows = [
                resident.row(1, size) if index is None else resident.row_after(index)
                for resident, index in zip(self.decoding, self.follows, strict=True)
            ]
        elif self.drafts is None:
            rows = [resident.row(1, size) for resident in self.decoding]
        else:
            rows = [resident.row(1, size, each) for resident, each in zip(self.decoding, self.drafts, strict=True)]
        rows += [resident.row(count, size) for resident, count in self.reading]
        return rows
