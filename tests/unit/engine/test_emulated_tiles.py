"""The kernels for AMX are tested on CPUs without it, too, with tile instructions that are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.model.rounded import has_int4_kernel
from tests.support.slow import slow_except

ROOT = Path(__file__).parents[3]
FOLDER = "tests/unit/engine"
SHORT, ALL = "not slow", "slow or not slow"  # which of the tests: each shape of blocks is compiled for itself
PLUGIN = "tests.support.emulated_tiles"

pytestmark = [
    pytest.mark.skipif(not jit.is_available(), reason="numba is not installed, so there is nothing to emulate"),
    pytest.mark.timeout(900),
]


def has_tiles() -> bool:
    if not jit.is_available():
        return False
    from pdserve.engine.cpu.kernels import amx

    return amx.is_supported("bfloat16") and amx.is_supported("int8")


def run(command: list[str], cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(has_tiles(), reason="this CPU has AMX, so the same tests run on it")
@pytest.mark.parametrize("which", slow_except([SHORT, ALL], SHORT))
def test_the_kernels_pass_their_tests(which: str, tmp_path: Path) -> None:
    """In one process, because each would import torch and transformers."""
    chosen = "test_amx_gemm or test_amx_attention and not no_tiles"
    if has_int4_kernel():  # some tests of int4 need AVX-512 VNNI or AVX2
        chosen += " or test_int4 and (amx and (rounded_numbers or overflow) or any_batch)"
    files = [f"{FOLDER}/test_{name}.py" for name in ("amx_gemm", "amx_attention", "int4")]
    said = run(["-m", "pytest", "-q", "-n0", "-p", PLUGIN, "-m", which, "-k", chosen, *files], tmp_path)
    assert "passed" in said
    assert "skipped" not in said


DIGESTS = """
import hashlib, sys
import torch
if sys.argv[1] == "emulated":
    import tests.support.emulated_tiles
from pdserve.engine.cpu.kernels import amx, amx_gemm, amx_int4
from pdserve.engine.model.forms import make_linear
from tests.unit.engine.test_attention import filled_pool, queries, scattered
from tests.unit.engine.test_amx_attention import tiled

assert amx.is_supported("bfloat16") and amx_int4.is_supported(64)
torch.set_num_threads(1)
torch.manual_seed(0)
x, weight = torch.randn(70, 768), torch.randn(128, 768)
pool = filled_pool(head_dim=64, dtype=torch.bfloat16)
[table], q_THD = scattered(pool, [200]), queries(150, 6, 64)
attention = tiled(pool)
plan = attention.plan([table], [50], [150])
for result in (
    amx_gemm.pack_bfloat16(weight.bfloat16())(x.bfloat16()).float(),
    amx_gemm.pack_float32(weight.bfloat16().float())(x),
    make_linear(weight, None, "int4")(x),
    attention.attend(1, q_THD, plan, None, None, None),
    attention.attend(1, q_THD, plan, 33, None, 5.0),
):
    assert result.isfinite().all()
    print(hashlib.sha256(result.numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX, or kernels may not use it")
def test_emulated_tiles_compute_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """For normal numbers: the CPU takes smaller ones for zeros."""
    emulated, own = (run(["-c", DIGESTS, way], tmp_path / way) for way in ("emulated", "own"))
    assert len(own.split()) == 5
    assert emulated == own
