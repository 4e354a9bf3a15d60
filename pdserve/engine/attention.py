"""Attention over the paged pool: the visible positions of each row (once per step), and the computation (once per
layer)."""

# Shapes: B rows, Q query tokens per row, H query heads, K kv heads, G = H / K, D head dim,
#         P blocks per row, C tokens per block, S = P * C positions, R = G * Q queries of one kv head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.host_to_device import to_device
from pdserve.engine.pool import TorchPool

# On a CPU the queries of a long chunk are computed in tiles, each with the keys that any of its queries sees. torch's
# kernel works on 64 queries at a time, and with a mask it would also compute masked positions.
_TILE_QUERIES: Final = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of each row, the gathered positions that any of them sees, and the mask."""

    queries: slice
    keys: slice
    is_seen_BQS: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The blocks that a group of rows reads, and the positions that each query sees."""

    block_BP: Tensor
    tiles: tuple[Tile, ...]
    # For a single row without a window: its number of positions, including the queries. Flash attention then needs no
    # mask.
    chunk_end: int | None = None


def make_context(
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_queries: int,
    window: int | None,
    block_size: int,
    device: torch.device,
) -> Context:
    """The queries of row b are at positions starts[b] .. starts[b] + num_queries - 1, and tables[b] are all its blocks.

    Blocks that lie wholly outside the window are not read. Short rows are padded with one of their own blocks, which is
    masked and has finite values.
    """
    firsts, pages = [], []
    for table, start in zip(tables, starts, strict=True):
        first = 0 if window is None else max(0, start - window + 1) // block_size
        firsts.append(first)
        pages.append(list(table[first : -(-(start + num_queries) // block_size)]))
    num_pages = max(len(page) for page in pages)
    block_BP = to_device([page + page[:1] * (num_pages - len(page)) for page in pages], device)
    first_B1 = to_device(firsts, device)[:, None] * block_size
    key_B1S = (first_B1 + torch.arange(num_pages * block_size, device=device))[:, None]
    query_BQ1 = (to_device(starts, device)[:, None] + torch.arange(num_queries, device=device))[:, :, None]
    is_seen_BQS = key_B1S <= query_BQ1
    if window is not None:
        is_seen_BQS &= key_B1S > query_BQ1 - window
    # In gathered positions: each row's first block begins at 0.
    shifts = [start - first * block_size for start, first in zip(starts, firsts, strict=True)]
    size = _TILE_QUERIES if device.type == "cpu" else num_queries
    tiles = []
    for at in range(0, num_queries, size):
        queries = slice(at, min(at + size, num_queries))
        oldest = 0 if window is None else max(0, min(shifts) + at - window + 1)
        keys = slice(oldest, max(shifts) + queries.stop)
        tiles.append(Tile(queries, keys, is_seen_BQS[:, queries, keys]))
    is_chunk = len(starts) == 1 and window is None and num_queries > 1
    return Context(block_BP, tuple(tiles), starts[0] + num_queries if is_chunk else None)


def attend(
    pool: TorchPool,
    layer: int,
    q_BQHD: Tensor,
    context: Context,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(scale * q k)) v over the context, [B * Q, H * D].

    `scale` None means 1 / sqrt(D). cap(x) is softcap * tanh(x / softcap), or x if softcap is None. The G query heads
    that share a kv head are folded into its query axis, so that no kernel repeats keys and values.
    """
    num_rows, num_queries, num_heads, head_dim = q_BQHD.shape
    k_BKSD, v_BKSD = pool.read(layer, context.block_BP, q_BQHD.dtype)
    if q_BQHD.is_cuda and softcap is None and context.chunk_end is not None:
        return attend_chunk(q_BQHD, k_BKSD, v_BKSD, context.chunk_end, scale)
    num_kv_heads = k_BKSD.shape[1]
    group = num_heads // num_kv_heads
    out_BQHD = torch.empty_like(q_BQHD, memory_format=torch.contiguous_format)
    for tile in context.tiles:
        count, keys = tile.queries.stop - tile.queries.start, tile.keys
        grouped = (num_rows, count, num_kv_heads, group, head_dim)
        q_BKRD = q_BQHD[:, tile.queries].view(grouped).permute(0, 2, 3, 1, 4).flatten(2, 3)
        is_seen_B1RS = tile.is_seen_BQS[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
        out_BKRD = _attend(q_BKRD, k_BKSD[:, :, keys], v_BKSD[:, :, keys], is_seen_B1RS, scale, softcap)
        out_BKGQD = out_BKRD.view(num_rows, num_kv_heads, group, count, head_dim)
        out_BQHD[:, tile.queries].view(grouped).copy_(out_BKGQD.permute(0, 3, 1, 2, 4))
    return out_BQHD.view(num_rows * num_queries, num_heads * head_dim)


def attend_chunk(q_1QHD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, end: int, scale: float | None) -> Tensor:
    """One row's last Q of `end` positions, each seeing all up to itself: [Q, H * D].

    Flash attention supports this causal mask, so a chunk costs only its products and no [Q, S] mask is stored.
    """
    num_queries = q_1QHD.shape[1]
    q_1HQD, k_1KSD, v_1KSD = q_1QHD.transpose(1, 2), k_1KSD[:, :, :end], v_1KSD[:, :, :end]
    if q_1QHD.is_cuda and is_for_flash(q_1QHD):
        return flash_chunk(q_1HQD, k_1KSD, v_1KSD, scale)
    from torch.nn.attention.bias import causal_lower_right  # takes two seconds to import, and is needed for CUDA only

    mask: Any = causal_lower_right(num_queries, end)
    out_1HQD = F.scaled_dot_product_attention(q_1HQD, k_1KSD, v_1KSD, mask, scale=scale, enable_gqa=True)
    return out_1HQD.transpose(1, 2).reshape(num_queries, -1)


def is_for_flash(q: Tensor) -> bool:
    head_dim = q.shape[-1]
    return q.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def flash_chunk(q_1HQD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, scale: float | None) -> Tensor:
    """`attend_chunk` by flash attention and nothing else: [Q, H * D].

    On Hopper torch may prefer cuDNN, which needs 25 to 40 ms of host time to plan each new pair of lengths. The causal
    mask of this operation is aligned to the lower right corner.
    """
    out_1HQD: Tensor
    out_1HQD, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_1HQD, k_1KSD, v_1KSD, 0.0, True, scale=scale)
    return out_1HQD.transpose(1, 2).reshape(q_1HQD.shape[2], -1)


def _attend(
    q_BKRD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, is_seen_B1RS: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(q_BKRD, k_BKSD, v_BKSD, attn_mask=is_seen_B1RS, scale=scale)
    score_BKRS = (q_BKRD @ k_BKSD.mT).float() * (q_BKRD.shape[-1] ** -0.5 if scale is None else scale)
    score_BKRS = (score_BKRS / softcap).tanh() * softcap
    weight_BKRS = score_BKRS.masked_fill(~is_seen_B1RS, -torch.inf).softmax(-1)
    return weight_BKRS.to(v_BKSD.dtype) @ v_BKSD
