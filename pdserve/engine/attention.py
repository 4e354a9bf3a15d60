"""Attention over the paged pool: what each row may see (built once per step), and the product (once per layer)."""

# Shapes: B rows, Q query tokens per row, H query heads, K kv heads, G = H / K, D head dim,
#         P blocks per row, C tokens per block, S = P * C positions.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.pool import TorchPool


@dataclass(frozen=True, slots=True)
class Context:
    """The blocks that a group of rows reads, and which of their positions each query sees."""

    block_BP: Tensor
    is_seen_BQS: Tensor


def make_context(
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_queries: int,
    window: int | None,
    block_size: int,
    device: torch.device,
) -> Context:
    """Row b asks with positions starts[b] .. starts[b] + num_queries - 1, and tables[b] are all its blocks.

    Blocks that lie wholly outside the window are not read. Short rows repeat one of their own blocks: it is masked,
    and its values are finite.
    """
    firsts, pages = [], []
    for table, start in zip(tables, starts, strict=True):
        first = 0 if window is None else max(0, start - window + 1) // block_size
        firsts.append(first)
        pages.append(list(table[first : -(-(start + num_queries) // block_size)]))
    num_pages = max(len(page) for page in pages)
    block_BP = torch.tensor([page + page[:1] * (num_pages - len(page)) for page in pages], device=device)
    first_B1 = torch.tensor(firsts, device=device)[:, None] * block_size
    key_B1S = (first_B1 + torch.arange(num_pages * block_size, device=device))[:, None]
    query_BQ1 = (torch.tensor(starts, device=device)[:, None] + torch.arange(num_queries, device=device))[:, :, None]
    is_seen_BQS = key_B1S <= query_BQ1
    if window is not None:
        is_seen_BQS &= key_B1S > query_BQ1 - window
    return Context(block_BP, is_seen_BQS)


def attend(pool: TorchPool, layer: int, q_BQHD: Tensor, context: Context) -> Tensor:
    """softmax(q k / sqrt(D)) v over the context, [B * Q, H * D].

    The G query heads that share a kv head are folded into its query axis, so that keys and values are never
    repeated, whichever kernel torch picks.
    """
    num_rows, num_queries, num_heads, head_dim = q_BQHD.shape
    k_BKSD, v_BKSD = pool.read(layer, context.block_BP)
    num_kv_heads = k_BKSD.shape[1]
    group = num_heads // num_kv_heads
    q_BKGQD = q_BQHD.view(num_rows, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    is_seen_B1GQS = context.is_seen_BQS[:, None, None].expand(-1, -1, group, -1, -1)
    out_BKGQD = F.scaled_dot_product_attention(
        q_BKGQD.flatten(2, 3), k_BKSD, v_BKSD, attn_mask=is_seen_B1GQS.flatten(2, 3)
    ).view(num_rows, num_kv_heads, group, num_queries, head_dim)
    return out_BKGQD.permute(0, 3, 1, 2, 4).reshape(num_rows * num_queries, num_heads * head_dim)
