"""Runs the stages of a session on a borrowed GPU in separate processes: a crash or a hang does not affect the others.

When its time is over, a stage is killed with all processes that it started. Its output is passed on line by line, so a
session that is interrupted keeps it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

OVER_TIME: Final = 124
LET_GO_S: Final = 10.0


def run(command: Sequence[str], seconds: float, tell: Callable[[str], None]) -> int:
    """The exit code: OVER_TIME if it was killed, negative for a signal. `tell` gets all lines, also of stderr."""
    process = subprocess.Popen(
        command,
        process_group=0,  # the processes that it started end with it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines = process.stdout

    def listen() -> None:
        for line in lines:
            tell(line.rstrip("\n"))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return OVER_TIME
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may keep a dead process; do not wait for it
            process.wait(LET_GO_S)
        listener.join(LET_GO_S)  # a process that left the group may keep the pipe open; its lines are not needed


def why(code: int) -> str:
    """A description of the exit code; empty for success."""
    if code == OVER_TIME:
        return "over its time"
    return "" if code == 0 else f"signal {-code}" if code < 0 else f"exit code {code}"


def module(name: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", name, *flags]
