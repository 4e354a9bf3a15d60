"""Paged attention equals the float64 formula over contiguous keys and values."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.cpu import paged
from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.paged import PagedAttention, Task, deal
from pdserve.engine.interface import Row
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.attention import (
    EagerAttention,
    Heads,
    attend,
    attend_chunk,
    flash_chunk,
    is_for_flash,
    make_context,
    rotate,
)
from pdserve.engine.model.batch import pack
from tests.support.slow import slow_except

CPU = torch.device("cpu")
NUM_BLOCKS = 200
STORED = [torch.float32, torch.bfloat16, torch.int8]
VARIANTS = [(None, None), (0.3, None), (0.2, 5.0), (None, 30.0)]  # Scale and softcap.


def filled_pool(
    *, block_size: int = 16, num_kv_heads: int = 2, head_dim: int = 24, dtype: torch.dtype = torch.float32
) -> TorchPool:
    """A pool in which every position of every block was written."""
    shape = BlockShape(num_layers=2, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    pool = TorchPool(num_blocks=NUM_BLOCKS, shape=shape, device=CPU)
    generator = torch.Generator().manual_seed(1)
    block_T = torch.arange(NUM_BLOCKS).repeat_interleave(block_size)
    offset_T = torch.arange(block_size).repeat(NUM_BLOCKS)
    for layer in (0, 1):
        k_TKD, v_TKD = torch.randn(2, len(block_T), num_kv_heads, head_dim, generator=generator) * 3
        pool.write(layer, k_TKD, v_TKD, block_T, offset_T)
    return pool


def scattered(pool: TorchPool, lengths: Sequence[int]) -> list[list[int]]:
    numbers = iter(random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    return [[next(numbers) for _ in range(-(-length // pool.block_size))] for length in lengths]


def queries(num_tokens: int, num_heads: int, head_dim: int) -> Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(2))


def expected(
    pool: TorchPool,
    table: Sequence[int],
    q_QHD: Tensor,
    start: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[Q, H * D] in float64, on layer 1."""
    num_queries, num_heads, head_dim = q_QHD.shape
    blocks = torch.tensor(table)
    kv_N2CKD = pool.tensor[blocks, 1].double()
    if pool.scales is not None:
        kv_N2CKD *= pool.scales[blocks, 1].double()[..., None]
    kv_2SKD = kv_N2CKD.transpose(0, 1).flatten(1, 2)[:, : start + num_queries]
    k_SHD, v_SHD = kv_2SKD.repeat_interleave(num_heads // kv_2SKD.shape[2], dim=2)
    score_HQS = torch.einsum("qhd,shd->hqs", q_QHD.double(), k_SHD) * (scale or head_dim**-0.5)
    if softcap is not None:
        score_HQS = (score_HQS / softcap).tanh() * softcap
    query_Q1, key_S = torch.arange(start, start + num_queries)[:, None], torch.arange(start + num_queries)
    is_seen_QS = (key_S <= query_Q1) & (key_S > query_Q1 - (window or 10**9))
    weight_HQS = score_HQS.masked_fill(~is_seen_QS, -torch.inf).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weight_HQS, v_SHD).flatten(1)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(("scale", "softcap"), VARIANTS)
@pytest.mark.parametrize(("lengths", "num_queries"), [((5, 16, 90), 3), ((150, 151, 290), 150)])
def test_gathered_blocks_follow_the_formula(
    dtype: torch.dtype,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    lengths: tuple[int, ...],
    num_queries: int,
) -> None:
    """Few queries, and more than one tile of queries."""
    pool = filled_pool(dtype=dtype)
    tables, starts = scattered(pool, lengths), [length - num_queries for length in lengths]
    q_BQHD = queries(len(lengths) * num_queries, 6, 24).view(len(lengths), num_queries, 6, 24)
    context = make_context(tables, starts, num_queries, window, pool.block_size, CPU)
    got = attend(pool, 1, q_BQHD, context, scale, softcap).view(len(lengths), num_queries, -1)
    for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
        exact = expected(pool, table, q_BQHD[row], start, window, scale, softcap)
        torch.testing.assert_close(got[row].double(), exact, atol=1e-4, rtol=1e-4)


needs_numba = pytest.mark.skipif(not jit.is_available(), reason="numba is not installed: every row is gathered")


