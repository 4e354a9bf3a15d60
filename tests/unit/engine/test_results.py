"""Large results of kernels use freed memory again, and never memory that a tensor still needs."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from pdserve.engine.cpu.kernels import jit

if not jit.is_available():
    pytest.skip("numba is not installed", allow_module_level=True)

from pdserve.engine.cpu.kernels import task
from pdserve.engine.cpu.kernels.task import ResultMemory

ROW = 1 << 20


def test_freed_memory_is_used_again() -> None:
    memory = ResultMemory()
    first = memory.empty((3, ROW))
    address = first.data_ptr()
    assert address % 64 == 0
    assert (first.shape, first.dtype) == ((3, ROW), torch.float32)
    del first
    assert memory.free_bytes == 12 * ROW
    again = memory.empty((4, 2, ROW), torch.bfloat16)  # larger
    assert again.data_ptr() != address
    smaller = memory.empty((2, ROW), torch.float32)
    assert smaller.data_ptr() == address
    assert memory.free_bytes == 0


def test_memory_of_a_view_is_not_used_again() -> None:
    memory = ResultMemory()
    whole = memory.empty((4, ROW)).fill_(7)
    address, view = whole.data_ptr(), whole.view(2, -1)[1, 5:10].unsqueeze(0)
    del whole
    gc.collect()
    other = memory.empty((4, ROW)).fill_(8)
    assert (view == 7).all()
    del view
    gc.collect()
    assert other.data_ptr() != address
    assert memory.empty((4, ROW)).data_ptr() == address


def test_a_small_result_does_not_use_much_larger_memory() -> None:
    memory = ResultMemory()
    memory.empty((8, ROW))
    assert memory.free_bytes == 32 * ROW
    small = memory.empty((2, ROW))
    assert memory.free_bytes == 32 * ROW
    assert small.numel() == 2 * ROW


def test_little_memory_is_left_to_torch() -> None:
    memory = ResultMemory()
    memory.empty((10, 10))
    assert memory.free_bytes == 0


def test_kept_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_MOST_KEPT_BYTES", 20 * ROW)
    memory = ResultMemory()
    tensors = [memory.empty((rows, ROW)) for rows in (1, 2, 3, 4)]
    newest = tensors[-1].data_ptr()
    while tensors:
        del tensors[0]
    assert memory.free_bytes == 16 * ROW
    assert memory.empty((4, ROW)).data_ptr() == newest
    memory.empty((6, ROW))  # alone it is more than may be kept
    assert memory.free_bytes == 0


AT_EXIT = """
import atexit
import os
def last() -> None:
    if task.empty(SHAPE).data_ptr() == kept.data_ptr():
        os._exit(3)
atexit.register(last)  # before torch and weakref register theirs, so it runs after them
from pdserve.engine.cpu.kernels import task
SHAPE = (1024, 1024)
kept = task.empty(SHAPE)
"""


def test_at_exit_memory_in_use_is_not_used_again() -> None:
    """Other threads may still compute."""
    assert subprocess.run([sys.executable, "-c", AT_EXIT], check=False).returncode == 0


def test_a_recording_uses_memory_of_its_own() -> None:
    memory = ResultMemory()
    with task.recording():
        memory.empty((4, ROW))
    assert memory.free_bytes == 0
