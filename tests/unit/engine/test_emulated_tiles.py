"""The kernels for AMX are tested on CPUs without it, too, with tile instructions that are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.engine.kernels import jit

ROOT = Path(__file__).parents[3]
FOLDER = "tests/unit/engine"


def has_tiles() -> bool:
    if not jit.is_available():
        return True  # nothing to emulate
    from pdserve.engine.kernels import amx

    return amx.is_supported("bfloat16") and amx.is_supported("int8")


@pytest.mark.skipif(has_tiles(), reason="this CPU has AMX, so the same tests run on it, or there is no numba")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests",
    [
        [f"{FOLDER}/test_amx_gemm.py"],
        [f"{FOLDER}/test_amx_attention.py"],
        [f"{FOLDER}/test_int4.py", "-k", "rounded_numbers or overflow or any_batch"],
    ],
)
def test_emulated_tiles(tests: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.support.emulated_tiles", *tests],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