@needs_numba
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(("scale", "softcap"), slow_except(VARIANTS, VARIANTS[0], VARIANTS[2]))  # Each is compiled.
def test_blocks_read_in_place_follow_the_formula(
    dtype: torch.dtype, window: int | None, scale: float | None, softcap: float | None
) -> None:
    """Decode rows, rows with drafts and chunks longer than one task, together."""
    pool, rows = filled_pool(dtype=dtype), [(0, 1), (15, 1), (16, 1), (700, 1), (30, 5), (0, 17), (100, 50), (89, 16)]
    tables = scattered(pool, [start + count for start, count in rows])
    kernel = PagedAttention(pool, num_heads=6)
    plan = kernel.plan(tables, [start for start, _ in rows], [count for _, count in rows])
    q_THD = queries(plan.num_tokens, 6, 24)
    got = kernel.attend(1, q_THD, plan, window, scale, softcap).split([count for _, count in rows])
    q_rows = q_THD.split([count for _, count in rows])
    for (start, _), table, q_QHD, out in zip(rows, tables, q_rows, got, strict=True):
        exact = expected(pool, table, q_QHD, start, window, scale, softcap)
        torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [*STORED, torch.float8_e4m3fn])
def test_only_the_unused_part_of_a_block_is_cleared(dtype: torch.dtype, heads_first: bool) -> None:
    """Of this rank's heads; the filled part may be read by a transfer."""
    shape = BlockShape(num_layers=2, block_size=8, num_kv_heads=4, head_dim=24, dtype=dtype, heads_first=heads_first)
    memory = HostMemory(3 * shape.block_bytes)
    ours, theirs = (
        TorchPool(num_blocks=3, shape=shape, device=CPU, memory=memory, heads=heads)
        for heads in (range(2), range(2, 4))
    )
    memory.buffer[:] = b"\1" * len(memory.buffer)
    ours.clear([(2, 3), (1, 0)])
    for pool, unused in ((ours, {1: 0, 2: 3}), (theirs, {})):
        for values in [pool.tensor[..., 0].float(), *([] if pool.scales is None else [pool.scales])]:
            for block in range(3):
                num_kept = unused.get(block, 8)
                assert values[block, :, :, :num_kept].all()
                assert not values[block, :, :, num_kept:].any()


