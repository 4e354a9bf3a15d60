"""What only the compiler refuses: every kernel, at real shapes, for an H100 that is not there. And what its code
consists of: wide loads, asynchronous copies, tensor cores, registers.

In every run each kernel is compiled once per types of its arguments; test-slow compiles all launches.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import machine_code
from tests.gpu.all_cases import FILES
from tests.gpu.machine_code import opcodes_of, resident, shortcomings

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.gpu_checks


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "flags", [pytest.param(["--short"], id="short"), pytest.param([], id="every-launch", marks=pytest.mark.slow)]
)
def test_every_kernel_compiles_for_sm_90_without_a_device(flags: list[str]) -> None:
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    missing = {case.__name__ for case in FILES if not any(launch.name in done.stdout for launch in case.LAUNCHES)}
    assert not missing, done.stdout


def test_a_multiprocessor_holds_as_many_programs_as_its_registers_and_shared_memory() -> None:
    assert resident(168, 4, 72_000) == 3
    assert resident(169, 4, 72_000) == 2
    assert resident(32, 4, 120_000) == 1
    assert resident(255, 8, 1_000) == 1


CODE = """
.text._attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/          @!UP1    STG.E.128 desc[UR6][R2.64], R4 ;
"""


def test_missing_instructions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opcodes_of(CODE) == {"LDC", "LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "STG.E.128"}
    kernel = SimpleNamespace(
        metadata=SimpleNamespace(name="_attend", num_warps=4, shared=72_000), asm={"ptx": "mma.bf16", "cubin": b""}
    )

    def lacks(code: str, registers: int) -> list[str]:
        usage = f"REG:{registers} STACK:0 SHARED:0 LOCAL:0"
        monkeypatch.setattr(machine_code, "dump", lambda kernel, name, *_: usage if name == "cuobjdump" else code)
        return shortcomings(kernel)

    assert lacks(CODE, 158) == []
    assert lacks(CODE.replace("HMMA", "FFMA"), 158) == ["tensor cores"]
    assert lacks(CODE.replace("BYPASS.128", "BYPASS.32"), 158) == ["LDGSTS.E.BYPASS.128"]
    assert lacks(CODE, 200) == ["room for 3 programs on a multiprocessor: there is for 2"]
