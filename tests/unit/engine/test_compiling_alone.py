"""Workers that start together on a new machine compile a kernel only once."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.kernels import jit

WAIT_S = 30.0


def kernel(folder: Path) -> Any:
    return SimpleNamespace(stats=SimpleNamespace(cache_path=str(folder)), __module__="pdserve.engine.kernels.paged")


def test_the_second_waits_for_the_first_and_later_ones_for_none(tmp_path: Path) -> None:
    """flock keeps two openings of a file apart, in one process or in two."""
    entered = threading.Event()

    def wait() -> None:
        with jit.compiling_alone(kernel(tmp_path)):
            entered.set()

    with jit.compiling_alone(kernel(tmp_path)):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.2), "the first still compiles"
        (tmp_path / "paged.attend.nbi").touch()
        with jit.compiling_alone(kernel(tmp_path)):
            pass  # what is stored is loaded by all at once
    waiting.join(WAIT_S)
    assert entered.is_set()


def test_one_that_compiles_for_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_COMPILE_S", 0.1)
    with jit.compiling_alone(kernel(tmp_path)), jit.compiling_alone(kernel(tmp_path)):
        pass


def test_nothing_is_locked_where_nothing_can_be_stored(tmp_path: Path) -> None:
    for one in (kernel(tmp_path / "missing"), lambda: None):
        with jit.compiling_alone(one):
            pass
    assert list(tmp_path.iterdir()) == []


def test_numba_says_where_it_stores_a_kernel() -> None:
    pytest.importorskip("numba")
    from pdserve.engine.kernels.paged import make_attend

    attend = make_attend(8, 4, "float32")
    assert Path(attend.stats.cache_path).is_dir()  # type: ignore[attr-defined]
    assert attend.__module__ == "pdserve.engine.kernels.paged"
