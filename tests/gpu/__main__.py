"""All checks that need a GPU, one table, one exit code.

    python -m tests.gpu [--only kernels,engine] [--rehearse]

  kernels    every Triton kernel against float64, and its time (check_kernels)
  engine     the eager engine against transformers, every family (check_engine)
  graphs     captured decode steps against the same steps uncaptured, no waiting in a launch (check_graphs)
  transfer   cuda_ipc and nccl between two processes, one of which is killed (check_transfer)

Each runs in a process of its own and is killed when it is over its time. Exit code 1 where one failed, 2 without a
CUDA device. --rehearse runs graphs and transfer on a CPU; the kernels' checks run there in `make test`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

import torch

CHECKS: Final = {"kernels": 240.0, "transfer": 180.0, "graphs": 300.0, "engine": 240.0}  # seconds at most
REHEARSED: Final = ("transfer", "graphs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs what can be)", file=sys.stderr)
        return 2
    names = args.only.split(",") if args.only else list(REHEARSED if args.rehearse else CHECKS)
    unknown = [name for name in names if name not in (REHEARSED if args.rehearse else CHECKS)]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    lines = []
    codes = []
    for name in names:
        print(f"\n# {name}", flush=True)
        began_s = time.monotonic()
        command = [sys.executable, "-m", f"tests.gpu.check_{name}", *(["--rehearse"] if args.rehearse else [])]
        codes.append(run(command, CHECKS[name]))
        told = {0: "right", 124: "**over its time**"}.get(codes[-1], f"**exit code {codes[-1]}**")
        lines.append(f"| {name} | {told} | {time.monotonic() - began_s:.0f} |")
    print("\n| check | result | s |\n|---|---|---|\n" + "\n".join(lines))
    return int(any(codes))


def run(command: list[str], seconds: float) -> int:
    """Its exit code; 124 where it was killed. What it started ends with it."""
    process = subprocess.Popen(command, process_group=0)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
