"""Compiles every kernel at real shapes for an H100, without a device, because only the compiler finds some errors.

The machine code must have wide loads, asynchronous copies, tensor cores, and few enough registers. `make test` compiles
each kernel once for each file of cases; `make test-slow` compiles all launches with all types.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu.floor import ATTENTION_IN_FLIGHT
from tests.gpu import machine_code
from tests.gpu.all_cases import FILES
from tests.gpu.machine_code import disorder, least_in_flight, opcodes_of, resident, shortcomings

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
    [attend] = [line for line in done.stdout.splitlines() if "| attend llama-8b b=1 ctx=1024 q=1 | _attend |" in line]
    assert f" {ATTENTION_IN_FLIGHT:,} " in attend, "what docs/gpu.md says"


@pytest.mark.slow  # the test above compiles the same kernels without the switch
@pytest.mark.timeout(300)
def test_kernels_that_overlap_compile_for_sm_90() -> None:
    """With programmatic dependent launch each kernel waits before its first access."""
    names = "rms_norm 1x4096|silu_mul 1x14336|place llama-8b t=1|llama-8b (fused )?b=1 ctx=1024|product qkv"
    command = [sys.executable, "-m", "tests.gpu.compile_kernels", "--short", "--only", names]
    environ = os.environ | {"PDSERVE_GPU": "pdl=on"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for kernel in ("_norm", "_gate", "_place", "_attend", "_merge", "_product"):
        assert f"| {kernel} |" in done.stdout


FUSED = """
    griddepcontrol.wait; // dummy %r1
    ld.global.b32 %r2, [ %rd1 + 0 ];
    st.global.b32 [ %rd2 + 0 ], %r2;
    bar.sync 0;
    @%p71 atom.global.gpu.acq_rel.add.u32 %r810, [ %rd198 + 0 ], %r811;
"""


def test_an_order_that_memory_does_not_keep_is_reported() -> None:
    def lacks(ptx: str) -> list[str]:
        return disorder(SimpleNamespace(metadata=SimpleNamespace(name="_attend", launch_pdl=True), asm={"ptx": ptx}))

    assert lacks(FUSED) == []
    assert lacks(FUSED.replace("bar.sync 0;", "")) == ["a barrier between the last store and the counter"]
    assert lacks(FUSED.replace("acq_rel", "relaxed")) == ["acq_rel of the device in atom.global.gpu.relaxed.add.u32"]
    late = ["griddepcontrol.wait before the first access"]
    assert lacks(FUSED.replace("griddepcontrol.wait; // dummy %r1", "")) == late
    assert lacks("    cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10;" + FUSED) == late


def test_registers_and_shared_memory_limit_programs() -> None:
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


#: A loop of tiles as ptxas receives it: it loads keys and values two tiles ahead, and leaves one tile in flight.
LOOP = """
$L__BB0_2:
    mov.u32 %r1, 0;
$L__BB0_4:  // %exit
    cp.async.wait_group 3;
$L__tmp7:
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};
    cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10, %r5;
    @%p2 cp.async.cg.shared.global [ %r6 + 0 ], [ %rd6 + 0 ], 0x10, %r7;
    cp.async.commit_group;
    cp.async.ca.shared.global [ %r8 + 0 ], [ %rd8 + 0 ], 0x8, %r9;
    cp.async.commit_group;
    cp.async.ca.shared.global [ %r8 + 0 ], [ %rd8 + 0 ], 0x4, %r9;
    cp.async.commit_group;
    @%p55 bra $L__BB0_4;
    bra.uni $L__BB0_2;
"""


def test_bytes_in_flight_are_those_of_the_open_groups() -> None:
    """The wait comes first, so the groups that it leaves open are in flight while the tile is computed."""
    assert least_in_flight(LOOP, num_warps=4) == (16 + 16 + 8) * 128
    assert least_in_flight(LOOP.replace("wait_group 3", "wait_group 2"), num_warps=8) == 8 * 256
    assert least_in_flight(LOOP.replace("wait_group 3", "wait_group 5"), num_warps=4) == (2 * 8 + 32) * 128
    assert least_in_flight(LOOP.replace("wait_group 3", "wait_group 0"), num_warps=4) == 0
    with pytest.raises(RuntimeError, match="no loop"):
        least_in_flight(LOOP.replace("@%p55 bra", "@%p55 call"), num_warps=4)


def test_a_tile_without_loads_in_flight_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with three stages, where nothing is in flight while a tile is computed."""
    told = {"cuobjdump": "REG:158 STACK:0 SHARED:0 LOCAL:0", "nvdisasm": CODE}
    monkeypatch.setattr(machine_code, "dump", lambda kernel, name, *_: told[name])
    monkeypatch.setattr(machine_code, "IN_FLIGHT_BYTES", 3 * 40 * 128)

    def lacks(ptx: str) -> list[str]:
        of = SimpleNamespace(name="_attend", num_warps=4, shared=72_000)
        return shortcomings(SimpleNamespace(metadata=of, asm={"ptx": ptx, "cubin": b""}))

    assert lacks(LOOP) == []
    assert lacks(LOOP.replace("wait_group 3", "wait_group 0")) == [
        "15,360 bytes in flight on a multiprocessor: there are 0"
    ]


def test_missing_instructions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opcodes_of(CODE) == {"LDC", "LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "STG.E.128"}
    kernel = SimpleNamespace(
        metadata=SimpleNamespace(name="_attend", num_warps=4, shared=72_000), asm={"ptx": LOOP, "cubin": b""}
    )
    monkeypatch.setattr(machine_code, "IN_FLIGHT_BYTES", 0)

    def lacks(code: str, registers: int) -> list[str]:
        usage = f"REG:{registers} STACK:0 SHARED:0 LOCAL:0"
        monkeypatch.setattr(machine_code, "dump", lambda kernel, name, *_: usage if name == "cuobjdump" else code)
        return shortcomings(kernel)

    assert lacks(CODE, 158) == []
    assert lacks(CODE.replace("HMMA", "FFMA"), 158) == ["tensor cores"]
    assert lacks(CODE.replace("BYPASS.128", "BYPASS.32"), 158) == ["LDGSTS.E.BYPASS.128"]
    assert lacks(CODE, 200) == ["room for 3 programs on a multiprocessor: there is for 2"]