@needs_numba
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("is_paged", [True, False])
def test_ranks_that_share_blocks_access_only_their_heads(dtype: torch.dtype, is_paged: bool) -> None:
    """Three ranks with two kv heads each in one pool, compared with one pool of six heads: equal bytes and results."""
    shape = BlockShape(num_layers=2, block_size=16, num_kv_heads=6, head_dim=24, dtype=dtype)
    alone = TorchPool(num_blocks=8, shape=shape, device=CPU)
    memory = HostMemory(8 * shape.block_bytes)
    ranks = [
        TorchPool(num_blocks=8, shape=shape, device=CPU, memory=memory, heads=range(first, first + 2))
        for first in (0, 2, 4)
    ]
    block_T, offset_T = torch.tensor([5, 3, 6]).repeat_interleave(16)[:40], torch.arange(40) % 16
    qkv_TND = torch.randn(40, 24, 24, generator=torch.Generator().manual_seed(3))
    cos_sin = torch.rand(2, 40, 1, 12, generator=torch.Generator().manual_seed(4)).unbind()
    row = Row(tokens=range(40), start=0, blocks=[5, 3, 6])
    parts, attentions = [qkv_TND, *cut(qkv_TND)], []
    for pool in (alone, *ranks):  # Ranks synchronise after their creation, which clears, and before any stores.
        num_kv_heads = len(pool.heads)
        kernel = PagedAttention(pool, 2 * num_kv_heads) if is_paged else None
        batch = pack([row], 16, CPU, most_short=40 if is_paged else 0)
        assert torch.equal(batch.block_T, block_T)
        assert torch.equal(batch.offset_T, offset_T)
        attentions.append(EagerAttention(batch, pool, heads_of(num_kv_heads), kernel))
    outs = []
    for attention, part in zip(attentions, parts, strict=True):
        num_kv_heads = part.shape[1] // 4
        q_THD, k_TKD, v_TKD = part.split((2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        q_THD = attention.place(1, q_THD, k_TKD, v_TKD, cos_sin)
        outs.append(attention.attend(1, q_THD, None))
    assert bytes(memory.buffer) == bytes(alone.buffer)
    assert any(memory.buffer)
    assert torch.equal(torch.cat(outs[1:], dim=1), outs[0])


def heads_of(num_kv_heads: int) -> Heads:
    """Two query heads for each kv head of size 24, without a window, and with the test's rotations."""
    return Heads(2 * num_kv_heads, num_kv_heads, 24, 1e-6, 24**-0.5, None, (None,), (), (), ())


def cut(qkv_TND: Tensor) -> list[Tensor]:
    """The heads that each of three ranks computes, of 12 query heads and 6 kv heads."""
    q_THD, k_TKD, v_TKD = qkv_TND.split((12, 6, 6), dim=1)
    return [
        torch.cat((q_THD[:, 4 * rank : 4 * rank + 4], *(x[:, 2 * rank : 2 * rank + 2] for x in (k_TKD, v_TKD))), dim=1)
        for rank in range(3)
    ]


@needs_numba
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim"),
    [  # Each shape needs its own compiled kernel.
        (7, 3, 24),  # test_exactness.py also needs it.
        pytest.param(1, 1, 8, marks=pytest.mark.slow),
        pytest.param(64, 1, 96, marks=pytest.mark.slow),
        (16, 2, 64),
        pytest.param(16, 6, 64, marks=pytest.mark.slow),
    ],
)
def test_any_shape_of_block_can_be_read_in_place(block_size: int, num_kv_heads: int, head_dim: int) -> None:
    pool = filled_pool(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
    [table] = scattered(pool, [130])
    kernel = PagedAttention(pool, num_heads=6)
    for num_queries in (3, 120):
        q_THD, start = queries(num_queries, 6, head_dim), 130 - num_queries
        got = kernel.attend(1, q_THD, kernel.plan([table], [start], [num_queries]), None, None, None)
        torch.testing.assert_close(got.double(), expected(pool, table, q_THD, start), atol=1e-4, rtol=1e-4)


@needs_numba
@pytest.mark.parametrize(("dtype", "head_dim"), [*((dtype, 24) for dtype in STORED), (torch.float32, 64)])
@pytest.mark.parametrize("window", [None, 33])
def test_a_position_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of whole vectors in float32 are read in place by a few queries, and copied for many."""
    monkeypatch.setattr(paged, "_LEAST_WORK", 0)
    pool, length = filled_pool(dtype=dtype, head_dim=head_dim), 150
    tables = scattered(pool, [length, 300, 77])
    q_THD = queries(length, 6, head_dim)
    company = queries(2, 6, head_dim)
    kernel = PagedAttention(pool, num_heads=6)
    whole = kernel.attend(1, q_THD, kernel.plan(tables[:1], [0], [length]), window, None, None)
    try:
        torch.set_num_threads(3)
        threaded = PagedAttention(pool, num_heads=6)
    finally:
        torch.set_num_threads(1)
    for chunk in (1, 3, 50):
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            plan = threaded.plan(tables, [start, 299, 76], [end - start, 1, 1])
            got = threaded.attend(1, torch.cat((q_THD[start:end], company)), plan, window, None, None)
            assert torch.equal(got[:-2], whole[start:end])


@needs_numba
def test_a_row_that_is_not_finite_affects_no_other() -> None:
    pool = filled_pool()
    tables = scattered(pool, [40, 40])
    kernel = PagedAttention(pool, num_heads=6)
    plan = kernel.plan(tables, [39, 39], [1, 1])
    q_THD = queries(2, 6, 24)
    before = kernel.attend(1, q_THD, plan, None, None, None)
    pool.tensor[tables[0][1], 1, 0, 3] = torch.nan
    after = kernel.attend(1, q_THD, plan, None, None, None)
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


@needs_numba
@pytest.mark.parametrize(("scale", "softcap"), [VARIANTS[0], VARIANTS[2]])
def test_a_long_row_that_is_not_finite_leaves_nothing_for_a_short_one(
    scale: float | None, softcap: float | None
) -> None:
    """A thread's arranged keys and scores stay in memory. The short row sees some of them only."""
    pool = filled_pool()
    tables = scattered(pool, [64, 10])
    kernel = PagedAttention(pool, num_heads=6)
    plan = kernel.plan(tables, [63, 9], [1, 1])
    q_THD = queries(2, 6, 24)
    before = kernel.attend(1, q_THD, plan, None, scale, softcap)
    pool.tensor[tables[0], 1] = torch.nan
    after = kernel.attend(1, q_THD, plan, None, scale, softcap)
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 90)), min_size=1, max_size=12),
    num_threads=st.integers(1, 4),
)
def test_every_query_and_head_is_one_task_and_the_longest_come_first(
    rows: list[tuple[int, int]], num_threads: int
) -> None:
    tasks: list[Task] = [(row, start, 0, count, 0, 4) for row, (start, count) in enumerate(rows)]
    dealt, work = deal(tasks, num_threads, width=768)
    sizes = [(start + count) * count * (end - begin) for _, start, _, count, begin, end in dealt]
    assert 768 * sum(sizes) == 4 * work
    if num_threads > 1 and work >= paged._LEAST_WORK:
        assert sizes == sorted(sizes, reverse=True)
        assert len(dealt) >= num_threads
    done = [
        (row, position, head)
        for row, start, _, count, head_from, head_to in dealt
        for position in range(start, start + count)
        for head in range(head_from, head_to)
    ]
    asked = {
        (row, start + index, head)
        for row, (start, count) in enumerate(rows)
        for index in range(count)
        for head in range(4)
    }
    assert len(done) == len(asked)
    assert set(done) == asked


