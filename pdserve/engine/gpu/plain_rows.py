"""The decode rows of a step: as arrays, read from rows once, then advanced by one token for each following step; and as
numbers, the orders to the other ranks; with the block tables on the device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, final

import numpy as np

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine import rows as words_of_rows
from pdserve.engine.interface import NEW_ROW, ContinuedRows, Row

# --- tables ---------------------------------------------------------------------------------------------------
# Block tables on the device: the row of each sequence, and the changes since the last step.
#
# A sequence is identified by its list of blocks. Blocks are only appended to a list, so only the new ones are sent. A
# copy of each list is compared with it at every step; a list that was changed otherwise is sent whole.


@dataclass(slots=True)
class _SeqSlot:
    blocks: Sequence[int]  # the caller's list, kept so that its identity is not another's
    sent: list[int]
    step: int  # step at which it was last used


@dataclass(frozen=True, slots=True)
class Update:
    """`seq_slots[i]` is the table row of the step's row i; entry `at[j]` of the flat table becomes `block[j]`."""

    seq_slots: list[int]
    at: list[int]
    block: list[int]


@final
class TableMirror:
    def __init__(self, num_seq_slots: int, num_pages: int) -> None:
        self._num_pages = num_pages
        self._seq_slots: dict[int, _SeqSlot] = {}
        self._seq_slot_of: dict[int, int] = {}  # by identity of the list
        self._free = list(range(num_seq_slots - 1, -1, -1))
        self._step = 0
        self._is_kept_S = np.zeros(num_seq_slots, bool)  # in this step, without comparing its table

    def update(self, tables: Sequence[Sequence[int]], kept_R: Any | None = None) -> Update:
        """Assigns sequence slots to the tables of a step's rows.

        A slot is freed only when another row needs it. A running step may still read it; the changes for this step
        come later on the same stream.

        `kept_R`: sequence slots of further rows of the step, whose tables have not changed since the previous step.
        """
        self._step += 1
        self._is_kept_S[:] = False
        if kept_R is not None:
            self._is_kept_S[kept_R] = True
        seq_slots = [self._seq_slot(table) for table in tables]
        if len(set(seq_slots)) != len(seq_slots) or self._is_kept_S[seq_slots].any():
            raise InternalError("two rows of a step share a list of blocks")
        at: list[int] = []
        block: list[int] = []
        for number, table in zip(seq_slots, tables, strict=True):
            seq_slot = self._seq_slots[number]
            num_sent = len(seq_slot.sent)
            if len(table) == num_sent and table == seq_slot.sent:  # the usual case
                continue
            if len(table) > self._num_pages:
                raise InternalError(f"{len(table)} blocks, a table has {self._num_pages}")
            if table[:num_sent] != seq_slot.sent:
                num_sent = 0
                seq_slot.sent = []
            if len(table) > num_sent:
                fresh = table[num_sent:]
                first = number * self._num_pages + num_sent
                at += range(first, first + len(fresh))
                block += fresh
                seq_slot.sent += fresh
        return Update(seq_slots, at, block)

    def _seq_slot(self, table: Sequence[int]) -> int:
        number = self._seq_slot_of.get(id(table))
        if number is None:
            if not self._free:
                self._give_up_oldest()
            number = self._free.pop()
            self._seq_slot_of[id(table)] = number
            self._seq_slots[number] = _SeqSlot(table, [], self._step)
        self._seq_slots[number].step = self._step
        return number

    def _give_up_oldest(self) -> None:
        """Frees all sequence slots that this step does not use; their sequences have most likely ended."""
        for number, seq_slot in list(self._seq_slots.items()):
            if seq_slot.step < self._step and not self._is_kept_S[number]:
                del self._seq_slots[number], self._seq_slot_of[id(seq_slot.blocks)]
                self._free.append(number)
        if not self._free:
            raise InternalError(f"more rows than the {len(self._seq_slots)} sequence slots of the block tables")


# --- plain rows -----------------------------------------------------------------------------------------------

# Shapes: B rows of a step.


@dataclass(slots=True, kw_only=True)
class PlainRows:
    """Rows of one token each, int64 [B] each. `number` is that of their step, 0 if the step cannot be continued."""

    number: int
    token_B: Any  # 0 if the previous step samples it
    follows_B: Any  # the row of the previous step that samples the token, or NEW_ROW
    seq_slot_B: Any
    start_B: Any
    block_B: Any  # position that is computed
    prompt_len_B: Any
    tables: list[Sequence[int]]


def no_rows() -> PlainRows:
    """Arrays of a step with padding only."""
    names = ("token_B", "follows_B", "seq_slot_B", "start_B", "block_B", "prompt_len_B")
    return PlainRows(number=0, tables=[], **{name: np.zeros(0, np.int64) for name in names})


def read(rows: Sequence[Row], mirror: TableMirror, block_size: int, number: int) -> tuple[PlainRows, Update]:
    update = mirror.update([row.blocks for row in rows])
    plain = PlainRows(
        number=number,
        token_B=np.maximum(np.array([row.tokens[0] for row in rows], np.int64), 0),
        follows_B=np.array([NEW_ROW if row.follows is None else row.follows for row in rows], np.int64),
        seq_slot_B=np.array(update.seq_slots, np.int64),
        start_B=np.array([row.start for row in rows], np.int64),
        block_B=np.array([row.blocks[row.start // block_size] for row in rows], np.int64),
        prompt_len_B=np.array([row.prompt_len for row in rows], np.int64),
        tables=[row.blocks for row in rows],
    )
    return plain, update


def follow(
    last: PlainRows, rows: ContinuedRows, new: dict[int, Row], mirror: TableMirror, block_size: int
) -> tuple[PlainRows, Update]:
    """Arrays of `rows`, which continue `last`; `new`: rows that do not, by index. Other rows are read only if they
    begin a new block."""
    place_B = np.array(rows.places, np.int64)
    from_B = np.maximum(place_B, 0)
    plain = PlainRows(
        number=rows.number,
        token_B=np.zeros(len(rows), np.int64),
        follows_B=place_B,
        seq_slot_B=last.seq_slot_B[from_B],
        start_B=last.start_B[from_B] + 1,
        block_B=last.block_B[from_B],
        prompt_len_B=last.prompt_len_B[from_B],
        tables=[last.tables[place] for place in rows.places],
    )
    for index, row in new.items():
        plain.token_B[index], plain.start_B[index], plain.prompt_len_B[index] = row.tokens[0], row.start, row.prompt_len
        plain.tables[index] = row.blocks
    is_touched_B = (plain.start_B % block_size == 0) | (place_B == NEW_ROW)
    touched = np.flatnonzero(is_touched_B).tolist()
    update = mirror.update([plain.tables[index] for index in touched], plain.seq_slot_B[~is_touched_B])
    for index, seq_slot in zip(touched, update.seq_slots, strict=True):
        plain.seq_slot_B[index] = seq_slot
        plain.block_B[index] = plain.tables[index][int(plain.start_B[index]) // block_size]
    return plain, update


# --- orders to tensor-parallel ranks --------------------------------------------------------------------------
# The leader manages the block tables of all ranks: changes of the tables are sent, and the fields of each row that the
# graph reads. A step has a part for a graph, or a part without a graph, or both in this order.

# Shapes: B rows of a step.

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
