"""Tensors are read byte for byte, each once, and errors name their cause."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.load.checkpoint_files import StoredTensor
from pdserve.engine.load.tensor_reader import LoadScratch, TensorReader

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
def test_every_byte_arrives(tmp_path: Path, num_threads: int, ahead_bytes: int) -> None:
    order, data = tensors(tmp_path, 1, 5 * MIB + 3, 0, MIB, 1000)
    with TensorReader(order, num_threads=num_threads, ahead_bytes=ahead_bytes) as reader:
        for tensor in order:
            target = bytearray(tensor.num_bytes)
            reader.read(tensor, memoryview(target))
            assert target == data[tensor.begin : tensor.begin + tensor.num_bytes]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


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
