"""A checkpoint's weights are read completely and once, or rejected with the reason."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.core.errors import ConfigError, InternalError, ModelError
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.checkpoint_files import ALL_BITS, StoredTensor, checkpoint_hash, open_checkpoint
from pdserve.engine.load.tensor_reader import LoadScratch, TensorReader
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model.config import read_config
from pdserve.engine.model.linear import Linear

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy that a test may damage."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "model"))


def load(folder: Path, **settings: Any) -> Any:
    return load_weights(read_config(folder), open_checkpoint(folder), CPU, torch.float32, **settings)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights over two files with an index; returns its weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    write_index(folder, weight_map)
    return weight_map


def matrix(linear: Linear, num_inputs: int) -> Tensor:
    """The weights [N, K] in any stored form: their product with the identity matrix adds only zeros."""
    return linear(torch.eye(num_inputs)).T


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_equal_one_file(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    seen: list[tuple[int, int]] = []
    parts = load(folder, progress=lambda done, total: seen.append((done, total)))
    assert torch.equal(matrix(whole.head, 64), matrix(parts.head, 64))
    assert all(
        torch.equal(matrix(a.qkv, 64), matrix(b.qkv, 64)) for a, b in zip(whole.layers, parts.layers, strict=True)
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_widened_exactly(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, lambda stored: stored.update({name: one.to(dtype) for name, one in stored.items()}))
    weights = load(folder)
    assert torch.equal(weights.embedding_VE, tensors["model.embed_tokens.weight"].to(dtype))  # Widened row by row.
    assert torch.equal(matrix(weights.layers[1].mlp.gate_up, 64)[96:], tensors[NAME].to(dtype).float())


def test_redundant_tensors_are_ignored(tiny: Callable[[str], Path], folder: Path) -> None:
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    rewrite(folder, lambda stored: stored.update({"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies}))
    load(folder)
    tied = Path(shutil.copytree(tiny("llama-tied-biased"), folder.parent / "tied"))
    rewrite(tied, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"] + 0}))
    weights = load(tied)
    assert torch.equal(matrix(weights.head, weights.embedding_VE.shape[1]), weights.embedding_VE)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.pop(NAME))
    with pytest.raises(ModelError, match=rf"{NAME}: got no such tensor \(1 are missing\)"):
        load(folder)


def test_a_tensor_that_nothing_uses_is_named(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"q_proj.bias: got a tensor that nothing uses"):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({NAME: torch.ones(64, 96)}))
    with pytest.raises(ModelError, match=rf"{NAME}: got shape \[64, 96\], expected \[96, 64\]"):
        load(folder)


def test_an_unsupported_dtype_is_rejected(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({NAME: torch.ones(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=rf"{NAME}: got dtype I8, expected F32 or BF16 or F16"):
        load(folder)


@pytest.mark.parametrize(("dtype", "shape", "num_bytes"), [("U8", [3], 3), ("F8_E8M0", [2, 2], 4), ("F4", [3, 4], 6)])
def test_only_another_engine_reads_other_dtypes(dtype: str, shape: list[int], num_bytes: int, folder: Path) -> None:
    file = folder / "model.safetensors"

    def write(shape: list[int]) -> None:
        header = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))

    write(shape)
    [tensor] = open_checkpoint(folder, ALL_BITS).tensors.values()
    assert (tensor.dtype, tensor.num_bytes) == (dtype, num_bytes)
    with pytest.raises(ModelError, match=f"a of dtype {dtype}, expected one of F32"):
        open_checkpoint(folder)
    write([7, 7])
    with pytest.raises(ModelError, match="bytes"):
        open_checkpoint(folder, ALL_BITS)


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 1000, -1])
def test_a_truncated_file_is_refused(folder: Path, num_bytes: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match="truncated") as caught:
        load(folder)
    assert caught.value.field == "model.safetensors"


def test_bytes_without_a_tensor_are_rejected(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0\0\0\0")
    with pytest.raises(ModelError, match="as its header says"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    ],
)
def test_a_false_header_is_rejected(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert caught.value.field == "model.safetensors"


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors: got nothing in"):
        load(folder)


def test_a_tensor_in_two_shards_is_named(folder: Path) -> None:
    weight_map = shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    first_name = min(weight_map)
    save_file(load_file(second) | {first_name: torch.ones(1)}, second)
    with pytest.raises(ModelError, match=rf"{first_name}, also in model-00001"):
        load(folder)


def test_an_index_with_missing_tensors_is_rejected(folder: Path) -> None:
    weight_map = shard(folder)
    write_index(folder, weight_map | {"model.layers.9.mlp.up_proj.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(ModelError, match=r"no tensor model.layers.9.mlp.up_proj.weight"):
        load(folder)
    write_index(folder, {"a": "../model.safetensors"})
    with pytest.raises(ModelError, match="files in the same folder"):
        load(folder)
    write_index(folder, [1])
    with pytest.raises(ModelError, match=r"model.safetensors.index.json"):
        load(folder)


def test_shards_without_an_index_are_refused(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="an index of the shards"):
        load(folder)


def test_a_pickle_checkpoint_is_rejected_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: got a pickle checkpoint.*safe_serialization=True"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights in"):
        load(folder)


def test_the_hash_depends_on_config_and_weights(folder: Path) -> None:
    def name_of() -> str:
        return checkpoint_hash(folder, open_checkpoint(folder))

    first = name_of()
    assert first == name_of()
    rewrite(folder, lambda stored: stored.update({name: one * 1.01 for name, one in stored.items()}))
    tuned = name_of()  # A fine-tune has the same config, header and size.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))
    assert len({first, tuned, name_of()}) == 3


def test_the_spec_matches_the_pool(folder: Path, open_engine: Callable[..., Engine]) -> None:
    spec = open_engine(folder, kv_blocks=8).spec
    assert (spec.model, spec.dtype, spec.layout) == ("model", "float32", "block-major.v1")
    assert spec.block_bytes == 3 * 2 * 16 * 2 * 16 * 4
    assert spec.max_context_tokens == 8 * 16  # Less than the model's 1024, because the pool is smaller.
    assert spec.eos_token_ids == (2,)
    engine = open_engine(folder, kv_blocks=0, kv_memory_bytes=10 * spec.block_bytes + 5, max_context_tokens=100)
    assert (engine.spec.num_blocks, engine.spec.max_context_tokens) == (10, 100)
    assert len(engine.pool.buffer) == 10 * spec.block_bytes
    assert engine.pool.buffer.contiguous


def test_settings_that_do_not_fit_the_model_are_refused(folder: Path, open_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match=r"max_context_tokens: got 2000, expected at most 1024"):
        open_engine(folder, max_context_tokens=2000)
    with pytest.raises(ConfigError, match=r"kv_memory_bytes: got 100, expected at least 12288"):
        open_engine(folder, kv_blocks=0, kv_memory_bytes=100)


@pytest.mark.parametrize(("name", "value"), [("dtype", "float16"), ("kv_dtype", "fp8_e4m3"), ("kv_dtype", "fp8_e5m2")])
def test_dtypes_of_another_engine_are_refused(
    name: str, value: str, folder: Path, open_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(ConfigError, match="for the engine vllm") as caught:
        open_engine(folder, **{name: value})
    assert caught.value.field == name


def test_a_wrong_row_is_refused_before_anything_is_written(folder: Path, open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(folder, kv_blocks=4)
    fine, wrong = Row(tokens=[5], start=0, blocks=[1]), Row(tokens=[384], start=0, blocks=[2])
    with pytest.raises(InternalError, match="row 1 cannot be computed: a token id lies outside the vocabulary of 384"):
        engine.step([fine, wrong])
    assert not any(engine.pool.buffer)
    assert engine.step([]) == []


# --- the reader of tensors ------------------------------------------------------------------------------------
# Tensors are read byte for byte, each once, and errors name their cause.

MIB = 2**20


def tensors(folder: Path, *sizes: int) -> tuple[list[StoredTensor], bytes]:
    file, data = folder / "data", os.urandom(7 + sum(sizes))
    file.write_bytes(data)
    begins = [7 + sum(sizes[:index]) for index in range(len(sizes))]
    return [
        StoredTensor(file, f"t{index}", "I8", (size,), begins[index], size) for index, size in enumerate(sizes)
    ], data


def read(order: list[StoredTensor], *tensors: StoredTensor, size: int = 0) -> None:
    with TensorReader(order) as reader:
        for tensor in tensors:
            reader.read(tensor, memoryview(bytearray(size or tensor.num_bytes)))


@pytest.mark.parametrize("ahead_bytes", [1, 10**12])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_every_byte_arrives(
    new_threads: Callable[[], list[threading.Thread]], tmp_path: Path, num_threads: int, ahead_bytes: int
) -> None:
    order, data = tensors(tmp_path, 1, 5 * MIB + 3, 0, MIB, 1000)
    with TensorReader(order, num_threads=num_threads, ahead_bytes=ahead_bytes) as reader:
        for tensor in order:
            target = bytearray(tensor.num_bytes)
            reader.read(tensor, memoryview(target))
            assert target == data[tensor.begin : tensor.begin + tensor.num_bytes]
    assert not [thread for thread in new_threads() if thread.name.startswith("read")]


def test_a_tensor_is_read_exactly_once(tmp_path: Path) -> None:
    order, _ = tensors(tmp_path, 10, 20)
    read(order, *order)
    with pytest.raises(InternalError, match="t0 is read a second time"):
        read(order, order[0], order[0])
    with pytest.raises(InternalError, match="was not announced"):
        read(order[:1], *order)
    with pytest.raises(InternalError, match=r"t1 was never read \(1 such\)"):
        read(order, order[0])
    with pytest.raises(InternalError, match="t0 has 10 bytes, its place 11"):
        read(order, order[0], size=11)
    with pytest.raises(InternalError, match="twice in the order"):
        TensorReader([*order, order[0]])


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    order, _ = tensors(tmp_path, 4 * MIB)
    os.truncate(order[0].file, 3 * MIB)
    with pytest.raises(ModelError, match=r"t0: got data ends after \d+ bytes of it"):
        read(order, *order)
    order[0].file.unlink()
    with pytest.raises(ModelError, match=r"data: got .*No such file"):
        read(order, *order)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, _ = tensors(tmp_path, 10)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelError, match=r"t0: got .*Input/output error in data"):
        read(order, *order)


def test_scratch_memory_is_reused_or_freed() -> None:
    scratch = LoadScratch()
    large = scratch.take(300 * MIB).data_ptr()
    assert scratch.take(60 * MIB).data_ptr() == large
    scratch.take(20 * MIB)
    assert scratch._bytes is not None
    assert scratch._bytes.numel() == 20 * MIB
    assert scratch.take(0).numel() == 0
