"""Attention by tiles in bfloat16 equals the float64 formula of rounded queries, up to the rounding of its weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdserve.engine.cpu import paged
from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.paged import PagedAttention
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.pool import TorchPool
from tests.support.slow import slow_except
from tests.unit.engine.test_attention import CPU, NUM_BLOCKS, VARIANTS, expected, filled_pool, queries, scattered

HEAD_DIM, NUM_HEADS = 32, 6


def has_tiles() -> bool:
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels import amx

    return amx.is_supported("bfloat16")


pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX, or kernels may not use it")


def tiled(pool: TorchPool, num_heads: int = NUM_HEADS) -> PagedAttention:
    kernel = PagedAttention(pool, num_heads, is_rounded=True)
    assert kernel.is_tiled
    return kernel


def rounded(q_THD: Tensor, scale: float | None) -> Tensor:
    """The queries that the kernel multiplies."""
    factor = (scale or q_THD.shape[-1] ** -0.5) * math.log2(math.e)
    return (q_THD * factor).bfloat16().double() / factor


def assert_close(got: Tensor, exact: Tensor, pool: TorchPool) -> None:
    """Each weight is rounded by at most 2^-8 of itself, and weights add to 1."""
    torch.testing.assert_close(got.double(), exact, atol=2**-8 * float(pool.tensor.abs().max()) + 1e-4, rtol=0)


@pytest.mark.parametrize("window", [None, 21, 150])
@pytest.mark.parametrize(("scale", "softcap"), slow_except(VARIANTS, VARIANTS[0], VARIANTS[2]))
def test_tiles_follow_the_formula(window: int | None, scale: float | None, softcap: float | None) -> None:
    """Decode rows, rows with drafts and chunks longer than one task, together."""
    pool = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16)
    rows = [(0, 1), (15, 1), (16, 1), (63, 1), (64, 1), (700, 1), (30, 5), (0, 17), (100, 150), (89, 16)]
    tables = scattered(pool, [start + count for start, count in rows])
    kernel = tiled(pool)
    plan = kernel.plan(tables, [start for start, _ in rows], [count for _, count in rows])
    q_THD = queries(plan.num_tokens, NUM_HEADS, HEAD_DIM)
    got = kernel.attend(1, q_THD, plan, window, scale, softcap).split([count for _, count in rows])
    q_rows = rounded(q_THD, scale).split([count for _, count in rows])
    for (start, _), table, q_QHD, out in zip(rows, tables, q_rows, got, strict=True):
        assert_close(out, expected(pool, table, q_QHD, start, window, scale, softcap), pool)


@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim"),
    [
        pytest.param(32, 3, 64, marks=pytest.mark.slow),  # each shape is compiled for itself
        pytest.param(16, 2, 128, marks=pytest.mark.slow),
        (48, 2, 96),  # a tile of 64 positions has unequal parts of blocks
        pytest.param(128, 1, 96, marks=pytest.mark.slow),
        pytest.param(64, 6, 256, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_any_shape_follow_the_formula(block_size: int, num_kv_heads: int, head_dim: int) -> None:
    pool = filled_pool(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16)
    [table] = scattered(pool, [270])
    kernel = tiled(pool)
    q_THD = queries(30, NUM_HEADS, head_dim)
    got = kernel.attend(1, q_THD, kernel.plan([table], [240], [30]), None, None, None)
    assert_close(got, expected(pool, table, rounded(q_THD, None), 240), pool)


@pytest.mark.parametrize("window", [None, 33, 70])
def test_a_position_has_the_same_bits_in_any_batch(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_LEAST_WORK", 0)
    pool, length = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16), 200
    tables = scattered(pool, [length, 300, 77])
    q_THD, company = queries(length, NUM_HEADS, HEAD_DIM), queries(2, NUM_HEADS, HEAD_DIM)
    kernel = tiled(pool)
    whole = kernel.attend(1, q_THD, kernel.plan(tables[:1], [0], [length]), window, None, None)
    try:
        torch.set_num_threads(3)
        threaded = tiled(pool)
    finally:
        torch.set_num_threads(1)
    for chunk in (1, 3, 80):
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            plan = threaded.plan(tables, [start, 299, 76], [end - start, 1, 1])
            got = threaded.attend(1, torch.cat((q_THD[start:end], company)), plan, window, None, None)
            assert torch.equal(got[:-2], whole[start:end])


def test_blocks_before_the_window_are_not_read() -> None:
    """A pool may have given them to another request, or they may hold values that are not finite."""
    pool = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16)
    [table] = scattered(pool, [200])
    kernel = tiled(pool)
    plan, q_THD = kernel.plan([table], [190], [10]), queries(10, NUM_HEADS, HEAD_DIM)
    before = kernel.attend(1, q_THD, plan, 33, None, None)
    pool.tensor[table[: (190 - 33 + 1) // 16]] = torch.nan
    assert torch.equal(kernel.attend(1, q_THD, plan, 33, None, None), before)


def test_keys_after_the_last_position_are_not_seen() -> None:
    """Their values must be finite, which a new block's zeros are."""
    pool = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16)
    [table] = scattered(pool, [40])
    kernel = tiled(pool)
    plan, q_THD = kernel.plan([table], [30], [10]), queries(10, NUM_HEADS, HEAD_DIM)
    before = kernel.attend(1, q_THD, plan, None, None, None)
    pool.tensor[table[40 // 16], 1, 0, 40 % 16 :] = torch.nan
    assert torch.equal(kernel.attend(1, q_THD, plan, None, None, None), before)


def test_a_rank_reads_its_own_heads() -> None:
    """Two ranks share blocks of four kv heads."""
    alone = filled_pool(num_kv_heads=4, head_dim=HEAD_DIM, dtype=torch.bfloat16)
    tables = scattered(alone, [100, 70])
    q_THD = queries(2 + 70, 8, HEAD_DIM)
    outs = []
    for pool, heads in (
        (alone, slice(0, 8)),
        *((rank_of(alone, first), slice(2 * first, 2 * first + 4)) for first in (0, 2)),
    ):
        kernel = tiled(pool, heads.stop - heads.start)
        plan = kernel.plan(tables, [98, 0], [2, 70])
        outs.append(kernel.attend(1, q_THD[:, heads].contiguous(), plan, None, None, None))
    assert torch.equal(torch.cat(outs[1:], dim=1), outs[0])


def rank_of(whole: TorchPool, first: int) -> TorchPool:
    """A pool of kv heads `first` and the next one, with the contents of `whole`."""
    memory = HostMemory(whole.raw.nbytes)
    pool = TorchPool(num_blocks=NUM_BLOCKS, shape=whole.shape, device=CPU, memory=memory, heads=range(first, first + 2))
    pool.raw.copy_(whole.raw)
    return pool


def test_a_row_that_is_not_finite_affects_no_other() -> None:
    pool = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16)
    tables = scattered(pool, [40, 40])
    kernel = tiled(pool)
    plan, q_THD = kernel.plan(tables, [39, 39], [1, 1]), queries(2, NUM_HEADS, HEAD_DIM)
    before = kernel.attend(1, q_THD, plan, None, None, None)
    pool.tensor[tables[0][1], 1, 0, 3] = torch.nan
    after = kernel.attend(1, q_THD, plan, None, None, None)
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


def test_exact_weights_use_no_tiles() -> None:
    pool = filled_pool(head_dim=HEAD_DIM, dtype=torch.bfloat16)
    assert not PagedAttention(pool, NUM_HEADS).is_tiled
