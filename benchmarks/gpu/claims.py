"""The claims of docs/benchmarks/gpu.md that are computed, with the arithmetic. Pure; printed by benchmarks.gpu.floor.

Peaks: 989.4 TFLOP/s of dense bfloat16 products and 3,350 GB/s of HBM3 (NVIDIA H100 SXM5 datasheet). The share
that a library's kernel reaches comes from public measurements, named beside each figure. We measured none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.floor import (
    ATTENTION_IN_FLIGHT,
    BEST,
    COPY_GB_S,
    CUTOFF_S,
    FASTER,
    H200_GB_S,
    IN_FLIGHT_BYTES,
    LATENCY_S,
    LLAMA_8B,
    PROCESSORS,
    SLOWER,
    attention_kernels,
    attention_parts,
    decode_floor,
    expected_tokens_per_s,
    truncated_draw_s,
)
from pdserve.engine.gpu.kernels.fixed_shapes import imbalance

PEAK_TFLOP_S: Final = 989.4
PRODUCT_OF_PEAK: Final = 0.80  # cuBLAS, 2,048 rows of this shape
SGLANG_TOKENS_PER_S: Final = 44_300  # prefill of 16 prompts of 1k, FA3, all in (sgl-project/sglang#4832)
SGLANG_TFLOP_S: Final = 630.0  # the same
FLASH_TFLOP_S: Final = {"FA2": 370.0, "FA3": 600.0}  # about: arXiv 2407.08608, forward, causal, heads of 128, 4k tokens
HOST_STEP_S: Final = 1e-3  # time of the host for 256 rows
LINK_GB_S: Final = 50.0
PROMPT: Final = 4096
MIXED: Final = (32_768, *[1024] * 127)
MIXED_BOUND: Final = 1.15


def weight_bytes() -> float:
    """Bytes of the matrices that a step reads."""
    shape = LLAMA_8B
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries + 2 * kv + 3 * shape.mlp)
    return 2.0 * (shape.num_layers * layer + shape.hidden * shape.vocab)


def prefill_s(tokens: int = PROMPT, flash: str = "FA2") -> dict[str, float]:
    """Seconds of one prompt's parts: products, attention, the kernels between them, the host."""
    shape = LLAMA_8B
    head_bytes = 2.0 * shape.hidden * shape.vocab
    products = (weight_bytes() - head_bytes) * tokens  # two operations for each two bytes
    queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2.0 * tokens * tokens * queries * shape.num_layers  # two products over half of a square
    between = tokens * shape.num_layers * (16 * shape.hidden + 4 * (queries + 2 * kv) + 6 * shape.mlp + 8 * kv)
    return {
        "products": products / (PRODUCT_OF_PEAK * PEAK_TFLOP_S * 1e12),
        "attention": attention / (FLASH_TFLOP_S[flash] * 1e12),
        "between": between / (COPY_GB_S * 1e9),
        "host": 2e-3,
    }


def expected_prefill() -> tuple[float, float]:
    """tok/s of one prompt with FA2: the slower end if products reach what SGLang's whole prefill does; the faster if
    only attention is slower than in SGLang's, and the host of a second chunk is added."""
    parts, all_in_s = prefill_s(), PROMPT / SGLANG_TOKENS_PER_S
    products_s = parts["products"] * PRODUCT_OF_PEAK * PEAK_TFLOP_S / SGLANG_TFLOP_S
    attention_s = PROMPT / 1024 * prefill_s(1024, "FA3")["attention"]
    slower_s = sum(parts.values()) - parts["products"] + products_s
    return PROMPT / slower_s, PROMPT / (all_in_s - attention_s + parts["attention"] + HOST_STEP_S)


@dataclass(frozen=True)
class Goal:
    """`expected`: what a correct first run should show, as tok/s; below the goal until what docs/gpu.md names is done.
    `vllm`: what was published for vLLM."""

    least: float
    expected: tuple[float, float]
    vllm: str

    @property
    def range(self) -> str:
        return " to ".join(f"{float(f'{end:.3g}'):,.0f}" for end in self.expected)


