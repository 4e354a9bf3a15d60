"""Computes the time that a decode step with a graph should take, per kernel, from the model's shape. Pure.

    python -m benchmarks.gpu.floor

Computed, not measured: a kernel takes a start and its bytes at a share of a device copy's bandwidth, and between two
kernels of a graph lies a gap. `benchmarks.gpu` prints it beside what it measures, so that what is off shows. The claims
of docs/benchmarks/gpu.md follow with their arithmetic, their goals, and what a first run is expected to show
(claims.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from pdserve.engine.gpu.kernels.fixed_shapes import TilePart, imbalance, least_tiles, num_programs, parts, tile_range
from pdserve.engine.model.config import ModelConfig

COPY_GB_S: Final = 3000.0  # read and written, of an H100 as it was once seen (vendor: 3350)
PROCESSORS: Final = 132


@dataclass(frozen=True)
class Rates:
    """What kernels reach: seconds, and shares of a copy's bandwidth."""

    gap_s: float  # between two kernels of a graph
    start_s: float  # until a kernel that depends on the last one moves bytes at its rate, and its end
    norm_s: float  # the least time of a norm
    attention_s: float  # the least time of attention, without its merge
    narrow_share: float  # of products of few rows with few outputs (qkv and o)
    few_share: float  # of other products of few rows
    many_share: float  # of products of more rows
    attention_share: float


FEW_ROWS: Final = 16
#: If each kernel takes its bytes at the best rate that was published for its kind. The goals were set by it.
BEST: Final = Rates(1e-6, 2e-6, 0.0, 0.0, 0.95, 0.95, 0.86, 0.85)
#: The faster and the slower end of what a correct first run should show, from public measurements on H100s:
#: - narrow products: vLLM 0.24's reach 2.53 (6144 x 4096) and 2.23 TB/s (4096 x 4096), 84 and 74 % of a copy
#:   (ai-dynamo/aiconfigurator, systems/data/h100_sxm/gemm); fp8 of 14336 x 16 x 4096 reaches 68 %
#:   (NVIDIA/cutlass#1139).
#: - products of many rows: BEST's share, which is from the same tables, times the computed time of SGLang's whole steps
#:   over the measured one: 0.96 (sgl-project/sglang#4832: 7.71 ms, 16 rows), 0.89 (sgl-project/sglang#1401: 7.06 ms,
#:   one row).
#: - attention: Triton's is 0.76 to 0.78 of CUDA's ("CUDA-Free Inference", pytorch.org), which reaches 3.12 TB/s
#:   (aiconfigurator, h100_sxm/attention), so 0.8 of a copy; 0.7 if 16 rows of tensor cores for 4 queries cost more. One
#:   row takes 11.7 us by FA3 in vLLM (the same tables), with the merge; 9 us for five loads that wait for each other.
#: - a norm takes 3 us: it loads twice and sums over a program between. Gaps: 1.3 us even in a graph
#:   (hazyresearch.stanford.edu, "No Bubbles").
FASTER: Final = Rates(1e-6, 2e-6, 3e-6, 7e-6, 0.80, 0.95, 0.86 * 0.96, 0.80)
SLOWER: Final = Rates(1.3e-6, 2e-6, 3e-6, 9.7e-6, 0.65, 0.95, 0.86 * 0.89, 0.70)
#: What must be on its way to each processor for the memory's full rate, by Little's law: bandwidth times latency. Of an
#: H200 (vendor: 4,800 GB/s), whose loads take about a microsecond under load.
H200_GB_S, LATENCY_S = 4800.0, 1.0e-6
IN_FLIGHT_BYTES: Final = H200_GB_S * 1e9 * LATENCY_S / PROCESSORS
#: What the compiled kernel has on its way to a processor at least, while three programs compute a tile each: the next
#: tile's keys and values of each, 64 x 128 x 2 x 2 bytes (tests/gpu/machine_code.py reads it from the code).
ATTENTION_IN_FLIGHT: Final = 3 * 64 * 128 * 2 * 2
TILE, PER_PROCESSOR = 64, 3  # of attention.choose_tiling for heads of 128 in bfloat16
#: What a part costs a program beside its tiles: 1.5 us of loads that wait for each other, where a tile of 32 KiB takes
#: 5 us while all programs share the bandwidth.
PART_TILES: Final = 0.3


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that a step's bytes follow from. Two bytes a value."""

    num_layers: int
    hidden: int
    mlp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


