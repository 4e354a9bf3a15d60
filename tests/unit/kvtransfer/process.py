"""One end of a transfer in a separate process (peer.py), which a test may stop and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from tests.unit.kvtransfer.harness import WAIT_S


class Process:
    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", "tests.unit.kvtransfer.peer", *argv]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def say(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has died"
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        """Stops the process, and returns when it no longer runs."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
