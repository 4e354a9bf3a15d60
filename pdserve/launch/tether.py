"""Runs a program that ends when its launcher ends, even if the launcher is killed. Standard library only.

    python -m pdserve.launch.tether PARENT_PID module NAME [FLAG ...]
    python -m pdserve.launch.tether PARENT_PID binary PATH [ARGUMENT ...]

The child itself asks the kernel for the parent-death signal. The alternative, a Python hook between fork and exec
(preexec_fn), would run beside gRPC's threads.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from pdserve.isolated.child import tie_to_parent


def main() -> None:
    parent_pid, kind, program, *arguments = sys.argv[1:]
    tie_to_parent(int(parent_pid))
    if kind == "binary":
        os.execv(program, [program, *arguments])
    # Ignored until the module handles it: its launcher sends SIGHUP to the processes that it restarts, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
