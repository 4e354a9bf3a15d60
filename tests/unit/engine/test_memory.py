"""A model that does not fit is rejected with both sizes, before any weight is read."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.interface import Engine
from pdserve.engine.load import build_engine
from pdserve.engine.load import device as memory
from pdserve.engine.load.checkpoint_files import Checkpoint, StoredTensor
from pdserve.engine.load.device import available_bytes, reads_bfloat16_of
from pdserve.engine.load.load_plan import check_fits, weight_bytes
from pdserve.engine.memory.host import HostMemory, cgroup_bytes, free_bytes, host_bytes, is_sealed, usable_cores
from pdserve.engine.model import forms
from pdserve.engine.model.config import read_config
from pdserve.engine.model.forms import form_of, has_panels, reads_bfloat16


def test_the_estimate_counts_every_matrix(tiny: Callable[[str], Path]) -> None:
    config = read_config(tiny("llama"))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert weight_bytes(config, torch.float32, rounding="none") == 4 * (3 * layer + 2 * 384 * 64)
    assert weight_bytes(config, torch.bfloat16, rounding="none") == 2 * (3 * layer + 2 * 384 * 64)
    assert weight_bytes(config, torch.float32, rounding="int8") == 3 * layer + 384 * 64 + 4 * 384 * 64


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As when weights are loaded."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_large_matrices_of_a_bfloat16_checkpoint_count_two_bytes_per_weight(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(tiny("llama"))
    whole = weight_bytes(config, torch.float32, rounding="none")
    assert weight_bytes(config, torch.float32, rounding="none", halves_float32=True) == whole  # these are small
    monkeypatch.setattr(forms, "_TRIED_SIZE", 64)
    monkeypatch.setattr(forms, "_LEAST_INPUTS", 64)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    kept = weight_bytes(config, torch.float32, rounding="none", halves_float32=True)
    assert kept == 2 * (3 * layer + 384 * 64) + 4 * 384 * 64


@pytest.mark.parametrize(
    ("dtypes", "device", "compute", "rounding", "expected"),
    [
        (("BF16", "BF16"), "cpu", torch.float32, "none", True),
        (("BF16", "F32"), "cpu", torch.float32, "none", False),
        (("BF16", "BF16"), "cuda", torch.float32, "none", False),
        (("BF16", "BF16"), "cpu", torch.float32, "int8", False),
        (("BF16", "BF16"), "cpu", torch.bfloat16, "none", False),
    ],
)
def test_weights_are_kept_in_bfloat16_if_all_matrices_are_stored_so(
    dtypes: tuple[str, ...], device: str, compute: torch.dtype, rounding: Any, expected: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(memory, "reads_bfloat16", lambda: True)
    tensors = {str(i): StoredTensor(Path("f"), str(i), dtype, (2, 2), 0, 8) for i, dtype in enumerate(dtypes)}
    tensors["norm"] = StoredTensor(Path("f"), "norm", "F32", (2,), 0, 8)
    checkpoint = Checkpoint((), tensors)
    assert reads_bfloat16_of(checkpoint, torch.device(device), compute, rounding) == expected
    assert not reads_bfloat16_of(None, torch.device(device), compute, rounding)
    monkeypatch.setattr(memory, "reads_bfloat16", lambda: False)
    assert not reads_bfloat16_of(checkpoint, torch.device(device), compute, rounding)


@pytest.mark.parametrize("shape", [(4096, 768), (768, 4096), (2304, 768), (8192, 128)])
def test_the_trial_answers_what_large_products_do(shape: tuple[int, int], one_thread: None) -> None:
    assert has_panels(*shape)
    is_halved = form_of("none", torch.randn(shape).bfloat16().float()).name in ("widened", "float32 tiles")
    assert reads_bfloat16() == is_halved
    assert form_of("none", torch.randn(shape)).name == "float32 packed"


def test_a_model_that_does_not_fit_names_both_sizes() -> None:
    check_fits(10, 5, 15)
    check_fits(10, 5, None)
    with pytest.raises(ConfigError, match=r"model: got 8.00 GB of weights and 1.00 GB of KV.* the 8.50 GB that are"):
        check_fits(8_000_000_000, 1_000_000_000, 8_500_000_000)


def test_memory_is_checked_before_loading(
    tiny: Callable[[str], Path], open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_engine, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(build_engine, "load_weights", None)
    with pytest.raises(ConfigError, match="of weights and"):
        open_engine(tiny("llama"))


def test_memory_is_read_from_the_host_and_from_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert host_bytes(meminfo) == 64 * 1024
    assert host_bytes(tmp_path / "none") is None
    assert cgroup_bytes(tmp_path) is None
    for name, text in (("max", "5000\n"), ("current", "3000\n"), ("stat", "anon 1\ninactive_file 700\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert cgroup_bytes(tmp_path) == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_bytes(tmp_path) is None
    seen = available_bytes(torch.device("cpu"))
    assert seen is None or seen > 0


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "user.slice/session").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/user.slice/session\n")
    (proc / "meminfo").write_text("MemAvailable: 8 kB\n")
    assert free_bytes(proc, root) == 8192
    cores = usable_cores(proc, root)
    (root / "user.slice/memory.max").write_text("5000\n")
    (root / "user.slice/memory.current").write_text("1000\n")
    (root / "user.slice/session/memory.max").write_text("max\n")
    assert free_bytes(proc, root) == 4000
    (root / "user.slice/session/cpu.max").write_text("max 100000\n")
    assert usable_cores(proc, root) == cores
    (root / "user.slice/cpu.max").write_text("50000 100000\n")
    assert usable_cores(proc, root) == 1


def test_control_groups_of_version_1_count(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "memory/pods/one").mkdir(parents=True)
    (proc / "self/cgroup").write_text("5:cpu,cpuacct:/other\n3:memory:/pods/one\n1:name=systemd:/\n0::/\n")
    (proc / "meminfo").write_text("MemAvailable: 8 kB\n")
    for group, limit in (("", 2**63 - 4096), ("pods", 5000), ("pods/one", 2**63 - 4096)):
        (root / "memory" / group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (root / "memory" / group / "memory.usage_in_bytes").write_text("3000\n")
        (root / "memory" / group / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 700\n")
    assert free_bytes(proc, root) == 2700


def test_unknown_memory_is_not_checked(tmp_path: Path) -> None:
    assert free_bytes(tmp_path, tmp_path) is None
    assert usable_cores(tmp_path, tmp_path) >= 1


# --- memory that processes share ------------------------------------------------------------------------------
# The access that another process has to a pool's shared memory.


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
