"""Prepares the rows of a decode step: their tokens, which the previous step may have sampled, and their block tables.
One launch instead of five small ones."""

# Shapes: B rows, S seats, P pages of a table.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 256


@triton.jit
def _prepare(follows, drawn, token_in, seat_of, table, token_out, table_out, num_pages, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if tl.program_id(1) == 0:
        place = tl.load(follows + row)
        known = tl.load(token_in + row)
        tl.store(token_out + row, tl.where(place >= 0, tl.load(drawn + tl.maximum(place, 0)), known))
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(table + tl.load(seat_of + row) * num_pages + page, mask=page < num_pages)
    tl.store(table_out + row.to(tl.int64) * num_pages + page, block, mask=page < num_pages)


def prepare(
    follows_B: Tensor, drawn_B: Tensor, token_B: Tensor, seat_B: Tensor, table_SP: Tensor, out_B: Tensor
) -> Tensor:
    """Writes the tokens into `out_B`, int64 as the others, and returns the tables, int32 [B, P]. `follows_B`: the row
    of `drawn_B` that is a row's token, or -1."""
    num_rows, num_pages = len(token_B), table_SP.shape[1]
    table_BP = torch.empty((num_rows, num_pages), dtype=table_SP.dtype, device=table_SP.device)
    grid = (num_rows, triton.cdiv(num_pages, _BLOCK))
    _prepare[grid](follows_B, drawn_B, token_B, seat_B, table_SP, out_B, table_BP, num_pages, BLOCK=_BLOCK)
    return table_BP
