"""A process that checks grammars (pdserve/structured/checker.py), started for the first grammar and after it has
died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from pdserve.core.errors import InternalError, InvalidRequest, Overloaded
from pdserve.core.grammar import Grammar
from router.model import ModelFacts

HANGING: Final = 2.0  # multiple of a child's time limit after which the process itself is assumed to hang
START_S: Final = 60.0  # to load a vocabulary, on a busy machine

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class CheckerReply:
    rejected: str | None  # the reason, if the grammar was rejected
    ended: int | None  # how the child ended: minus the number of the signal, or its exit status


@final
class CheckerProcess:
    """Checks one grammar at a time."""

    def __init__(self, model: Path, check_s: float) -> None:
        self._model = model
        self._check_s = check_s
        self._process: Process | None = None
        self._ending: set[asyncio.Task[int]] = set()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, grammar: Grammar, model: ModelFacts, cpu_s: float) -> CheckerReply:
        """Raises Overloaded if there was no answer in time, or the process was killed."""
        if self._process is None:
            self._process = await self._start(model)
        question = {"kind": grammar.kind.value, "text": grammar.text, "cpu_s": cpu_s, "wall_s": self._check_s}
        try:
            async with asyncio.timeout(HANGING * self._check_s):
                answer = await _exchange(self._process, question)
        except TimeoutError:
            self.end()
            raise Overloaded("this machine is too busy to compile a grammar", self._check_s) from None
        except BaseException:
            self.end()
            raise
        if answer is None:
            self.end()
            raise Overloaded("the process that checks grammars was killed", self._check_s)
        return CheckerReply(rejected=answer["rejected"], ended=answer["ended"])

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._kill(process)

    async def wait_until_ended(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending)

    async def _start(self, model: ModelFacts) -> Process:
        arguments = [str(self._model), str(model.vocab_size), *map(str, model.eos_token_ids)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.structured.checker",
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a panic message could contain the grammar
            env={**os.environ, "RUST_BACKTRACE": "0"},  # writing a backtrace takes longer than the failed check
        )
        try:
            async with asyncio.timeout(START_S):
                answer = await _read(process)
        except BaseException:
            self._kill(process)
            raise
        if answer is None or answer["failed"] is not None:
            self._kill(process)
            if answer is None:
                raise InternalError("the process that checks grammars did not start")
            raise InvalidRequest("structured_output", "a grammar", f"none: {answer['failed']}")
        log.info("grammars are checked", extra={"pid": process.pid})
        return process

    def _kill(self, process: Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        ending = asyncio.create_task(process.wait(), name="checker")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _exchange(process: Process, message: dict[str, Any]) -> dict[str, Any] | None:
    """Sends a grammar and reads the answer; None if the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()
        return await _read(process)
    except (BrokenPipeError, ConnectionResetError):
        return None


async def _read(process: Process) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = await process.stdout.readline()
    answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer
