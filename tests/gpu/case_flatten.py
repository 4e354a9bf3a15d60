"""Checks of flatten (kv.py) against pool.read: rows in order, without gaps."""

from __future__ import annotations

import torch

from pdserve.engine.gpu.kernels.kv import flatten
from pdserve.engine.memory.pool import BlockShape, TorchPool
from tests.gpu.cases import BOUNDS, Case, Launch, draw, worst

_LENGTHS = (37, 0, 8, 20)
_STORED = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _case(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, *, heads_first: bool = False) -> Case:
    def check(device: torch.device) -> float:
        size = {"num_layers": 2, "block_size": 8, "num_kv_heads": 3, "head_dim": head_dim}
        shape = BlockShape(**size, dtype=kv_dtype, heads_first=heads_first)
        here = TorchPool(num_blocks=20, shape=shape, device=torch.device("cpu"))
        at = torch.arange(160)
        keys, values = (draw((160, 3, head_dim), dtype, seed) for seed in (1, 2))
        here.write(1, keys, values, at // 8, at % 8)
        pool = TorchPool(num_blocks=20, shape=shape, device=device)
        pool.raw.copy_(here.raw)
        table_BP = torch.stack([(torch.arange(5) * 3 + 7 * row) % 20 for row in range(4)]).int()
        first_B1 = torch.tensor([0, *torch.tensor(_LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        ours = flatten(pool, 1, table_BP.to(device), first_B1.to(device), sum(_LENGTHS), max(_LENGTHS), dtype)
        error = 0.0
        for part, out in enumerate(ours):
            read = here.read(1, table_BP.long(), torch.float64)[part]
            rows = [read[row, :, :length].transpose(0, 1) for row, length in enumerate(_LENGTHS)]
            error = max(error, worst(out, torch.cat(rows)))
        return error

    order = " heads first" if heads_first else ""
    return Case(f"flatten {dtype} of {kv_dtype} d={head_dim}{order}".replace("torch.", ""), check, BOUNDS[dtype])


CASES = [
    _case(torch.float32, torch.float32, 16),
    _case(torch.bfloat16, torch.bfloat16, 24),
    _case(torch.bfloat16, torch.int8, 16),
    _case(torch.float32, torch.float8_e4m3fn, 16),
    _case(torch.bfloat16, torch.bfloat16, 24, heads_first=True),
    _case(torch.bfloat16, torch.int8, 24, heads_first=True),
    _case(torch.float32, torch.float8_e4m3fn, 16, heads_first=True),
]


def _launch(name: str, kv_dtype: torch.dtype, *, heads_first: bool = False) -> Launch:
    size = {"num_layers": 1, "block_size": 64, "num_kv_heads": 8, "head_dim": 128}
    shape = BlockShape(**size, dtype=kv_dtype, heads_first=heads_first)

    def make(device: torch.device):  # type: ignore[no-untyped-def]
        pool = TorchPool(num_blocks=128, shape=shape, device=device)
        table_BP = torch.arange(128, dtype=torch.int32, device=device)[None]
        first_B1 = torch.arange(2, dtype=torch.int32, device=device) * 8192
        return lambda: flatten(pool, 0, table_BP, first_B1, 8192, 8192, torch.bfloat16), None

    num_bytes = 8192 * 2 * 8 * 128 * (kv_dtype.itemsize + 2)
    return Launch(f"flatten llama-8b {name} s=8192", make, num_bytes)


LAUNCHES = [
    *(_launch(name, dtype) for name, dtype in _STORED.items()),
    *(_launch(f"{name} heads first", dtype, heads_first=True) for name, dtype in _STORED.items()),
]
