"""Compares attention that reads blocks in place with gathering the blocks for torch, on this machine's CPU.

    python -m benchmarks.attention [--threads 1]

12 query heads, 4 kv heads, head dim 64, blocks of 16: one layer of a small model. Each figure is the best of several
alternating rounds over all layers, so that no layer finds its blocks in a cache from the previous round. The last three
columns are a bfloat16 pool: for float32 weights, for rounded weights, which use tiles on a CPU with AMX, and the ratio.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pdserve.engine.cpu.paged import PagedAttention, PagedPlan
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.attention import attend, make_context

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 12, 4, 64, 16, 4
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(" rows queries context  gather us  paged us  int8 us  gather/paged gather/int8  bf16 us  rounded us  ratio")
    for num_rows in (1, 8, 32):
        for context in (64, 512, 2048):
            compare(num_rows, 1, context)
    for num_queries, context in (
        (5, 512),
        (16, 512),
        (32, 512),
        (64, 512),
        (128, 512),
        (512, 512),
        (64, 2048),
        (2048, 2048),
    ):
        compare(1, num_queries, context)


def compare(num_rows: int, num_queries: int, context: int) -> None:
    dtypes = torch.float32, torch.int8, torch.bfloat16
    pools = {dtype: filled(num_rows * -(-context // BLOCK_SIZE), dtype) for dtype in dtypes}
    numbers = list(range(pools[torch.float32].num_blocks))
    random.Random(0).shuffle(numbers)
    num_pages = len(numbers) // num_rows
    tables = [numbers[row * num_pages : (row + 1) * num_pages] for row in range(num_rows)]
    starts = [context - num_queries] * num_rows
    q_THD = torch.randn(num_rows * num_queries, NUM_HEADS, HEAD_DIM)
    q_BQHD = q_THD.view(num_rows, num_queries, NUM_HEADS, HEAD_DIM)
    gathered = make_context(tables, starts, num_queries, None, BLOCK_SIZE, torch.device("cpu"))
    ways: list[Callable[[int], object]] = [lambda layer: attend(pools[torch.float32], layer, q_BQHD, gathered)]
    kernels = [PagedAttention(pool, NUM_HEADS) for pool in pools.values()]
    for kernel in (*kernels, PagedAttention(pools[torch.bfloat16], NUM_HEADS, is_rounded=True)):
        plan = kernel.plan(tables, starts, [num_queries] * num_rows)
        ways.append(partial(in_place, kernel, plan, q_THD))
    best = [float("inf")] * len(ways)
    for _ in range(ROUNDS):
        for index, way in enumerate(ways):
            began_s = time.perf_counter()
            for layer in range(NUM_LAYERS):
                way(layer)
            best[index] = min(best[index], (time.perf_counter() - began_s) / NUM_LAYERS)
    gather_us, paged_us, int8_us, bfloat16_us, rounded_us = (seconds * 1e6 for seconds in best)
    print(
        f"{num_rows:5} {num_queries:7} {context:7} {gather_us:10.0f} {paged_us:9.0f} {int8_us:8.0f}"
        f"  {gather_us / paged_us:12.1f} {gather_us / int8_us:11.1f}"
        f" {bfloat16_us:8.0f} {rounded_us:11.0f} {bfloat16_us / rounded_us:6.1f}",
        flush=True,
    )


def in_place(kernel: PagedAttention, plan: PagedPlan, q_THD: Tensor, layer: int) -> Tensor:
    return kernel.attend(layer, q_THD, plan, None, None, None)


def filled(num_blocks: int, dtype: torch.dtype) -> TorchPool:
    shape = BlockShape(
        num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    pool = TorchPool(num_blocks=num_blocks, shape=shape, device=torch.device("cpu"))
    block_T = torch.arange(num_blocks).repeat_interleave(BLOCK_SIZE)
    offset_T = torch.arange(BLOCK_SIZE).repeat(num_blocks)
    for layer in range(NUM_LAYERS):
        k_TKD, v_TKD = torch.randn(2, len(block_T), NUM_KV_HEADS, HEAD_DIM)
        pool.write(layer, k_TKD, v_TKD, block_T, offset_T)
    return pool


if __name__ == "__main__":
    main()
