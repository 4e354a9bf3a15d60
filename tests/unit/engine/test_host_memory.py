"""The access that another process has to a pool's shared memory."""

from __future__ import annotations

import gc
import mmap
import os

import pytest

from pdserve.engine.memory.host import HostMemory, is_sealed


def test_another_mapping_sees_what_is_written_and_cannot_write() -> None:
    memory = HostMemory(10_000)
    assert (len(memory.buffer), memory.descriptor is not None) == (10_000, True)
    assert memory.descriptor is not None
    theirs = mmap.mmap(memory.descriptor, 10_000, prot=mmap.PROT_READ)
    memory.buffer[9_999] = 7
    assert theirs[9_999] == 7
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 10_000)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 2**20)
    assert is_sealed(memory.descriptor)


def test_owners_join_only_before_the_seal() -> None:
    memory = HostMemory(10_000, is_sealed=False)
    assert memory.descriptor is not None
    assert not is_sealed(memory.descriptor)
    other = HostMemory(10_000, os.dup(memory.descriptor))
    with pytest.raises(ValueError, match="length"):
        HostMemory(20_000, os.dup(memory.descriptor))
    memory.seal()
    other.buffer[9_999] = 7
    memory.buffer[0] = 8
    assert (memory.buffer[9_999], other.buffer[0]) == (7, 8)
    with pytest.raises(PermissionError):
        HostMemory(10_000, os.dup(memory.descriptor))
    assert is_sealed(memory.descriptor)


def test_a_reopened_memory_file_cannot_be_written() -> None:
    memory = HostMemory(4096)
    again = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 4096)
    os.close(again)


def test_the_descriptor_ends_with_the_memory() -> None:
    memory = HostMemory(4096)
    descriptor = memory.descriptor
    assert descriptor is not None
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_empty_memory_file() -> None:
    assert len(HostMemory(0).buffer) == 0
