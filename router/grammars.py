"""Checks grammars in separate processes, and caches the results.

Every grammar first gets QUICK_CPU_S of one process. Grammars that take longer go to the other processes, with the full
limit of pdserve/structured/checker.py. So a fast grammar never waits for slow ones, and the queues are fair among
clients (router/fair_queue.py). The event loop never blocks, and requests without a grammar do not wait.

Failures that the grammar did not cause raise Overloaded and are not cached: a killed process, too many waiting
grammars, or no answer within CHECK_S. A slow grammar reaches its CPU limit before CHECK_S, unless the machine is too
busy.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Final, final

from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.grammar import Grammar
from router.checker_pool import CheckerPool
from router.fair_queue import ANONYMOUS, ClientKey
from router.model import ModelFacts

CHECK_S: Final = 2.0
QUICK_CPU_S: Final = 0.05
SLOW_CPU_S: Final = 0.5  # twice the limit of an admitted grammar (pdserve/structured/checker.py)
MAX_CHECKERS: Final = 4  # each process has a copy of the vocabulary
MAX_REMEMBERED: Final = 4096
LATE: Final = -signal.SIGALRM  # as in pdserve/structured/checker.py, which a router does not import
TOO_LONG: Final = "it takes too long to compile"
TOO_LARGE: Final = "it takes too much memory to compile"
EXPECTED: Final = "a grammar that compiles and can be met"


@final
class GrammarCheck:
    def __init__(self, model: Path | None, check_s: float = CHECK_S) -> None:
        """`model` is the model's folder. If it is None, every grammar is rejected."""
        self._check_s = check_s
        self.pools: tuple[CheckerPool, ...] = ()
        if model is not None:
            num_slow = max(1, min(MAX_CHECKERS, os.cpu_count() or 1) - 1)
            self.pools = (
                CheckerPool(model, 1, QUICK_CPU_S, check_s),
                CheckerPool(model, num_slow, SLOW_CPU_S, check_s),
            )
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()  # None: admitted
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}

    async def check(self, grammar: Grammar, model: ModelFacts, client: ClientKey = ANONYMOUS) -> None:
        """Raises InvalidRequest with the reason, and Overloaded if too many grammars wait."""
        if not self.pools:
            raise InvalidRequest(grammar.field, "a grammar", "no grammar: this model does not support them")
        key = hashlib.sha256(f"{grammar.kind.value}:{grammar.text}".encode()).digest()
        if key in self._reasons:
            self._reasons.move_to_end(key)
            reason = self._reasons[key]
        else:
            task = self._asked.get(key)
            if task is None:
                task = self._asked[key] = asyncio.create_task(self._ask(key, grammar, model, client), name="grammar")
            reason = await asyncio.shield(task)  # it continues if the caller disconnects
        if reason is not None:
            raise InvalidRequest(grammar.field, f"one with an error ({reason})", EXPECTED)

    async def close(self) -> None:
        """Ends the processes and the waiting checks."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        for pool in self.pools:
            await pool.close()

    async def _ask(self, key: bytes, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        try:
            reason = self._reasons[key] = await self._reason(grammar, model, client)
        finally:
            del self._asked[key]
        while len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
        return reason

    async def _reason(self, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        for pool in self.pools:
            answer = await pool.ask(grammar, model, client)
            if answer.ended is None:
                return answer.rejected
            if answer.ended == LATE:
                raise Overloaded("this machine is too busy to compile a grammar", self._check_s)
            if answer.ended == -signal.SIGKILL:
                raise Overloaded("the process that checks grammars was killed", self._check_s)
            if answer.ended != -signal.SIGPROF:
                return TOO_LARGE  # the allocator failed
        return TOO_LONG
