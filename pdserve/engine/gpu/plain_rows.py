"""The decode rows of a step as arrays: read from rows once, then advanced by one token for each following step."""

# Shapes: B rows of a step.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdserve.engine.gpu.tables import TableMirror, Update
from pdserve.engine.interface import NEW_ROW, ContinuedRows, Row


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
