"""Compiles every kernel for sm_90 at real models' shapes, without a device. Prints registers, spills, shared memory.

    python -m tests.gpu.compile_kernels [--cases] [--short] [--only REGEX]

The interpreter accepts code that the compiler rejects (fp8 casts, small tl.dot tiles, branches whose types differ);
this finds such code without a GPU. --cases: also at the checks' shapes. --short: each kernel once per file of cases,
with the shape and types of its first launch. --only: the launches whose name matches. Exit code 1 if a kernel does not
compile, spills more than a few registers, or lacks instructions that it must have at real models' shapes
(machine_code.py).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.gpu.all_cases import CASES, FILES, LAUNCHES
from tests.gpu.machine_code import SHARED_BYTES, in_flight, shortcomings, usage
from tests.gpu.strict_interpreter import check_grid

MAX_SPILLED_BYTES = 64
META = torch.device("meta")


class NoDevice:
    """A Triton driver with a target but without a device, which is enough to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("cases", "short"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    args = parser.parse_args()
    triton.runtime.driver.set_active(NoDevice())
    compiled: dict[str, Any] = {}
    compile_and_run = JITFunction.run
    seen: set[Hashable] = set()
    file_of = {launch.name: file.__name__ for file in FILES for launch in file.LAUNCHES}

    def compile_only(self: Any, *values: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if args.short:
            variant = file_of.get(name), self.fn.__name__
            if variant in seen:
                return None
            seen.add(variant)
        kernel = compile_and_run(self, *values, grid=grid, warmup=True, **kwargs)
        check_grid(grid)
        if kernel.metadata.shared > SHARED_BYTES:
            raise RuntimeError(f"{self.fn.__name__} takes {kernel.metadata.shared} bytes of shared memory")
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    head = "| launch | kernel | registers | spilled bytes | shared bytes | in flight | compile s | lacks |"
    print(head + "\n" + "|---" * 8 + "|")
    failed = False
    runs: list[tuple[str, Callable[[], object]]] = [
        (launch.name, lambda launch=launch: launch.make(META)[0]())  # type: ignore[misc]
        for launch in LAUNCHES
    ]
    launches = list(runs)
    if args.cases:
        runs += [(case.name, lambda case=case: case.check(META)) for case in CASES]  # type: ignore[misc]
    for name, run in (one for one in runs if args.only.search(one[0])):
        compiled.clear()
        began_s = time.monotonic()
        # Nothing is computed, so a check ends when it first reads a result, which is after its launches.
        with suppress(NotImplementedError):
            run()
        took_s = time.monotonic() - began_s
        for kernel in compiled.values():
            registers, spilled = usage(kernel)
            failed |= spilled > MAX_SPILLED_BYTES
            of = kernel.metadata
            missing = shortcomings(kernel) if (name, run) in launches else []
            failed |= bool(missing)
            told = f"**{'; '.join(missing)}**" if missing else ""
            moving = f"{in_flight(kernel):,}" if of.name in ("_attend", "_product") else ""
            sizes = f"{registers} | {spilled} | {of.shared} | {moving}"
            print(f"| {name} | {of.name} | {sizes} | {took_s:.1f} | {told} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