_AO: Final = "(pytorch/ao, inference.md)"
GOALS: Final = {
    1: Goal(155, expected_tokens_per_s(1), "none; SGLang 158 (its speculative_decoding.md)"),
    128: Goal(8_500, expected_tokens_per_s(128), f"0.13: 6,612, from 32 tokens of context on {_AO}"),
}
PREFILL_GOAL: Final = Goal(40_000, expected_prefill(), f"0.13: 30,947 {_AO}")


def claims() -> str:
    shape = LLAMA_8B
    one, many = decode_floor(shape, 1, 1024), decode_floor(shape, 128, 1024)
    read_gb, many_gb = _read_gb(1), _read_gb(128)
    prompt = prefill_s()
    total_s = sum(prompt.values())
    parts_ms = ", ".join(f"{name} {took_s * 1e3:.1f}" for name, took_s in prompt.items())
    fa3 = sum(prefill_s(flash="FA3").values())
    queued_us = 4.0
    of_copy = " to ".join(f"{share:.0%}" for share in expected_of_copy())
    cached, uncached = (1 / (1 - times * LINK_GB_S / COPY_GB_S) for times in (3, 4))
    lines = [
        "| claim | goal | expected | vLLM, published | at best | arithmetic of the best |",
        "|---|---|---|---|---|---|",
        f"{_cells('b=1', GOALS[1])} | {1 / one.step_s:.0f} | {read_gb:.2f} GB at "
        f"{COPY_GB_S:.0f} GB/s is {read_gb / COPY_GB_S * 1e3:.2f} ms; starts, gaps and shares of a copy make it "
        f"{one.step_s * 1e3:.2f} |",
        f"| b=1, of a copy | 80 % | {of_copy} | | {read_gb / COPY_GB_S / one.step_s:.2%} | "
        f"the same two figures; each launch is {(BEST.start_s + BEST.gap_s) * 1e6:.0f} us, or 0.04 % |",
        f"{_cells('b=128', GOALS[128])} | {128 / many.step_s:,.0f} | {many_gb:.2f} GB "
        f"at {COPY_GB_S:.0f} GB/s is {many_gb / COPY_GB_S * 1e3:.2f} ms; products at {BEST.many_share:.0%} of a copy, "
        f"attention at {BEST.attention_share:.0%}: {many.step_s * 1e3:.2f} |",
        f"| attention, bytes in flight on a processor | {IN_FLIGHT_BYTES / 1024:.1f} KiB | | | "
        f"{ATTENTION_IN_FLIGHT / 1024:.0f} KiB | Little's law for an H200: {H200_GB_S:,.0f} GB/s and "
        f"{LATENCY_S * 1e6:.0f} us over {PROCESSORS} processors. Three programs compute a tile each while the next, "
        "32 KiB, is on its way; 192 KiB once it is computed |",
        f"| step over its kernels | 1.10 | met | | {one.step_s / one.kernels_s:.2f}, "
        f"{many.step_s / many.kernels_s:.2f} | {one.num_kernels} and {many.num_kernels} gaps of 1 us |",
        f"| idle between steps | 2 % | met | | {queued_us * 1e-6 / one.step_s:.1%} | the next step is queued while "
        f"this one runs: the host has {one.step_s * 1e3:.1f} ms for its {HOST_STEP_S * 1e3:.0f}; the inputs' copy "
        f"and a graph's start take some {queued_us:.0f} us |",
        f"| top-p draw, b=1 and 128 | 150 us | met | | {truncated_draw_s(shape, 1) * 1e6:.0f}, "
        f"{truncated_draw_s(shape, 128) * 1e6:.0f} | three starts, two gaps, the logits read twice, and "
        f"{CUTOFF_S * 1e6:.0f} us for eight rounds and the draw among 1,024 candidates; as much for each 1,024 more |",
        f"{_cells('prefill of 4k', PREFILL_GOAL)} | {PROMPT / total_s:,.0f} | ms: "
        f"{parts_ms}; with FA3 {PROMPT / fa3:,.0f} |",
        f"| step beside a transfer | 1.05 | | | {cached:.2f} to {uncached:.2f} | {LINK_GB_S:.0f} GB/s read, written "
        f"and summed twice: {4 * LINK_GB_S:.0f} of {COPY_GB_S:.0f} GB/s, {3 * LINK_GB_S:.0f} where one "
        "sum reads the cache |",
    ]
    return "\n".join(lines)


