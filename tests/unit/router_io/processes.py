"""Starts real worker and router processes for tests and ends them, by pid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
START_S = 60.0


@dataclass
class Program:
    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.returncode


Start = Callable[..., Program]


def spawn(module: str, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def programs() -> Iterator[Start]:
    """Gives a function that starts a program and returns once it listens; all are ended at the end."""
    started: list[Program] = []

    def start(module: str, *flags: str) -> Program:
        process = spawn(module, *flags)
        program = Program(process, "")
        started.append(program)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " listening on " in line, f"{module} did not start: {line!r}"
        program.address = line.rsplit(" ", 1)[1].strip()
        return program

    try:
        yield start
    finally:
        for program in reversed(started):
            program.end()
