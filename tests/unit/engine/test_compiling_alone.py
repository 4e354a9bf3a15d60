"""Workers that start together on a new machine compile a kernel only once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from pdserve.engine.cpu.kernels import jit

WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which numba would store `kernel`."""
    monkeypatch.setattr(jit, "cache_folder", lambda function: tmp_path)
    return tmp_path


def kernel() -> None: ...


def test_a_second_process_waits_for_the_first(folder: Path) -> None:
    """flock distinguishes two open descriptors of a file, even within one process."""
    entered = threading.Event()

    def wait() -> None:
        with jit.compiling_alone(kernel):
            entered.set()

    with jit.compiling_alone(kernel):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.2), "the first still compiles"
        (folder / "paged.kernel-12.py311.nbi").touch()
        with jit.compiling_alone(kernel):
            pass  # A stored kernel is loaded by all processes at once.
    waiting.join(WAIT_S)
    assert entered.is_set()


def test_a_slow_compilation_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_COMPILE_S", 0.1)
    with jit.compiling_alone(kernel), jit.compiling_alone(kernel):
        pass


def test_without_a_cache_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (tmp_path / "missing", None):
        monkeypatch.setattr(jit, "cache_folder", lambda function, where=where: where)
        with jit.compiling_alone(kernel):
            pass
    assert list(tmp_path.iterdir()) == []


def test_each_kernel_has_its_own_file() -> None:
    """numba would number the kernels of a function in a shared index, which processes overwrite."""
    pytest.importorskip("numba")
    import torch

    from pdserve.engine.cpu.kernels import rows

    tag = f"py{sys.version_info.major}{sys.version_info.minor}"  # another Python may have stored its own files
    kernels = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1, 8, dtype=dtype)
        rows.rounded(x, torch.empty(1, 8), x)
        kernels.append(rows._rounded(str(dtype).removeprefix("torch."), "float32"))
    for kernel in kernels:
        stored = jit.cache_folder(kernel._function)
        assert stored is not None
        name = kernel._function.__qualname__
        assert len(list(stored.glob(f"*{name}-*.{tag}.nbi"))) == 1
        assert len(list(stored.glob(f"*{name}-*.{tag}.*.nbc"))) == 1


def test_other_sources_and_processors_have_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")

    def revision() -> str:
        jit._revision.cache_clear()
        return jit._revision()

    try:
        mine = revision()
        assert revision() == mine
        monkeypatch.setattr(jit, "target", lambda: ("another", "+avx2"))
        of_another_cpu = revision()
        monkeypatch.setattr(jit, "_SOURCES", tmp_path / "kernels")
        (tmp_path / "rounding.py").write_text("LEVELS = 127")
        assert len({mine, of_another_cpu, revision()}) == 3
    finally:
        monkeypatch.undo()
        jit._revision.cache_clear()
