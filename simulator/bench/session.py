"""Runs a whole benchmark: connects, warms up, and runs each level of load on each server in alternating turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, final

from pdserve.core.types import Slo
from simulator.bench.answer import BenchAnswer
from simulator.bench.driver import run_turn
from simulator.bench.load import LoadLevel, LoadPlan
from simulator.bench.prompts import PromptMaker
from simulator.bench.result import BenchResult, LevelResult
from simulator.bench.server import BenchServer
from simulator.bench.statistics import BenchTurn
from simulator.model import TraceRequest

WARM_CALLERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    load: LoadPlan
    levels: Sequence[LoadLevel]
    turns: int = 1  # of each server at each level
    warm_requests: int = 0  # to each server, before its first turn
    seed: int = 0
    token_ids: tuple[int, int]
    reads_predictions: bool = False  # after each turn, of servers that predict


class BenchObserver:
    """Called as a benchmark progresses. This base class does nothing."""

    def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None: ...

    def answered(self, answer: BenchAnswer) -> None: ...

    def turn_ends(self) -> None: ...


@final
class BenchSession:
    def __init__(
        self, servers: Sequence[BenchServer], plan: BenchPlan, slo: Slo | None, observer: BenchObserver | None = None
    ) -> None:
        self._servers, self._plan, self._observer = servers, plan, observer or BenchObserver()
        self.result = BenchResult(servers=[], slo=slo, has_shared_prefixes=plan.load.block_tokens > 0)
        self._turn: asyncio.Task[BenchTurn] | None = None

    def interrupt(self) -> None:
        """Ends the running turn; the benchmark then returns what was measured. To be called in its event loop."""
        self.result.is_interrupted = True
        if self._turn is not None:
            self._turn.cancel()

    async def run(self) -> BenchResult:
        """Raises PdserveError if a server cannot be reached or a trace is invalid."""
        try:
            for server in self._servers:
                model = await server.connect()
                self.result.servers.append((server.name, server.address, model))
            await self._warm_up()
            for level in self._plan.levels:
                await self._level(level)
        finally:
            for server in self._servers:
                await server.close()
        return self.result

    async def _warm_up(self) -> None:
        if not self._plan.warm_requests:
            return
        level = LoadLevel(concurrency=WARM_CALLERS)
        for server in self._servers:
            if self.result.is_interrupted:
                return
            requests = islice(self._plan.load.requests(level), self._plan.warm_requests)
            await self._one_turn(server, level, requests, "warm-up", is_counted=False)

    async def _level(self, level: LoadLevel) -> None:
        results = [LevelResult(level=level, server=one.name, slo=self.result.slo) for one in self._servers]
        for number in range(self._plan.turns):
            for server, found in zip(self._servers, results, strict=True):
                if self.result.is_interrupted:
                    return
                self._observer.turn_begins(server.name, level, number, self._plan.turns)
                label = f"{level.label} turn {number}"
                turn = await self._one_turn(server, level, self._plan.load.requests(level), label, is_counted=True)
                self._observer.turn_ends()
                if self._plan.reads_predictions:
                    turn = replace(turn, answers=await server.with_predictions(turn.answers))
                if not found.turns:
                    self.result.levels.append(found)
                found.turns.append(turn)

    async def _one_turn(
        self,
        server: BenchServer,
        level: LoadLevel,
        requests: Iterator[TraceRequest],
        label: str,
        *,
        is_counted: bool,
    ) -> BenchTurn:
        load = self._plan.load
        prompts = PromptMaker(
            seed=self._plan.seed, turn=label, block_tokens=load.block_tokens, ids=self._plan.token_ids
        )
        on_answer: Callable[[BenchAnswer], None] = self._observer.answered if is_counted else _ignore
        self._turn = asyncio.create_task(
            run_turn(
                server,
                level,
                requests,
                prompts,
                duration_s=load.duration_s,
                on_answer=on_answer,
            )
        )
        try:
            return await self._turn
        except asyncio.CancelledError:
            if not self.result.is_interrupted:
                raise
            return BenchTurn(answers=(), lasted_s=0.0, is_interrupted=True)  # before its first request
        finally:
            self._turn = None


def _ignore(answer: BenchAnswer) -> None: ...
