"""Limited instruction sets stay limited in every library, and our choice of kernels follows them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.engine.cpu.kernels import int4_gemm, jit, packed_gemm
from pdserve.engine.model import rounded
from tests import isa

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64"),
    pytest.mark.timeout(600),  # Processes that import torch, on a machine that may be busy.
]


@pytest.mark.slow  # Tests of tests/isa.py itself, which `make test-isa` needs.
@pytest.mark.parametrize("level", isa.LEVELS)
def test_every_library_obeys_the_level(tmp_path: Path, level: str) -> None:
    if level == "avx2" and not torch.cpu._is_avx2_supported():
        pytest.skip("this CPU has no AVX2")
    found = isa.measure(level, NUMBA_CACHE_DIR=str(tmp_path))
    assert {name: found[name] for name in isa.EXPECTED[level]} == isa.EXPECTED[level]


@pytest.mark.parametrize(
    ("levels", "is_cached"),
    [
        (["avx2", "oldest"], [False, False]),
        pytest.param(["avx2", "oldest", "oldest"], [False, False, True], marks=pytest.mark.slow),
    ],
)
def test_stored_kernels_belong_to_their_cpu(tmp_path: Path, levels: list[str], is_cached: list[bool]) -> None:
    found = [isa.measure(level, NUMBA_CACHE_DIR=str(tmp_path)) for level in levels]
    assert [one["is_cached"] for one in found] == is_cached


@pytest.mark.skipif(not isa.level_of_this_process(), reason="not under `make test-isa`")
def test_this_process_runs_at_the_requested_level() -> None:
    expected = isa.EXPECTED[isa.level_of_this_process()]
    assert torch.backends.cpu.get_cpu_capability() == expected["torch"]
    assert jit.target()[0] == expected["numba"]


OVERFLOW = """
import torch
torch.cpu._is_vnni_supported = lambda: True
from pdserve.engine.model.rounded import weight_levels
print(weight_levels())
"""


def test_int8_levels_are_halved_without_vnni() -> None:
    """A CPU reports VNNI even if oneDNN may not use it. Products of 127 would then overflow 16 bits silently."""
    done = subprocess.run(
        [sys.executable, "-c", OVERFLOW],
        env=isa.environment("avx2", OMP_NUM_THREADS="1"),
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "63\n"), done.stderr


def test_weights_use_all_exact_levels() -> None:
    """The chosen level is exact here. If half was chosen, one level more would not be."""
    levels = rounded.weight_levels()
    assert levels in (63, 127)
    assert rounded.is_exact(levels)
    if levels == 63 and not isa.level_of_this_process():
        assert not (torch.cpu._is_vnni_supported() and rounded.is_exact(127))


@pytest.mark.parametrize(
    ("features", "has_avx512", "supported"),
    [
        ("", True, []),
        ("+avx2,+fma,+f16c", True, ["float32", "int8", "int4"]),  # numba is told to use no more
        ("+avx2,+fma,+f16c", False, ["float32", "int8", "int4"]),
        ("+avx2,-fma", True, []),
        ("+avx2,+fma,+f16c,+avx512f,-amx-tile", True, ["float32"]),
        ("+avx2,+fma,+f16c,+avx512f,+avx512vnni", True, ["float32", "int8", "int4"]),
        ("+avx2,+fma,+f16c,+avx512f,+avx512vnni,+avx512bf16", True, ["float32", "int8", "int4", "bfloat16"]),
        ("+avx2,+fma,+f16c,+avx512f,+avx512vnni", False, []),  # numba is told to use what the CPU lacks
    ],
)
def test_products_need_the_instructions_of_numba_and_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, features: str, has_avx512: bool, supported: list[str]
) -> None:
    monkeypatch.setattr(jit, "target", lambda: ("some-cpu", features))
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: has_avx512)
    found = [name for name in ("float32", "int8", "bfloat16") if packed_gemm.is_supported(getattr(torch, name))]
    if int4_gemm.is_supported():
        found.append("int4")
    assert sorted(found) == sorted(supported)
