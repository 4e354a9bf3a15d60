"""Checks grammars in separate processes (router/child_pool.py), and caches the results.

Failures that the grammar did not cause raise Overloaded and are not cached: a killed process, too many waiting
grammars, or no answer within CHECK_S. A slow grammar reaches its CPU limit before CHECK_S, unless the machine is too
busy.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final, final

from pdserve.core.errors import InvalidRequest
from pdserve.core.grammar import Grammar
from pdserve.isolated.child import TOO_LONG as OVER_CPU
from router.child_pool import Children, LoadFailed, Purpose
from router.fair_queue import ANONYMOUS, ClientKey, QueueLimits
from router.model import ModelFacts

CHECK_S: Final = 2.0
QUICK_CPU_S: Final = 0.05
SLOW_CPU_S: Final = 0.5  # twice the limit of an admitted grammar (pdserve/structured/checker.py)
MAX_CHECKERS: Final = 4  # each process has a copy of the vocabulary
MAX_REMEMBERED: Final = 4096
QUEUE: Final = QueueLimits(items="grammars", most=256, of_host=128, of_client=16, size=64 * 2**20)
TOO_LONG: Final = "it takes too long to compile"
TOO_LARGE: Final = "it takes too much memory to compile"
EXPECTED: Final = "a grammar that compiles and can be met"


@final
class GrammarCheck:
    def __init__(self, model: Path | None, check_s: float = CHECK_S) -> None:
        """`model` is the model's folder. If it is None, every grammar is rejected."""
        self._model = model
        self.children = Children(
            Purpose(
                module="pdserve.structured.checker",
                does="compile a grammar",
                num_slow=max(1, min(MAX_CHECKERS, os.cpu_count() or 1) - 1),
                quick_cpu_s=QUICK_CPU_S,
                slow_cpu_s=SLOW_CPU_S,
                wall_s=check_s,
                queue=QUEUE,
            )
        )
        self._reasons: OrderedDict[bytes, str | None] = OrderedDict()  # None: admitted
        self._asked: dict[bytes, asyncio.Task[str | None]] = {}

    async def check(self, grammar: Grammar, model: ModelFacts, client: ClientKey = ANONYMOUS) -> None:
        """Raises InvalidRequest with the reason, and Overloaded if too many grammars wait."""
        if self._model is None:
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
            raise InvalidRequest(grammar.field, f"one that cannot be used ({reason})", EXPECTED)

    async def close(self) -> None:
        """Ends the processes and the waiting checks."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        await self.children.close()

    async def _ask(self, key: bytes, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        try:
            reason = self._reasons[key] = await self._reason(grammar, model, client)
        finally:
            del self._asked[key]
        while len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
        return reason

    async def _reason(self, grammar: Grammar, model: ModelFacts, client: ClientKey) -> str | None:
        load = {"model": str(self._model), "vocab_size": model.vocab_size, "eos": list(model.eos_token_ids)}
        message = {"kind": grammar.kind.value, "text": grammar.text}
        try:
            answer = await self.children.ask(load, message, len(grammar.text), client)
        except LoadFailed as error:
            raise InvalidRequest("structured_output", "a grammar", f"none: {error}") from None
        if "ended" in answer:
            return TOO_LONG if answer["ended"] == OVER_CPU else TOO_LARGE
        rejected: str | None = answer["rejected"]
        return rejected
