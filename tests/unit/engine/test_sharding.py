"""Shards of matrices: the ranks together have every weight once, and each reads only its own bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError, ModelError
from pdserve.engine.load.checkpoint import Needs, cut_scale, cut_tensor
from pdserve.engine.load.checkpoint_files import StoredTensor, open_checkpoint
from pdserve.engine.load.tensor_reader import TensorReader
from pdserve.engine.model.config import read_config
from pdserve.engine.model.parameters import Cut, Shard, build_weights, rank_config
from pdserve.engine.model.quantisation import Scheme
from tests.support.examples import examples


@given(size=st.integers(1, 9), units=st.integers(1, 40), width=st.integers(1, 5))
def test_spans_of_all_ranks_cover_everything_in_order(size: int, units: int, width: int) -> None:
    total = units * width
    spans = [Shard(rank, size).span(total, units) for rank in range(size)]
    assert all(begin % width == 0 and end % width == 0 and begin < end for begin, end in spans)
    if units >= size:
        assert (spans[0][0], spans[-1][1]) == (0, total)
        assert all(left[1] == right[0] for left, right in pairwise(spans))
    else:
        assert {begin for begin, _ in spans} == {unit * width for unit in range(units)}, "each piece is held"
        assert all(end - begin == width for begin, end in spans)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_cut_tensor_equals_a_part_of_the_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    first_row = data.draw(st.integers(0, rows - 1))
    last_row = data.draw(st.integers(first_row + 1, rows))
    first = data.draw(st.integers(0, columns - 1))
    last = data.draw(st.integers(first + 1, columns))
    whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    file = tmp_path_factory.mktemp("cut") / "data"
    file.write_bytes(b"head" + whole.tobytes())
    stored = StoredTensor(file, "w", "F32", whole.shape, 4, whole.nbytes)
    part = cut_tensor(stored, (first_row, last_row), (first, last))
    target = np.empty(part.shape, np.float32)
    with TensorReader([part]) as reader:
        reader.read(part, memoryview(target).cast("B"))  # type: ignore[arg-type]
    assert np.array_equal(target, whole[first_row:last_row, first:last])


def test_scales_follow_their_blocks_and_are_never_divided() -> None:
    scheme = Scheme("F8_E4M3", "weight_scale_inv", (4, 2))
    stored = StoredTensor(Path("f"), "s", "F32", (3, 4), 0, 48)  # Of a matrix [12, 8].
    part = cut_scale(stored, scheme, (4, 12), (0, 8), (12, 8))
    assert (part.shape, part.begin) == ((2, 4), 16)
    part = cut_scale(stored, scheme, (0, 12), (4, 8), (12, 8))
    assert (part.shape, part.begin, part.run_bytes, part.stride_bytes) == ((3, 2), 8, 8, 16)
    with pytest.raises(ModelError, match="another tensor_parallel"):
        cut_scale(stored, scheme, (0, 6), (0, 8), (12, 8))
    one = replace(stored, shape=(), num_bytes=4)
    assert cut_scale(one, Scheme("F8_E4M3", "weight_scale", (None, None)), (0, 6), (0, 4), (12, 8)) is one
    flat = replace(stored, shape=(12,), num_bytes=48)
    assert cut_scale(flat, Scheme("I8", "weight_scale", (1, None)), (6, 12), (0, 8), (12, 8)).shape == (6,)


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3-moe", "gemma3"])
def test_ranks_together_read_each_cut_matrix_once(tiny: Callable[[str], Path], name: str) -> None:
    folder = tiny(name)
    config = read_config(folder)
    stored = dict(open_checkpoint(folder).tensors)
    if config.is_tied:
        stored.pop("lm_head.weight", None)
    read: dict[str, int] = {}
    for rank in range(2):
        needs = Needs(config.quantisation, Shard(rank, 2))
        build_weights(config, needs)
        needs.check(stored)
        for part in needs.cut(stored).values():
            read[part.name] = read.get(part.name, 0) + part.num_bytes
    for tensor_name, num_bytes in read.items():
        is_shared_head = config.num_kv_heads == 1 and ("k_proj" in tensor_name or "v_proj" in tensor_name)
        is_whole = "norm" in tensor_name or ".gate.weight" in tensor_name or is_shared_head
        assert num_bytes == stored[tensor_name].num_bytes * (2 if is_whole else 1), tensor_name
    assert read.keys() == stored.keys()


def test_indivisible_heads_are_rejected(tiny: Callable[[str], Path]) -> None:
    config = read_config(tiny("llama"))  # 4 query heads, 2 kv heads.
    assert rank_config(config, Shard(0, 2)).num_kv_heads == 1
    assert rank_config(config, Shard(3, 4)).num_kv_heads == 1, "two ranks hold the same kv head"
    with pytest.raises(ConfigError, match="divides 4 query heads"):
        rank_config(config, Shard(0, 3))


def test_only_the_first_rank_adds_the_bias() -> None:
    into, out = Cut("inputs", (4,)), Cut("outputs", (4,))
    assert [Shard(rank, 2).has_bias(into) for rank in range(2)] == [True, False]
    assert all(Shard(rank, 2).has_bias(cut) for rank in range(2) for cut in (out, None))
