"""Prepares the rows of a decode step: their tokens, which the previous step may have sampled, their block tables, and
the division of their tiles among attention's programs (work.py). One launch instead of six small ones."""

# Shapes: B rows, S sequence slots, P pages of a table.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.gpu.work import Division, split_part

_BLOCK: Final = 256


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _prepare(
    follows,
    sampled,
    token_in,
    seq_slot_of,
    table,
    token_out,
    table_out,
    work,
    start_of,
    length_of,
    num_pages,
    num_rows,
    num_programs,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= num_rows:  # the programs after those of the rows
        if tl.program_id(1) == 0:
            split_part(
                row - num_rows,
                work,
                start_of,
                length_of,
                num_rows,
                num_programs,
                WINDOW,
                TILE,
                LEAST,
                HEAD,
                ROWS,
                PROGRAMS,
            )
        return
    if tl.program_id(1) == 0:
        place = tl.load(follows + row)
        known = tl.load(token_in + row)
        tl.store(token_out + row, tl.where(place >= 0, tl.load(sampled + tl.maximum(place, 0)), known))
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(table + tl.load(seq_slot_of + row) * num_pages + page, mask=page < num_pages)
    tl.store(table_out + row.to(tl.int64) * num_pages + page, block, mask=page < num_pages)


def prepare(
    follows_B: Tensor,
    sampled_B: Tensor,
    token_B: Tensor,
    seq_slot_B: Tensor,
    table_SP: Tensor,
    out_B: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    division: Division,
) -> tuple[Tensor, Tensor]:
    """Writes the tokens into `out_B`, int64 as the others, and returns the tables, int32 [B, P], and `split`'s result.

    `follows_B`: the row of `sampled_B` that is a row's token, or -1.
    """
    num_rows, num_pages = len(token_B), table_SP.shape[1]
    table_BP = torch.empty((num_rows, num_pages), dtype=table_SP.dtype, device=table_SP.device)
    work = division.new_work(start_B)
    grid = (num_rows + division.num_parts, triton.cdiv(num_pages, _BLOCK))
    _prepare[grid](
        follows_B,
        sampled_B,
        token_B,
        seq_slot_B,
        table_SP,
        out_B,
        table_BP,
        work,
        start_B,
        length_B,
        num_pages,
        num_rows,
        division.num_programs,
        BLOCK=_BLOCK,
        **division.constants,
    )
    return table_BP, work
