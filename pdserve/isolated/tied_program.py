"""Runs a program that ends when its launcher ends, even if the launcher is killed. Standard library only.

    python -m pdserve.isolated.tied_program PARENT_PID MODULE [FLAG ...]

The child itself asks the kernel for the parent-death signal. The alternative, a Python hook between fork and exec
(preexec_fn), would run beside gRPC's threads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Final

from pdserve.isolated.child import tie_to_parent

PROGRAM: Final = "pdserve.isolated.tied_program"


def tied_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """The command line of `python -m MODULE ARGUMENT ...`, as a program that ends when this process ends. `python`
    empty: the one of this process."""
    return [python or sys.executable, "-m", PROGRAM, str(os.getpid()), module, *arguments]


def main() -> None:
    parent_pid, module, *arguments = sys.argv[1:]
    tie_to_parent(int(parent_pid))
    # Ignored until the module handles it: its launcher sends SIGHUP to the processes that it restarts, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
