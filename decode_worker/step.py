"""The work of one decode step; the engine's rows are created on demand. Pure.

The simulator never creates rows: it has no engine, and rows of a long prompt copy its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from decode_worker.decode_sequence import DecodeSequence, Stage
from pdserve.core.attempt import AttemptKey
from pdserve.core.effects import StepAccount
from pdserve.engine.interface import NEW_ROW, PENDING, ChainedRows, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """How the rows of a plain decode step continue those of step number `before`; see ChainedRows."""

    before: int
    places: Sequence[int]  # for each of `decoding`
    starts: Sequence[int]  # the position that each of `decoding` computes
    is_ahead: bool


@final
class KnownRows(Mapping[int, Row]):
    """Rows by number, built when they are read: an engine that keeps the cursors of their grammars reads none."""

    def __init__(self, residents: dict[int, DecodeSequence], block_size: int) -> None:
        self._residents, self._block_size = residents, block_size

    def __getitem__(self, index: int) -> Row:
        return self._residents[index].row(1, self._block_size)

    def __contains__(self, index: object) -> bool:
        return index in self._residents

    def __iter__(self) -> Iterator[int]:
        return iter(self._residents)

    def __len__(self) -> int:
        return len(self._residents)


@dataclass(kw_only=True)  # no slots, because of cached_property
class Step:
    """`decoding` compute one position each, and their drafts if any; `reading` compute a number of prompt positions."""

    decoding: list[DecodeSequence]
    drafts: list[list[int]] | None  # one list for each of `decoding`
    prefilling: list[tuple[DecodeSequence, int]]
    account: StepAccount
    block_size: int
    number: int
    chain: Chain | None = None

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.prefilling

    @property
    def is_plain(self) -> bool:
        """Whether it has only decode rows of one token each."""
        return bool(self.decoding) and not self.prefilling and self.drafts is None

    def shares(self) -> Iterator[tuple[DecodeSequence, int]]:
        """Each sequence and the number of its computed positions, without drafts; in the order of `rows`."""
        for resident in self.decoding:
            yield resident, 1
        yield from self.prefilling

    @property
    def keys(self) -> list[AttemptKey]:
        return [resident.key for resident, _ in self.shares()]

    def rows_again(self) -> list[Row | None]:
        """The rows after all earlier tokens are known, to be computed again; None for ended sequences."""
        again: list[Row | None] = []
        for resident, count in self.shares():
            is_here = resident.stage is Stage.RUNNING and bool(resident.blocks)
            again.append(resident.row(count, self.block_size) if is_here else None)
        return again

    def known_rows(self, indexes: Iterable[int]) -> KnownRows:
        """Those of `decoding` at `indexes`, in a step ahead after the previous step was read: their histories contain
        the tokens that were pending. Ended sequences are missing."""
        assert self.chain is not None
        starts, known = self.chain.starts, dict[int, DecodeSequence]()
        for index in indexes:
            resident, start = self.decoding[index], starts[index]
            is_here = resident.stage is Stage.RUNNING and resident.blocks
            if is_here and resident.computed == start == len(resident.tokens) - 1:
                known[index] = resident
        return KnownRows(known, self.block_size)

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The engine's rows, as of the first access, which must come before any change."""
        size = self.block_size
        if self.chain is not None:
            chain = self.chain
            return ChainedRows(
                self._chained, chain.places, number=self.number, before=chain.before, is_ahead=chain.is_ahead
            )
        if self.drafts is None:
            rows = [resident.row(1, size) for resident in self.decoding]
        else:
            rows = [resident.row(1, size, each) for resident, each in zip(self.decoding, self.drafts, strict=True)]
        rows += [resident.row(count, size) for resident, count in self.prefilling]
        return rows

    def _chained(self, index: int) -> Row:
        assert self.chain is not None
        resident, start, place = self.decoding[index], self.chain.starts[index], self.chain.places[index]
        is_pending = self.chain.is_ahead and place != NEW_ROW
        return Row(
            tokens=(PENDING,) if is_pending else resident.tokens[start : start + 1],
            start=start,
            blocks=resident.blocks,
            sample=resident.attempt.sampling,
            history=resident.tokens,
            prompt_len=resident.prompt_len,
            follows=place if is_pending else None,
        )


def places_in(step: Step | None, decoding: Sequence[DecodeSequence]) -> Sequence[int]:
    """For each of `decoding`, its place among the decode rows of `step`, or NEW_ROW."""
    if step is None:
        return [NEW_ROW] * len(decoding)
    if decoding == step.decoding:  # the usual case in a steady batch
        return range(len(decoding))
    place_of = {resident: place for place, resident in enumerate(step.decoding)}
    return [place_of.get(resident, NEW_ROW) for resident in decoding]
