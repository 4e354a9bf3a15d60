"""Runs a program that ends when its launcher ends, even if the launcher is killed. Standard library only.

    python -m pdserve.isolated.tied_program PARENT_PID MODULE [FLAG ...]

The child itself asks the kernel for the parent-death signal. The alternative, a Python hook between fork and exec
(preexec_fn), would run beside gRPC's threads.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Final

from pdserve.isolated.child import tie_to_parent

PROGRAM: Final = "pdserve.isolated.tied_program"


def tied_command(module: str, *arguments: str, python: str = "", parent_pid: int = 0) -> list[str]:
    """The command line of `python -m MODULE ARGUMENT ...`, as a program that ends when its parent ends. `python` empty:
    the one of this process. `parent_pid` 0: this process starts it."""
    return [python or sys.executable, "-m", PROGRAM, str(parent_pid or os.getpid()), module, *arguments]


def session_of(leader_pid: int) -> list[int]:
    """The processes in the session that `leader_pid` leads. Linux only; empty elsewhere."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp session; the name may contain any characters.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader_pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def end_session(leader_pid: int) -> None:
    """Kills the remaining processes in the session of an ended child: they must not outlive it or keep its pipes
    open."""
    for pid in session_of(leader_pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    parent_pid, module, *arguments = sys.argv[1:]
    tie_to_parent(int(parent_pid))
    # Ignored until the module handles it: its launcher sends SIGHUP to the processes that it restarts, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
