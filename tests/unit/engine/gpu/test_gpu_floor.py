"""The computed lower bound of a decode step: it counts the model's bytes, and the documentation has its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.work import decode_work
from benchmarks.gpu.claims import MIXED, MIXED_BOUND, claims, mixed_lengths, mixed_ratio
from benchmarks.gpu.floor import COPY_GB_S, LLAMA_8B, decode_floor, shape_of, table
from benchmarks.gpu.setting import SHAPES
from pdserve.engine.config import parse_config

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


def test_a_long_row_costs_its_bytes() -> None:
    assert mixed_ratio(MIXED) <= MIXED_BOUND


def test_the_documentation_has_the_current_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text
    assert claims() in text
    assert mixed_lengths().splitlines()[5] in text
