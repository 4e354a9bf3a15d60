"""Several grammar checkers with one fair queue."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from pdserve.core.grammar import Grammar
from router.checker_process import CheckerProcess, CheckerReply
from router.fair_queue import ClientKey, FairQueue
from router.model import ModelFacts


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    grammar: Grammar
    model: ModelFacts
    answer: asyncio.Future[CheckerReply]


@final
class CheckerPool:
    """`cpu_s` is the CPU limit of one grammar. A process is started when it is first needed."""

    def __init__(self, model: Path, num_checkers: int, cpu_s: float, check_s: float) -> None:
        self.checkers = [CheckerProcess(model, check_s) for _ in range(num_checkers)]
        self._cpu_s = cpu_s
        self._check_s = check_s
        self._idle = list(reversed(self.checkers))
        self._queue: FairQueue[_Question] = FairQueue()
        self._serving: set[asyncio.Task[None]] = set()

    async def ask(self, grammar: Grammar, model: ModelFacts, client: ClientKey) -> CheckerReply:
        """Raises Overloaded if too many grammars wait."""
        question = _Question(grammar, model, asyncio.get_running_loop().create_future())
        self._queue.put(question, client, len(grammar.text), self._check_s)
        self._dispatch()
        return await question.answer

    async def close(self) -> None:
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        for checker in self.checkers:
            checker.end()
            await checker.wait_until_ended()

    def _dispatch(self) -> None:
        while self._idle and (taken := self._queue.take(time.monotonic())) is not None:
            question, client = taken
            if question.answer.done():  # the caller no longer waits
                continue
            task = asyncio.create_task(self._serve(self._idle.pop(), question, client), name="grammar")
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, checker: CheckerProcess, question: _Question, client: ClientKey) -> None:
        began_s = time.monotonic()
        try:
            answer = await checker.ask(question.grammar, question.model, self._cpu_s)
            if not question.answer.done():
                question.answer.set_result(answer)
        except Exception as error:  # any error is passed to the caller
            if not question.answer.done():
                question.answer.set_exception(error)
        finally:
            now_s = time.monotonic()
            self._queue.charge(client, now_s - began_s, now_s)
            self._idle.append(checker)
            self._dispatch()
