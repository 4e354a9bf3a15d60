"""Attention over scattered blocks equals the formula in float64 on the keys and values laid out in a row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import attend, make_context
from pdserve.engine.pool import TorchPool

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def filled_pool(*, num_kv_heads: int, head_dim: int, lengths: Sequence[int]) -> tuple[TorchPool, list[list[int]]]:
    """A pool whose unused memory is NaN-free but wild, and a scattered table per row."""
    tables, numbers = [], iter(random.Random(0).sample(range(200), 200))
    for length in lengths:
        tables.append([next(numbers) for _ in range(-(-length // BLOCK_SIZE))])
    pool = TorchPool(
        num_blocks=200,
        num_layers=2,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=CPU,
        dtype=torch.float32,
    )
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)) * 3)
    return pool, tables


def expected(
    pool: TorchPool, table: Sequence[int], q_QHD: Tensor, start: int, window: int | None, scale: float, softcap: float
) -> Tensor:
    """[Q, H * D] in float64; softcap 0 is none."""
    num_queries, num_heads, _ = q_QHD.shape
    kv_2SKD = torch.cat([pool.tensor[block, 1] for block in table], dim=1)[:, : start + num_queries].double()
    k_SHD, v_SHD = kv_2SKD.repeat_interleave(num_heads // kv_2SKD.shape[2], dim=2)
    score_HQS = torch.einsum("qhd,shd->hqs", q_QHD.double(), k_SHD) * scale
    if softcap:
        score_HQS = (score_HQS / softcap).tanh() * softcap
    query_Q1, key_S = torch.arange(start, start + num_queries)[:, None], torch.arange(start + num_queries)
    is_seen_QS = (key_S <= query_Q1) & (key_S > query_Q1 - (window or 10**9))
    weight_HQS = score_HQS.masked_fill(~is_seen_QS, -torch.inf).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weight_HQS, v_SHD).flatten(1)


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(("scale", "softcap"), [(None, None), (0.3, None), (0.2, 5.0), (None, 30.0)])
def test_scale_softcap_and_window_follow_the_formula(
    window: int | None, scale: float | None, softcap: float | None
) -> None:
    lengths, num_queries, head_dim = (5, 16, 90), 3, 24
    pool, tables = filled_pool(num_kv_heads=2, head_dim=head_dim, lengths=lengths)
    q_BQHD = torch.randn(len(lengths), num_queries, 6, head_dim, generator=torch.Generator().manual_seed(2))
    starts = [length - num_queries for length in lengths]
    context = make_context(tables, starts, num_queries, window, BLOCK_SIZE, CPU)
    got = attend(pool, 1, q_BQHD, context, scale, softcap).view(len(lengths), num_queries, -1)
    for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
        exact = expected(pool, table, q_BQHD[row], start, window, scale or head_dim**-0.5, softcap or 0.0)
        torch.testing.assert_close(got[row].double(), exact, atol=1e-4, rtol=1e-4)