def _cells(name: str, goal: Goal) -> str:
    return f"| {name} | {goal.least:,.0f} tok/s | {goal.range} | {goal.vllm}"


def expected_of_copy() -> tuple[float, float]:
    """The share of a copy's bandwidth at one row."""
    slower, faster = (_read_gb(1) / COPY_GB_S * rate for rate in GOALS[1].expected)
    return slower, faster


def _read_gb(rows: int) -> float:
    kv_bytes = 4 * 1024 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * LLAMA_8B.num_layers
    return (weight_bytes() + rows * kv_bytes) / 1e9


def switched() -> str:
    """What the switches for few rows should gain at one row: launches and bytes that are saved, at expected rates."""
    lines = ["| PDSERVE_GPU | launches | expected at b=1, tok/s |", "|---|---|---|"]
    for told, merged, fused in (
        ("", False, False),
        ("merge=fused", True, False),
        ("products=split-k", False, True),
        ("merge=fused,products=split-k", True, True),
    ):
        slower, faster = (
            decode_floor(LLAMA_8B, 1, 1024, rates=rates, is_merged=merged, is_fused=fused) for rates in (SLOWER, FASTER)
        )
        lines.append(
            f"| {told and f'`{told}`'} | {slower.num_kernels} | {1 / slower.step_s:.0f} to {1 / faster.step_s:.0f} |"
        )
    return "\n".join(lines)


def mixed_ratio(contexts: tuple[int, ...] = MIXED) -> float:
    """Time of a layer's attention and merge, divided by the time for its bytes at the rate of attention."""
    attend, merge = attention_kernels(LLAMA_8B, contexts)
    kv_bytes = 4 * sum(contexts) * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim
    return (attend.seconds(COPY_GB_S) + merge.seconds(COPY_GB_S)) / (
        kv_bytes / (BEST.attention_share * COPY_GB_S * 1e9)
    )


def mixed_lengths() -> str:
    """Against the time for the bytes: at the rate that attention reaches where all lengths are equal."""
    batches = {
        "1 x 1k": (1024,),
        "1 x 32k": (32_768,),
        "128 x 1k": (1024,) * 128,
        "32k and 127 x 1k": MIXED,
        "128k and 255 x 100": (131_072, *[100] * 255),
    }
    lines = [
        "| contexts | programs | tiles: fullest, mean | fullest over mean, with parts | us a layer | over its bytes |",
        "|---|---|---|---|---|---|",
    ]
    for name, contexts in batches.items():
        found = attention_parts(LLAMA_8B, contexts)
        loads = [sum(part.end - part.begin for part in found if part.program == one.program) for one in found]
        busy = len({part.program for part in found})
        mean = sum(part.end - part.begin for part in found) / busy
        attend, merge = attention_kernels(LLAMA_8B, contexts)
        took_us = (attend.seconds(COPY_GB_S) + merge.seconds(COPY_GB_S)) * 1e6
        lines.append(
            f"| {name} | {busy} x 8 | {max(loads)}, {mean:.1f} | {imbalance(found):.3f}, {attend.imbalance:.3f} "
            f"| {took_us:.1f} | {mixed_ratio(contexts):.2f} |"
        )
    lines.append(
        f"\nBound for 32k among 127 of 1k: {MIXED_BOUND}. Two starts of {BEST.start_s * 1e6:.0f} us are in it."
    )
    return "\n".join(lines)
