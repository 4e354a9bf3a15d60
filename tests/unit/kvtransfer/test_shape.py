"""A shape's sizes in bytes, and which shapes can exchange blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.reshape.convert import BlockArrays
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import LOSSES, MOST, KvShape, Loss, check_convertible, is_same_bytes
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.toy import CELL_BYTES, ToyEngine

PLAIN = KvShape(layout="block-major.v1", dtype="float32", num_layers=4, num_kv_heads=8, head_dim=32, block_size=16)
SMALL = replace(PLAIN, layout="block-major-int8.v1", dtype="int8")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@settings(deadline=None)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 9, 5, 9))),
    seed=st.integers(0, 99),
)
def test_block_bytes_match_the_engines_pool(dtype: str, sizes: tuple[int, int, int, int], seed: int) -> None:
    num_layers, block_size, num_kv_heads, head_dim = sizes
    engines = BlockShape(
        num_layers=num_layers,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
    )
    ours = KvShape(
        layout=engines.layout,
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    assert ours.block_bytes == engines.block_bytes
    pool = TorchPool(num_blocks=3, shape=engines, device=torch.device("cpu"))
    np.frombuffer(pool.buffer, np.uint8)[:] = np.random.default_rng(seed).integers(0, 256, pool.buffer.nbytes)
    views = BlockArrays(pool.buffer, ours.form)
    assert views.num_blocks == 3
    as_bits = {"bfloat16": torch.int16, "float8_e4m3fn": torch.int8}.get(dtype, pool.tensor.dtype)
    np.testing.assert_array_equal(views.values, pool.tensor.view(as_bits).numpy().view(views.values.dtype))
    if pool.scales is not None:
        np.testing.assert_array_equal(views.scales, pool.scales.numpy())
    assert np.shares_memory(views.values, np.frombuffer(pool.buffer, np.uint8)), "a view, not a copy"


def test_a_toys_cell_is_one_value() -> None:
    spec = ToyEngine(block_size=5).spec
    shape = KvShape(layout=spec.layout, dtype=spec.dtype, num_layers=1, num_kv_heads=1, head_dim=1, block_size=5)
    assert shape.block_bytes == spec.block_bytes == 5 * CELL_BYTES


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": "layer-major.v1"}, "layout"),
        ({"layout": ""}, "layout"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "float16"}, "dtype"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": MOST + 1}, "num_layers"),
        ({"num_kv_heads": -1}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"tp_degree": 0}, "tp_degree"),
        ({"tp_degree": 3}, "tp_degree"),
        ({"num_kv_heads": 6, "tp_degree": 4}, "tp_degree"),
        ({"tp_degree": 2, "tp_rank": 2}, "tp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
    ],
)
def test_an_invalid_shape_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(PLAIN, **changes)
    assert caught.value.field == f"kv_shape.{field}"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_layers": 5}, "num_layers"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"layout": "toy.v1", "dtype": "uint64"}, "layout"),
    ],
)
def test_incompatible_fields_are_named(changes: dict[str, Any], field: str) -> None:
    for source, target in ((replace(PLAIN, **changes), PLAIN), (PLAIN, replace(PLAIN, **changes))):
        with pytest.raises(ConfigError) as caught:
            check_convertible(source, target)
        assert caught.value.field == f"kv_shape.{field}"
        assert str(getattr(target, field)) in caught.value.expected


def test_block_size_dtype_and_degree_may_differ() -> None:
    assert check_convertible(PLAIN, replace(PLAIN, block_size=33)) == Loss()
    assert check_convertible(PLAIN, replace(PLAIN, tp_degree=16, tp_rank=5)) == Loss()
    assert check_convertible(SMALL, PLAIN) == Loss()
    assert check_convertible(PLAIN, SMALL).of_largest == pytest.approx(1 / 254, rel=1e-3)
    assert check_convertible(PLAIN, replace(PLAIN, dtype="bfloat16")).relative == 1 / 256


def test_every_convertible_pair_has_an_error_bound() -> None:
    attention = ("float32", "bfloat16", "int8", "float8_e4m3fn")
    assert set(LOSSES) == {(a, b) for a in attention for b in attention} | {
        (other, other)
        for other in ("uint64", "float16", "uint8")  # only in opaque blocks, which nothing converts
    }


def test_fp8_blocks_are_as_large_as_int8_ones_and_less_exact() -> None:
    fp8 = replace(SMALL, layout="block-major-fp8.v1", dtype="float8_e4m3fn")
    assert check_convertible(fp8, replace(fp8, block_size=32)) == Loss()
    assert fp8.block_bytes == SMALL.block_bytes
    assert check_convertible(fp8, PLAIN) == Loss()
    assert check_convertible(PLAIN, fp8).relative == pytest.approx(1 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"block_size": 32}, False),
        ({"tp_degree": 2}, False),
        ({"dtype": "bfloat16"}, False),
        ({"num_kv_heads": 16, "tp_degree": 2}, True),  # Impossible within one model, but the bytes are equal.
        ({"num_kv_heads": 16, "tp_degree": 2, "tp_rank": 1}, False),
    ],
)
def test_same_bytes(changes: dict[str, Any], is_same: bool) -> None:
    assert is_same_bytes(PLAIN, replace(PLAIN, **changes)) == is_same


def test_ranks_share_the_heads_and_replicate_them_where_there_are_more_ranks() -> None:
    def held(tp_degree: int) -> list[tuple[int, int]]:
        ranks = [replace(PLAIN, num_kv_heads=4, tp_degree=tp_degree, tp_rank=rank) for rank in range(tp_degree)]
        return [(rank.first_head, rank.num_heads) for rank in ranks]

    assert held(1) == [(0, 4)]
    assert held(2) == [(0, 2), (2, 2)]
    assert held(4) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert held(8) == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (3, 1)]


def test_a_rank_outside_its_degree_names_the_last() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(PLAIN, tp_degree=2, tp_rank=2)
    assert caught.value.expected == "0 to 1, below tp_degree"
