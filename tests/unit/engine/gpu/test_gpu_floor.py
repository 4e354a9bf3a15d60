"""The computed lower bound of a decode step: it counts the model's bytes, and the documentation has its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.work import decode_work
from benchmarks.gpu.claims import (
    GOALS,
    MIXED,
    MIXED_BOUND,
    PREFILL_GOAL,
    claims,
    mixed_lengths,
    mixed_ratio,
    switched,
)
from benchmarks.gpu.floor import COPY_GB_S, LLAMA_8B, decode_floor, expected_tokens_per_s, shape_of, table
from benchmarks.gpu.setting import SHAPES
from pdserve.engine.model.config import parse_config

DOCS = Path(__file__).parents[4] / "docs/gpu.md"


@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (128, 1024), (64, 8192)])
def test_kernels_read_little_more_than_the_model(rows: int, context: int) -> None:
    model = parse_config(SHAPES["llama-3.1-8b"], {})
    assert shape_of(model) == LLAMA_8B
    floor = decode_floor(LLAMA_8B, rows, context)
    read = decode_work(model, "bfloat16", 2, rows, context).read_bytes
    moved = sum(one.count * one.num_bytes for one in floor.kernels)
    assert read <= moved <= 1.15 * read
    assert floor.kernels_s > read / COPY_GB_S / 1e9
    assert floor.step_s > floor.kernels_s


def test_a_step_is_longer_for_more_rows_longer_contexts_and_slower_memory() -> None:
    step_s = decode_floor(LLAMA_8B, 8, 1024).step_s
    assert decode_floor(LLAMA_8B, 64, 1024).step_s > step_s
    assert decode_floor(LLAMA_8B, 8, 8192).step_s > step_s
    assert decode_floor(LLAMA_8B, 8, 1024, copy_gb_s=2000.0).step_s > step_s


def test_the_expected_ranges_are_below_the_best_and_contain_what_was_reviewed() -> None:
    """From public figures of the same shape: 141 to 150, 7,800 to 8,700 and 36,000 to 39,500 tok/s."""
    for goal, slower, faster in (
        (GOALS[1], 141, 150),
        (GOALS[128], 7_800, 8_700),
        (PREFILL_GOAL, 36_000, 39_500),
    ):
        assert goal.expected == pytest.approx((slower, faster), rel=0.01)
    for rows in (1, 16, 128):
        slower, faster = expected_tokens_per_s(rows)
        assert slower < faster < rows / decode_floor(LLAMA_8B, rows, 1024).step_s


def test_switches_save_launches() -> None:
    def launches(**switches: bool) -> int:
        return decode_floor(LLAMA_8B, 1, 1024, **switches).num_kernels

    assert launches() - launches(is_merged=True) == LLAMA_8B.num_layers
    assert launches() - launches(is_fused=True) == 3 * LLAMA_8B.num_layers


def test_a_long_row_costs_its_bytes() -> None:
    assert mixed_ratio(MIXED) <= MIXED_BOUND


def test_the_documentation_has_the_current_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text
    assert claims() in text
    assert switched() in text
    assert mixed_lengths().splitlines()[5] in text
