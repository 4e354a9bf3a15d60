"""Checks of attention.py with rows of very different lengths, padding rows, and blocks in any order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.gpu.kernels.attention import attend
from pdserve.engine.gpu.kernels.attention_plan import Rows, make_scratch, scratch_of
from pdserve.engine.memory.pool import BlockShape, TorchPool
from tests.gpu.cases import BOUNDS, Case, Launch, draw, worst

_LAYER = 1
_NUM_PAGES = 7


@dataclass(frozen=True)
class Setup:
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page: int = 64
    num_queries: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    heads_first: bool = False  # in a block
    programs: int = 4  # of each kv head
    is_fused: bool = False
    lengths: tuple[int, ...] = (1, 0, 151, 400, 129)  # before the queries; 0 is a padding row

    @property
    def positions(self) -> int:
        return max(448, max(self.lengths) + 16)

    def name(self) -> str:
        changed = {key: value for key, value in vars(self).items() if value != getattr(Setup(), key)}
        return "attend " + (" ".join(f"{key}={value}" for key, value in changed.items()) or "plain").replace(
            "torch.", ""
        )


def _pool(setup: Setup) -> TorchPool:
    """Two layers full of keys and values. The tail of each block pool's last page is NaN if the type has NaN."""
    shape = BlockShape(
        num_layers=2,
        block_size=setup.page,
        num_kv_heads=setup.num_kv_heads,
        head_dim=setup.head_dim,
        dtype=setup.kv_dtype or setup.dtype,
        heads_first=setup.heads_first,
    )
    num_blocks = -(-setup.positions // setup.page) * 2
    pool = TorchPool(num_blocks=num_blocks, shape=shape, device=torch.device("cpu"))
    at = torch.arange(num_blocks * setup.page)
    size = (len(at), setup.num_kv_heads, setup.head_dim)
    keys, values = draw(size, setup.dtype, 1), draw(size, setup.dtype, 2)
    pool.write(_LAYER, keys, values, at // setup.page, at % setup.page)
    return pool


def _to(pool: TorchPool, device: torch.device) -> TorchPool:
    there = TorchPool(num_blocks=pool.num_blocks, shape=pool.shape, device=device)
    there.raw.copy_(pool.raw)
    return there


def reference(pool: TorchPool, q_THD: Tensor, rows: Rows, setup: Setup) -> Tensor:
    """Attention in float64 over the pool's content, one row and kv head at a time."""
    num_queries, group = rows.num_queries, setup.num_heads // setup.num_kv_heads
    scale = setup.head_dim**-0.5 if setup.scale is None else setup.scale
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float64)
    for row, (start, length) in enumerate(zip(rows.start_B.tolist(), rows.length_B.tolist(), strict=True)):
        if not length:
            continue
        k_1KSD, v_1KSD = pool.read(_LAYER, rows.table_BP[row : row + 1].long(), torch.float64)
        key = torch.arange(length)
        for query in range(min(num_queries, length - start)):
            token, asked = row * num_queries + query, start + query
            seen = (key <= asked) & ((key > asked - setup.window) if setup.window else True)
            for head in range(setup.num_heads):
                k_SD, v_SD = k_1KSD[0, head // group, :length], v_1KSD[0, head // group, :length]
                score_S = k_SD @ q_THD[token, head].double() * scale
                if setup.softcap is not None:
                    score_S = (score_S / setup.softcap).tanh() * setup.softcap
                out_THD[token, head] = score_S.masked_fill(~seen, -torch.inf).softmax(0) @ v_SD
    return out_THD.flatten(1)


def case(setup: Setup) -> Case:
    def check(device: torch.device) -> float:
        pool = _pool(setup)
        num_pages = -(-setup.positions // setup.page)
        order = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(3))
        tables = [order[(torch.arange(num_pages) + 5 * row) % pool.num_blocks] for row in range(len(setup.lengths))]
        length_B = torch.tensor([length + setup.num_queries if length else 0 for length in setup.lengths])
        if setup.num_queries > 2:
            length_B[-1] -= 2  # this row has two drafts fewer
        start_B = torch.tensor([length - setup.num_queries if length else 0 for length in length_B.tolist()])
        start_B[-1] = setup.lengths[-1]
        rows = Rows(setup.num_queries, torch.stack(tables).int(), start_B.int(), length_B.int())
        num_tokens = len(setup.lengths) * setup.num_queries
        # Queries are a slice of a wider tensor, as if it contained keys and values as well.
        q_THD = draw((num_tokens, setup.num_heads + 2, setup.head_dim), setup.dtype)[:, : setup.num_heads]
        expected = reference(pool, q_THD, rows, setup)
        group = setup.num_heads // setup.num_kv_heads
        scratch = scratch_of(setup.programs, group * setup.num_queries, setup.num_kv_heads, setup.head_dim, device)
        scratch.out.fill_(torch.nan)
        scratch.weight.fill_(torch.nan)
        there = replace(
            rows,
            table_BP=rows.table_BP.to(device),
            start_B=rows.start_B.to(device),
            length_B=rows.length_B.to(device),
        )
        pool_there, q_there = _to(pool, device), q_THD.to(device)

        def run() -> Tensor:
            return attend(
                pool_there,
                _LAYER,
                q_there,
                there,
                scratch,
                window=setup.window,
                scale=setup.scale,
                softcap=setup.softcap,
                is_fused=setup.is_fused,
            ).cpu()

        out = run()
        # The next launch finds counters of 0, and adds the parts in the same order.
        if setup.is_fused and (bool(scratch.counts.any()) or not torch.equal(out, run())):
            return float("inf")
        if not bool(out.isfinite().all()):
            return float("inf")
        is_real = [
            start + query < max(length, 1)
            for start, length in zip(start_B.tolist(), length_B.tolist(), strict=True)
            for query in range(setup.num_queries)
        ]
        real = torch.tensor(is_real)
        real[setup.num_queries : 2 * setup.num_queries] = True  # the padding row: zeros
        return worst(out[real], expected[real])

    return Case(setup.name(), check, 2 * BOUNDS[setup.dtype])


#: These take half a minute in the interpreter; the case above takes half of that.
LONG = Setup(num_queries=16, lengths=(300, 0, 5), dtype=torch.bfloat16, num_heads=8)
CASES = [
    case(setup)
    for setup in (
        Setup(),
        Setup(programs=1),
        Setup(programs=3),
        Setup(page=8, programs=40, dtype=torch.bfloat16),
        # One row has more parts than the merge processes at a time; the others are short.
        Setup(page=16, programs=24, lengths=(3, 2400, 0, 17), num_heads=2, num_kv_heads=1),
        Setup(page=16, num_heads=5, num_kv_heads=1, head_dim=24, lengths=(130, 0, 33)),
        Setup(num_queries=16, lengths=(300, 0, 5), dtype=torch.bfloat16, num_heads=4, num_kv_heads=1),
        LONG,
        Setup(num_queries=4, window=40, lengths=(10, 0, 300, 150)),
        Setup(window=64, page=8, programs=1, lengths=(64, 0, 65, 63)),
        Setup(heads_first=True),
        Setup(heads_first=True, page=16, num_queries=3, lengths=(200, 0, 60), dtype=torch.bfloat16),
        Setup(heads_first=True, head_dim=24, window=40, softcap=5.0, lengths=(130, 0, 33)),
        Setup(heads_first=True, kv_dtype=torch.int8, page=8, lengths=(200, 0, 60)),
        Setup(heads_first=True, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, lengths=(129, 0, 30)),
        Setup(softcap=5.0, scale=0.3, window=200, lengths=(300, 0, 90)),
        Setup(kv_dtype=torch.int8, programs=6),
        Setup(kv_dtype=torch.int8, dtype=torch.bfloat16, page=16, num_queries=3, lengths=(200, 0, 60)),
        Setup(kv_dtype=torch.float8_e4m3fn),
        Setup(head_dim=256, page=16, lengths=(140, 0), num_heads=2, num_kv_heads=1),
        Setup(is_fused=True),
        Setup(is_fused=True, programs=1),
        Setup(is_fused=True, page=8, programs=40, dtype=torch.bfloat16),
        Setup(is_fused=True, page=16, programs=24, lengths=(3, 2400, 0, 17), num_heads=2, num_kv_heads=1),
        Setup(is_fused=True, page=16, num_heads=5, num_kv_heads=1, head_dim=24, lengths=(130, 0, 33)),
        Setup(is_fused=True, num_queries=4, window=40, lengths=(10, 0, 300, 150)),
        Setup(is_fused=True, kv_dtype=torch.int8, programs=6),
        Setup(is_fused=True, heads_first=True, page=16, programs=6, lengths=(200, 0, 60)),
    )
]


def _launch(name: str, num_rows: int, context: int, setup: Setup, num_processors: int = 132) -> Launch:
    shape = BlockShape(
        num_layers=1,
        block_size=setup.page,
        num_kv_heads=setup.num_kv_heads,
        head_dim=setup.head_dim,
        dtype=setup.kv_dtype or setup.dtype,
        heads_first=setup.heads_first,
    )
    num_pages = -(-context // setup.page)

    def make(device: torch.device):  # type: ignore[no-untyped-def]
        pool = TorchPool(num_blocks=num_rows * num_pages, shape=shape, device=device)
        table_BP = torch.arange(num_rows * num_pages, dtype=torch.int32, device=device).view(num_rows, num_pages)
        length_B = torch.full((num_rows,), context, dtype=torch.int32, device=device)
        num_tokens = num_rows * setup.num_queries
        first_B1 = torch.arange(0, num_tokens + 1, setup.num_queries, dtype=torch.int32, device=device)
        rows = Rows(
            setup.num_queries,
            table_BP,
            length_B - setup.num_queries,
            length_B,
            first_B1 if "ragged" in name else None,
        )
        q_THD = torch.ones(num_tokens, setup.num_heads, setup.head_dim, dtype=setup.dtype, device=device)
        scratch = make_scratch(
            setup.num_queries,
            setup.num_heads,
            setup.num_kv_heads,
            setup.head_dim,
            setup.dtype,
            num_processors,
            device,
        )
        return (
            lambda: attend(
                pool, 0, q_THD, rows, scratch, window=setup.window, softcap=setup.softcap, is_fused=setup.is_fused
            ),
            None,
        )

    seen = min(context, setup.window or context)
    num_bytes = num_rows * -(-seen // setup.page) * shape.block_bytes
    name += " fused" * setup.is_fused
    return Launch(f"attend {name} b={num_rows} ctx={context} q={setup.num_queries}", make, num_bytes)


_LLAMA = Setup(dtype=torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128)
_GEMMA = replace(_LLAMA, num_heads=16, num_kv_heads=8, head_dim=256, window=4096, softcap=50.0)
LAUNCHES = [
    _launch("llama-8b", 1, 1024, _LLAMA),
    _launch("llama-8b", 1, 131_072, _LLAMA),
    _launch("llama-8b", 8, 1024, _LLAMA),
    _launch("llama-8b", 64, 4096, _LLAMA),
    _launch("llama-8b page 16", 64, 4096, replace(_LLAMA, page=16)),
    _launch("llama-8b", 8, 4096, replace(_LLAMA, num_queries=4)),
    _launch("llama-8b", 8, 4096, replace(_LLAMA, num_queries=16)),
    _launch("llama-8b ragged", 8, 4096, replace(_LLAMA, num_queries=4)),
    _launch("llama-8b ragged", 32, 4096, replace(_LLAMA, num_queries=16)),
    _launch("llama-8b int8", 64, 4096, replace(_LLAMA, kv_dtype=torch.int8)),
    _launch("llama-8b fp8", 64, 4096, replace(_LLAMA, kv_dtype=torch.float8_e4m3fn)),
    _launch("llama-8b heads first", 64, 4096, replace(_LLAMA, heads_first=True)),
    _launch("llama-8b heads first page 16", 64, 4096, replace(_LLAMA, heads_first=True, page=16)),
    _launch("llama-8b heads first", 8, 4096, replace(_LLAMA, heads_first=True, num_queries=16)),
    _launch("llama-8b heads first int8", 64, 4096, replace(_LLAMA, heads_first=True, kv_dtype=torch.int8)),
    _launch("llama-8b heads first fp8", 64, 4096, replace(_LLAMA, heads_first=True, kv_dtype=torch.float8_e4m3fn)),
    _launch("gemma-2-9b heads first", 16, 8192, replace(_GEMMA, heads_first=True)),
    _launch("gemma-2-9b", 16, 8192, _GEMMA),
    _launch("llama-8b float32", 8, 1024, replace(_LLAMA, dtype=torch.float32)),
    _launch("llama-8b", 1, 1024, replace(_LLAMA, is_fused=True)),
    _launch("llama-8b", 8, 1024, replace(_LLAMA, is_fused=True)),
    _launch("llama-8b", 64, 4096, replace(_LLAMA, is_fused=True)),
    _launch("llama-8b", 8, 4096, replace(_LLAMA, num_queries=16, is_fused=True)),
]
