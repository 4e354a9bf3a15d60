"""Stages of a session on a lent GPU, each in a process of its own: one that raises or hangs costs the others nothing.

A stage is killed, with all that it started, when its time is over; what it printed until then has been told, line by
line, so that a session that is cut off itself keeps what it has.
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
    """Its exit code: OVER_TIME where it was killed, negative for a signal. `tell` gets its lines, stderr's too."""
    process = subprocess.Popen(
        command,
        process_group=0,  # what it has started ends with it
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
        with suppress(subprocess.TimeoutExpired):  # a driver may hold on to a dead process, and not to us
            process.wait(LET_GO_S)
        listener.join(LET_GO_S)  # a process that left the group may hold the pipe: its lines are its own


def why(code: int) -> str:
    """Empty where it ended well."""
    if code == OVER_TIME:
        return "over its time"
    return "" if code == 0 else f"signal {-code}" if code < 0 else f"exit code {code}"


def module(name: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", name, *flags]