def shape_of(model: ModelConfig) -> Shape:
    return Shape(
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        mlp=model.mlp_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab_size,
    )


LLAMA_8B: Final = Shape(32, 4096, 14336, 32, 8, 128, 128_256)


@dataclass(frozen=True)
class Kernel:
    name: str
    count: int  # in a step
    programs: int  # of one launch; 0: a library's
    num_bytes: float  # of one launch
    start_s: float = BEST.start_s
    share: float = 1.0  # of a copy's bandwidth, once it runs
    imbalance: float = 1.0  # the load of the fullest program over the mean
    least_s: float = 0.0

    def seconds(self, copy_gb_s: float) -> float:
        """The time of one launch."""
        return max(self.least_s, self.start_s + self.num_bytes * self.imbalance / (self.share * copy_gb_s * 1e9))


@dataclass(frozen=True)
class Floor:
    kernels: tuple[Kernel, ...]
    copy_gb_s: float
    gap_s: float = BEST.gap_s

    @property
    def num_kernels(self) -> int:
        return sum(one.count for one in self.kernels)

    @property
    def kernels_s(self) -> float:
        return sum(one.count * one.seconds(self.copy_gb_s) for one in self.kernels)

    @property
    def step_s(self) -> float:
        return self.kernels_s + self.num_kernels * self.gap_s


def attention_parts(shape: Shape, contexts: Sequence[int]) -> list[TilePart]:
    """The operations of the programs of one kv head, for rows of one query."""
    programs = num_programs(shape.num_kv_heads, PROCESSORS, PER_PROCESSOR)
    return parts([tile_range(length - 1, length, TILE) for length in contexts], programs, least_tiles(TILE))


def attention_kernels(shape: Shape, contexts: Sequence[int], rates: Rates = BEST) -> tuple[Kernel, Kernel]:
    """A layer's attention and merge."""
    heads, kv = shape.num_heads, shape.num_kv_heads * shape.head_dim
    found = attention_parts(shape, contexts)
    partial = sum(part.slot is not None for part in found)
    merged = partial * heads * (shape.head_dim + 1) * 4
    busy = shape.num_kv_heads * len({part.program for part in found})
    return (
        Kernel(
            "attend",
            shape.num_layers,
            busy,
            4 * sum(contexts) * kv + merged,
            share=rates.attention_share,
            imbalance=imbalance(found, PART_TILES),
            least_s=rates.attention_s,
        ),
        Kernel("merge", shape.num_layers, len(contexts) * heads, merged),
    )


