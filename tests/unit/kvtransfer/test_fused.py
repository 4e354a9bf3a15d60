"""The fused copy and hash equals a plain copy and the xxhash package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.devices import fused
from pdserve.engine.memory.host import HostMemory
from tests.support.transfer_ends import HostPool

xxhash = pytest.importorskip("xxhash")
pytest.importorskip("numba")
import numpy as np  # noqa: E402

KIB = fused.KIB
ROOT = Path(__file__).parents[3]


def pools(num_blocks: int, block_bytes: int) -> tuple[HostMemory, HostMemory]:
    to, source = HostMemory(num_blocks * block_bytes), HostMemory(num_blocks * block_bytes)
    source.buffer[:] = np.random.default_rng(1).bytes(num_blocks * block_bytes)
    return to, source


@pytest.mark.parametrize("block_kib", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_a_fused_copy_writes_only_its_blocks(block_kib: int, count: int) -> None:
    size, num_blocks = block_kib * KIB, 19
    to, source = pools(num_blocks, size)
    targets = [7 * i % num_blocks for i in range(count)]
    sources = [(5 * i + 3) % num_blocks for i in range(count)]
    copier = fused.Copier.between(to.buffer, source.buffer.toreadonly(), size)
    assert copier is not None
    digest = copier.copy(targets, sources)
    expected = bytearray(num_blocks * size)
    for target, block in zip(targets, sources, strict=True):
        expected[target * size : (target + 1) * size] = source.buffer[block * size : (block + 1) * size]
    assert to.buffer == expected
    moved = b"".join(source.buffer[block * size : (block + 1) * size] for block in sources)
    assert digest == xxhash.xxh3_64_digest(moved)


@pytest.mark.parametrize("runs", [(4, 1), (1, 4), (4, 4)])
def test_a_fused_copy_between_pools_of_other_runs(runs: tuple[int, int]) -> None:
    to, source = (HostPool(19, 8 * KIB, seed, one) for seed, one in zip((5, 6), runs, strict=True))
    expected = [to.block(block) for block in range(19)]
    targets, sources = [3, 18, 4, 0], [9, 2, 0, 18]
    copier = fused.Copier.between(to.memory, source.memory.toreadonly(), 8 * KIB, runs)
    assert copier is not None
    digest = copier.copy(targets, sources)
    for target, block in zip(targets, sources, strict=True):
        expected[target] = source.block(block)
    assert to.blocks == b"".join(expected)
    assert digest == xxhash.xxh3_64_digest(b"".join(map(source.block, sources)))
    with pytest.raises(IndexError):
        copier.copy([19], [0])
    assert fused.Copier.between(to.memory, source.memory, 2 * KIB, runs) is None, "half a KiB in a run"


@pytest.mark.parametrize(("to", "source"), [([3], [0]), ([0], [3]), ([-1], [0]), ([0], [-1]), ([], []), ([0, 1], [0])])
def test_blocks_outside_a_pool_are_rejected_before_any_write(to: list[int], source: list[int]) -> None:
    memory, other = pools(3, KIB)
    copier = fused.Copier.between(memory.buffer, other.buffer, KIB)
    assert copier is not None
    with pytest.raises((IndexError, ValueError)):
        copier.copy(to, source)
    assert memory.buffer == bytes(3 * KIB)


def test_odd_or_unaligned_blocks_use_another_copy() -> None:
    to, source = pools(4, KIB)
    assert fused.Copier.between(to.buffer, source.buffer, 1000) is None
    assert fused.Copier.between(to.buffer[8:], source.buffer, KIB) is None


NOWHERE = """
import numba.core.caching
numba.core.caching.CacheImpl._locator_classes = []  # as in a read-only image without a home
import xxhash
from kvtransfer.devices import fused
from pdserve.engine.memory.host import HostMemory
to, source = HostMemory(4 * fused.KIB), HostMemory(4 * fused.KIB)
source.buffer[:] = bytes(range(256)) * 16
digest = fused.Copier.between(to.buffer, source.buffer, fused.KIB).copy([0, 1, 2], [3, 1, 0])
moved = b"".join(bytes(source.buffer[at * 1024 : (at + 1) * 1024]) for at in (3, 1, 0))
assert bytes(to.buffer) == moved + bytes(1024)
assert digest == xxhash.xxh3_64_digest(moved)
print("right")
"""


def test_machine_code_that_cannot_be_stored_is_recompiled() -> None:
    done = subprocess.run([sys.executable, "-c", NOWHERE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.returncode) == ("right\n", 0), done.stderr
