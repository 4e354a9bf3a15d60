"""Asks a process of its own whether a grammar may be admitted, and remembers the answers.

The process begins with the first grammar. One that takes more CPU or memory than it may ends it (the bounds are in
pdserve/structured/checker.py) and is refused; the next question starts another. What is no fault of the grammar is
Overloaded and not remembered: no answer within CHECK_S, which the bound on CPU comes before except on a machine that is
too busy, and somebody who killed the process. The event loop never waits, and neither do requests without a grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, final

from pdserve.core.errors import InternalError, InvalidRequest, Overloaded
from pdserve.core.grammar import Grammar
from router.model import ModelFacts

CHECK_S: Final = 2.0
END_S: Final = 10.0  # between a process's last word and its end, on a busy machine
START_S: Final = 60.0  # to load a vocabulary, on a busy machine
MAX_WAITING: Final = 64  # grammars
MAX_REMEMBERED: Final = 4096
TOO_LONG: Final = "it takes too long to compile"
TOO_LARGE: Final = "it takes too much memory to compile"
EXPECTED: Final = "a grammar that compiles and can be met"

log = logging.getLogger(__name__)


@final
class GrammarCheck:
    def __init__(self, model: Path | None, check_s: float = CHECK_S) -> None:
        """`model` is its folder; None where it has none, and every grammar is refused."""
        self._model = model
        self._check_s = check_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()  # None: admitted
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}
        self._ending: set[asyncio.Task[int]] = set()

    async def check(self, grammar: Grammar, model: ModelFacts) -> None:
        """Raises InvalidRequest with the reason; Overloaded when too many wait."""
        if self._model is None:
            raise InvalidRequest(grammar.field, "a grammar", "none: this model follows no grammar")
        key = hashlib.sha256(f"{grammar.kind.value}:{grammar.text}".encode()).digest()
        if key in self._reasons:
            self._reasons.move_to_end(key)
            reason = self._reasons[key]
        else:
            reason = await asyncio.shield(self._task(key, grammar, model))  # a caller who leaves leaves it running
        if reason is not None:
            raise InvalidRequest(grammar.field, reason, EXPECTED)

    async def close(self) -> None:
        """Ends the process and whoever waits for it."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        self._end()
        if self._ending:
            await asyncio.wait(self._ending)

    def _task(self, key: bytes, grammar: Grammar, model: ModelFacts) -> asyncio.Task[str | None]:
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= MAX_WAITING:
                raise Overloaded(f"{len(self._asked)} grammars wait to be checked", self._check_s)
            task = self._asked[key] = asyncio.create_task(self._ask(key, grammar, model), name="grammar")
        return task

    async def _ask(self, key: bytes, grammar: Grammar, model: ModelFacts) -> str | None:
        try:
            async with self._turn:
                reason = self._reasons[key] = await self._ask_process(grammar, model)
        finally:
            del self._asked[key]
        while len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
        return reason

    async def _ask_process(self, grammar: Grammar, model: ModelFacts) -> str | None:
        process = self._process
        if process is None:
            process = self._process = await self._start(model)
        try:
            async with asyncio.timeout(self._check_s):
                answer = await _exchange(process, {"kind": grammar.kind.value, "text": grammar.text})
        except TimeoutError:
            self._end()
            raise Overloaded("this machine is too busy to compile a grammar", self._check_s) from None
        except BaseException:
            self._end()
            raise
        if answer is None:  # it has ended; to signal it before its status is read would reap it, and lose the status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
            self._end()
            status = process.returncode
            if status is None or status == -signal.SIGKILL:
                raise Overloaded("the process that checks grammars was killed", self._check_s)
            return TOO_LONG if status == -signal.SIGPROF else TOO_LARGE  # the allocator failed
        refused = answer["refused"]
        return None if refused is None else str(refused)

    async def _start(self, model: ModelFacts) -> Process:
        arguments = [str(self._model), str(model.vocab_size), *map(str, model.eos_token_ids)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.structured.checker",
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a panic there would tell of the grammar
            env={**os.environ, "RUST_BACKTRACE": "0"},  # to write one takes longer than to fail
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

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._kill(process)

    def _kill(self, process: Process) -> None:
        if process.returncode is None:
            process.kill()
        ending = asyncio.create_task(process.wait(), name="checker")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _exchange(process: Process, message: dict[str, str]) -> dict[str, Any] | None:
    """The answer; None where the process has ended."""
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