@needs_numba
@pytest.mark.parametrize("dtype", STORED)
def test_place_matches_torch(dtype: torch.dtype) -> None:
    """Queries, keys and values are adjacent in memory, as the product stores them."""
    placed, written = filled_pool(dtype=dtype), filled_pool(dtype=dtype)
    num_tokens, generator = 37, torch.Generator().manual_seed(4)
    qkv_THD = torch.randn(num_tokens, 6 + 2 + 2, 24, generator=generator)
    q_THD, k_TKD, v_TKD = qkv_THD.split((6, 2, 2), dim=1)
    k_TKD[5, 1] = 0
    angle_T1R = torch.randn(num_tokens, 1, 12, generator=generator) * 5
    cos_sin = angle_T1R.cos(), angle_T1R.sin()
    slot_T = torch.randperm(NUM_BLOCKS * 16, generator=generator)[:num_tokens]
    block_T, offset_T = slot_T // 16, slot_T % 16
    kernel = PagedAttention(placed, num_heads=6)
    got_THD = kernel.place(1, q_THD, k_TKD, v_TKD, *cos_sin, block_T, offset_T)
    written.write(1, rotate(k_TKD, *cos_sin), v_TKD, block_T, offset_T)
    torch.testing.assert_close(got_THD, rotate(q_THD, *cos_sin), atol=1e-6, rtol=1e-5)
    tolerance = 1 if dtype == torch.int8 else 1e-6  # A value halfway between two steps may be rounded either way.
    kernel_free = placed.tensor[1:], written.tensor[1:]  # Compiling wrote to block 0.
    torch.testing.assert_close(*kernel_free, atol=tolerance, rtol=1e-5)
    if placed.scales is not None and written.scales is not None:
        torch.testing.assert_close(placed.scales[1:], written.scales[1:])
        assert (placed.tensor[1:] != written.tensor[1:]).float().mean() < 1e-3


@needs_numba
def test_place_keeps_values_that_are_not_finite() -> None:
    pool = filled_pool(dtype=torch.int8)
    kernel = PagedAttention(pool, num_heads=2)
    x_TKD, angle_T1R = torch.ones(3, 2, 24), torch.zeros(3, 1, 12)
    x_TKD[0, 0, 3], x_TKD[1, 1, 2] = torch.nan, -torch.inf
    block_T = torch.tensor([4, 5, 6])
    kernel.place(0, x_TKD, x_TKD, x_TKD, angle_T1R.cos(), angle_T1R.sin(), block_T, torch.zeros_like(block_T))
    k_BKSD, v_BKSD = pool.read(0, block_T[:, None], torch.float32)
    for x_BKSD in (k_BKSD, v_BKSD):
        is_finite = x_BKSD[:, :, 0].isfinite().all(-1)
        assert is_finite.tolist() == [[False, True], [True, False], [True, True]]


@pytest.mark.parametrize(("start", "num_queries"), [(0, 13), (29, 7), (64, 2)])
def test_a_chunk_without_a_mask_equals_a_masked_one(start: int, num_queries: int) -> None:
    """The computation of a chunk on CUDA, compared with the tiles that every device supports."""
    torch.manual_seed(1)
    shape = BlockShape(num_layers=1, block_size=8, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    pool = TorchPool(num_blocks=12, shape=shape, device=CPU)
    pool.tensor.normal_()
    q_1QHD = torch.randn(1, num_queries, 6, 16)
    table = [7, 2, 9, 0, 4, 11, 5, 3, 1, 10][: -(-(start + num_queries) // 8)]
    context = make_context([table], [start], num_queries, None, 8, CPU)
    assert context.chunk_end == start + num_queries
    keys, values = pool.read(0, context.block_BP, torch.float32)
    chunk = attend_chunk(q_1QHD, keys, values, context.chunk_end, None)
    torch.testing.assert_close(chunk, attend(pool, 0, q_1QHD, context), rtol=1e-5, atol=1e-5)


def test_half_precision_chunks_are_for_flash_attention() -> None:
    """Without a device only shapes and arguments show."""
    q_1HQD, k_1KSD = (torch.empty(1, heads, 7, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    assert is_for_flash(q_1HQD)
    assert not is_for_flash(q_1HQD.float())
    assert not is_for_flash(q_1HQD[..., :20])
    assert flash_chunk(q_1HQD, k_1KSD, k_1KSD, 0.1).shape == (7, 32 * 128)


def test_only_a_single_row_that_sees_everything_is_a_chunk() -> None:
    device = CPU
    assert make_context([[0, 1]], [3], 4, 5, 8, device).chunk_end is None
    assert make_context([[0], [1]], [3, 3], 4, None, 8, device).chunk_end is None
    assert make_context([[0]], [3], 1, None, 8, device).chunk_end is None
