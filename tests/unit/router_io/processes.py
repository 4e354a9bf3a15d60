"""Starts real worker and router processes for tests and ends them, by pid."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.cluster_secret import ENVIRONMENT

ROOT = Path(__file__).parents[3]
START_S = 60.0


@dataclass
class Program:
    process: subprocess.Popen[str]
    address: str
    log: IO[bytes]

    def log_tail(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:].decode("utf-8", "replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()
        return self.process.returncode


Start = Callable[..., Program]


def spawn(
    module: str, *flags: str, stderr: IO[bytes] | int = subprocess.DEVNULL, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", **(env or {})},
    )


@contextmanager
def programs() -> Iterator[Start]:
    """Gives a function that starts a program and returns once it listens; all are ended at the end."""
    started: list[Program] = []

    def start(module: str, *flags: str, env: Mapping[str, str] | None = None) -> Program:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        process = spawn(module, *flags, stderr=log, env=env)
        program = Program(process, "", log)
        started.append(program)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " listening on " in line, f"{module} did not start: {program.log_tail()}"
        program.address = line.rsplit(" ", 1)[1].strip()
        return program

    try:
        yield start
    finally:
        for program in reversed(started):
            program.end()