def decode_floor(
    shape: Shape,
    rows: int,
    context: int,
    copy_gb_s: float = COPY_GB_S,
    rates: Rates = BEST,
    *,
    is_merged: bool = False,
    is_fused: bool = False,
) -> Floor:
    """The floor for greedy rows in bfloat16. `is_merged`: attention merges in its kernel (merge=fused). `is_fused`:
    norms and gates are part of products (products=split-k)."""
    layers, hidden, mlp, vocab = shape.num_layers, shape.hidden, shape.mlp, shape.vocab
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attend, merge = attention_kernels(shape, [context] * rows, rates)

    def product(name: str, inputs: int, outputs: int, count: int = layers, few: float = rates.few_share) -> Kernel:
        share = few if rows <= FEW_ROWS else rates.many_share
        return Kernel(f"product {name}", count, 0, 2 * (inputs * outputs + rows * (inputs + outputs)), share=share)

    kernels = (
        Kernel("add and norm", 1 if is_fused else 2 * layers + 1, rows, 8 * rows * hidden, least_s=rates.norm_s),
        product("qkv", hidden, queries + 2 * kv, few=rates.narrow_share),
        Kernel(
            "rope, store",
            layers,
            rows * ceil((shape.num_heads + 2 * shape.num_kv_heads) / 8),
            4 * rows * (queries + 2 * kv),
        ),
        attend,
        *(() if is_merged else (merge,)),
        product("o", queries, hidden, few=rates.narrow_share),
        product("gate, up", hidden, 2 * mlp),
        *(() if is_fused else (Kernel("silu", layers, rows * ceil(mlp / 1024), 6 * rows * mlp),)),
        product("down", mlp, hidden),
        product("head", hidden, vocab, 1),
        # Of greedy rows its first launch reads all logits, as the head's product left them, the others little.
        Kernel("sampler", 3, rows, 2 * rows * vocab / 3),
        Kernel("tokens, tables, shares; embedding", 2, 0, 2 * rows * hidden),
    )
    return Floor(kernels, copy_gb_s, rates.gap_s)


def expected_tokens_per_s(rows: int, context: int = 1024) -> tuple[float, float]:
    """The slower and the faster end for Llama-3.1-8B's shape."""
    slower, faster = (rows / decode_floor(LLAMA_8B, rows, context, rates=rates).step_s for rates in (SLOWER, FASTER))
    return slower, faster


#: Of finding a cutoff among 1,024 candidates or fewer: eight rounds and the draw, each two loads that wait for each
#: other and a sum over a program.
CUTOFF_S: Final = 9 * 1.0e-6


def truncated_draw_s(shape: Shape, rows: int, copy_gb_s: float = COPY_GB_S) -> float:
    """Of rows with top-p: the logits are read twice, by as many programs as fill the device; then one program a row,
    in rounds of one for each processor."""
    read_s = 2 * 2 * rows * shape.vocab / (copy_gb_s * 1e9)
    return 3 * BEST.start_s + 2 * BEST.gap_s + read_s + ceil(rows / PROCESSORS) * CUTOFF_S


def table(batches: Sequence[int] = (1, 128), context: int = 1024) -> str:
    floors = {rows: decode_floor(LLAMA_8B, rows, context) for rows in batches}
    head = "".join(f" b={rows}: programs | MB | us each | us a step |" for rows in batches)
    lines = [f"| kernel | a step |{head}", "|---|---|" + "---|" * 4 * len(batches)]
    names = [one.name for one in max((floor.kernels for floor in floors.values()), key=len)]
    for name in names:
        found = [next((one for one in floor.kernels if one.name == name), None) for floor in floors.values()]
        count = next(one.count for one in found if one is not None)
        lines.append(f"| {name} | {count} |" + "".join(map(_cells, found)))
    sums = "".join(f" | | | **{floor.kernels_s * 1e6:,.0f}** |" for floor in floors.values())
    lines.append(f"| **all kernels** | |{sums}")
    steps = "".join(f" | | {floor.num_kernels} gaps | **{floor.step_s * 1e6:,.0f}** |" for floor in floors.values())
    lines.append(f"| **the step** | |{steps}")
    return "\n".join(lines)


def _cells(kernel: Kernel | None) -> str:
    if kernel is None:
        return " | | | |"
    each_s = kernel.seconds(COPY_GB_S)
    programs = f"{kernel.programs:,}" if kernel.programs else ""
    return f" {programs} | {kernel.num_bytes / 1e6:.3g} | {each_s * 1e6:.1f} | {kernel.count * each_s * 1e6:,.0f} |"


def main() -> None:
    from benchmarks.gpu.claims import claims, mixed_lengths, switched

    sys.stdout.write("\n\n".join((table(), claims(), switched(), mixed_lengths())) + "\n")


if __name__ == "__main__":
    main()
