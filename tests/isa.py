"""Exactness, engine and transfer tests with instruction sets turned down: `make test-isa`.

    python -m tests.isa [--only avx2,oldest] [--report] [PYTEST ARGUMENTS]   # which may name other tests

avx2     what a laptop of 2013 has
oldest   the oldest x86-64 that torch supports: its kernels for any CPU, oneDNN at SSE4.1, numba for plain x86-64

Each level is proved before its tests run: every library is asked what it uses (`tests/unit/engine/test_isa.py` does the
same in every run of the suite). Every process that a test starts inherits the level. MKL takes its level on Intel
processors only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

LEVELS: Final[dict[str, dict[str, str]]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",  # left out, numba would add all that this CPU has
    },
    "oldest": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",  # those of the name
    },
}
#: What the libraries must answer at each level.
EXPECTED: Final[dict[str, dict[str, Any]]] = {
    "avx2": {"torch": "AVX2", "onednn": "Intel AVX2", "numba": "haswell", "zmm": False},
    "oldest": {"torch": "DEFAULT", "onednn": "Intel SSE4.1", "numba": "x86-64", "ymm": False, "zmm": False},
}
TESTS: Final = (
    "tests/unit/test_oracle.py",
    "tests/unit/engine",
    "tests/unit/kvtransfer",
    "tests/unit/worker/test_overlap.py",
    "tests/unit/worker/test_tensor_parallel.py",
    "tests/cluster/test_exact.py",
    "tests/cluster/test_options.py",
)
# The interpreter of Triton computes with numpy, and the model of the protocol with integers.
WITHOUT: Final = ("tests/unit/engine/gpu", "tests/unit/kvtransfer/model")
_ONEDNN: Final = "onednn_verbose,v1,info,cpu,isa:"


def environment(level: str | None, **more: str) -> dict[str, str]:
    """This process's, at that level; without any where it is None."""
    names = {name for settings in LEVELS.values() for name in settings}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return inherited | (LEVELS[level] if level else {}) | more


def level_of_this_process() -> str:
    """Empty where instruction sets are this machine's own."""
    return next((level for level, settings in LEVELS.items() if settings.items() <= os.environ.items()), "")


def measure(level: str | None, **more: str) -> dict[str, Any]:
    """What the libraries of a fresh process use."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.isa", "--report"],
        env=environment(level, ONEDNN_VERBOSE="1", OMP_NUM_THREADS="1", **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    found["onednn"] = next(line.removeprefix(_ONEDNN) for line in lines if line.startswith(_ONEDNN))
    return found


def report() -> None:
    """One line of JSON; oneDNN prints its own when it first multiplies."""
    import torch

    from pdserve.engine.cpu.kernels import jit, rows
    from pdserve.engine.model.forms import make_linear
    from pdserve.engine.model.rounded import weight_levels

    make_linear(torch.rand(64, 64))(torch.ones(4, 64))
    x = torch.ones(1, 64)
    rows.norm(x, None, x[0], 0.0, torch.empty_like(x), x)
    kernel = rows._norm("float32", "", "float32")._keep
    is_cached = bool(kernel.cache_hits)
    found = {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "numba": jit.target()[0],
        "is_cached": is_cached,
        "weight_levels": weight_levels(),
    }
    if not is_cached:
        assembly = kernel._library.get_asm_str()
        found |= {register: register in assembly for register in ("ymm", "zmm")}
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LEVELS), help="levels")
    parser.add_argument("--report", action="store_true", help="print what this process uses, and no more")
    args, rest = parser.parse_known_args()
    if args.report:
        report()
        return 0
    failed = []
    for level in args.only.split(","):
        found = measure(level, NUMBA_CACHE_DIR=os.path.join(".tmp", "isa-proof"))
        wrong = {name: found[name] for name, value in EXPECTED[level].items() if found.get(name, value) != value}
        print(f"{level}: {found}", flush=True)
        if wrong:
            print(f"{level}: the level did not take effect, or this CPU is older: {wrong}", file=sys.stderr)
            failed.append(level)
            continue
        names_tests = any(Path(one.partition("::")[0]).exists() for one in rest)
        tests = rest if names_tests else [*TESTS, *(f"--ignore={folder}" for folder in WITHOUT), *rest]
        options = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow", *tests]
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, env=environment(level, OMP_NUM_THREADS="1"), check=False)
        failed += [level] if done.returncode else []
    print(f"failed at: {', '.join(failed)}" if failed else f"passed at: {args.only}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
