"""min_p, top_k and top_p as one number per row: the least scaled logit that may be sampled."""

# Shapes: B rows, V vocabulary, N the likeliest tokens of a row that are looked at.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pdserve.core.types import Sampling

_TIERS: Final = (256, 4096)  # number of tokens considered first: few rows need more, and sorting all is slow


def is_truncated(sampling: Sampling) -> bool:
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def cutoffs(scaled_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Tokens whose scaled logit (the best of each row is 0) is at least the row's cutoff [B] may be sampled.

    min_p comes first, then top_k, then top_p: each sees the distribution that the one before has left. Equal logits are
    kept or removed together. The number of tokens considered depends only on the row, not on the batch.
    """
    vocab_size = scaled_BV.shape[1]
    floors = [math.log(one.min_p) if one.min_p > 0.0 else -math.inf for one in samplings]
    cutoff_B = torch.tensor(floors, device=scaled_BV.device, dtype=scaled_BV.dtype)
    open_rows = [row for row, one in enumerate(samplings) if one.top_k > 0 or one.top_p < 1.0]
    for size in (*(tier for tier in _TIERS if tier < vocab_size), vocab_size):
        rows = [row for row in open_rows if min(samplings[row].top_k, vocab_size) <= size]
        if not rows:
            continue
        index = torch.tensor(rows, device=scaled_BV.device)
        found_B, is_sure_B = _look(scaled_BV[index], cutoff_B[index], [samplings[row] for row in rows], size)
        cutoff_B[index] = torch.where(is_sure_B, found_B, cutoff_B[index])
        sure = {row for row, is_sure in zip(rows, is_sure_B.tolist(), strict=True) if is_sure}
        open_rows = [row for row in open_rows if row not in sure]
    return cutoff_B


def _look(scaled_BV: Tensor, floor_B: Tensor, samplings: Sequence[Sampling], size: int) -> tuple[Tensor, Tensor]:
    """Cutoffs from the `size` most likely tokens, and whether these were enough."""
    device = scaled_BV.device
    top_k_B1 = torch.tensor([one.top_k for one in samplings], device=device)[:, None]
    top_p_B1 = torch.tensor([one.top_p for one in samplings], device=device, dtype=torch.float64)[:, None]
    value_BN = scaled_BV.topk(size, dim=-1).values
    rank_N = torch.arange(size, device=device)
    is_left_BN = (value_BN >= floor_B[:, None]) & ((rank_N < top_k_B1) | (top_k_B1 == 0))
    weight_BN = value_BN.double().exp() * is_left_BN
    of_all_B1 = (scaled_BV.exp() * (scaled_BV >= floor_B[:, None])).sum(dim=-1, keepdim=True, dtype=torch.float64)
    total_B1 = torch.where(top_k_B1 > 0, weight_BN.sum(dim=-1, keepdim=True), of_all_B1)
    mass_before_BN = weight_BN.cumsum(dim=-1) - weight_BN
    is_kept_BN = is_left_BN & ((mass_before_BN < top_p_B1 * total_B1) | (top_p_B1 >= 1.0))
    num_kept_B = is_kept_BN.sum(dim=-1).clamp(min=1)
    is_sure_B = (num_kept_B < size) | (top_k_B1[:, 0] > 0) | (size == scaled_BV.shape[1])
    return value_BN.gather(1, num_kept_B[:, None] - 1)[:, 0], is_sure_B
