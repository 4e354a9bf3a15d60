"""Open and closed loops against scripted servers. No test depends on how long something takes."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from simulator.bench.benchmark import Benchmark, BenchObserver, BenchPlan
from simulator.bench.load import DEFAULT_IDS, LoadLevel, LoadPlan, SyntheticLoad
from simulator.bench.server import BenchAnswer, BenchOutcome, BenchServer, ServerReply
from simulator.bench.statistics import BenchResult
from tests.unit.bench.given import SLO, ScriptedServer

OPEN, CLOSED = LoadLevel(rate_rps=2000.0), LoadLevel(concurrency=3)


def plan(*levels: LoadLevel, requests: int = 20, **values: Any) -> BenchPlan:
    load = LoadPlan(
        source=SyntheticLoad(input_tokens=(4, 9), output_tokens=(2, 5)), num_requests=requests, duration_s=None
    )
    return BenchPlan(load=load, levels=levels, token_ids=DEFAULT_IDS, **values)


async def run(plan: BenchPlan, *servers: BenchServer, observer: BenchObserver | None = None) -> BenchResult:
    return await Benchmark(servers, plan, SLO, observer).run()


async def complete(number: int, reply: ServerReply) -> None:
    reply.chunk_s.append(time.perf_counter())
    reply.complete()


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    everybody_is_here = asyncio.Event()

    async def script(number: int, reply: ServerReply) -> None:
        if number == 19:
            everybody_is_here.set()
        await everybody_is_here.wait()
        await complete(number, reply)

    found = await run(plan(OPEN), ScriptedServer(script))
    summary = found.levels[0].summary
    assert (summary.completed, summary.max_concurrent_requests) == (20, 20)


async def test_a_closed_loop_has_as_many_requests_as_callers() -> None:
    running, most = 0, 0

    async def script(number: int, reply: ServerReply) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        await complete(number, reply)

    found = await run(plan(CLOSED), ScriptedServer(script))
    assert most == 3
    assert [one.number for one in found.levels[0].turns[0].answers] == list(range(20))


async def test_two_servers_get_the_same_prompts_in_turns() -> None:
    order: list[str] = []

    class Turns(BenchObserver):
        def turn_begins(self, server: str, level: LoadLevel, turn: int, turns: int) -> None:
            order.append(f"{server} {turn}")

    first, second = ScriptedServer(complete, "a"), ScriptedServer(complete, "b")
    found = await run(plan(CLOSED, turns=2, warm_requests=3), first, second, observer=Turns())
    assert order == ["a 0", "b 0", "a 1", "b 1"]
    assert first.prompts == second.prompts
    assert len(set(first.prompts)) == 3 + 2 * 20  # no turn repeats a prompt
    assert [one.summary.requests for one in found.levels] == [40, 40]  # without the warm-up
    assert first.is_closed
    assert second.is_closed


async def test_an_interrupted_turn_keeps_its_results() -> None:
    async def script(number: int, reply: ServerReply) -> None:
        if number >= 5:
            await asyncio.Event().wait()
        await complete(number, reply)

    server = ScriptedServer(script)

    class StopAfterFive(BenchObserver):
        def answered(self, answer: BenchAnswer) -> None:
            if answer.number == 4:
                session.interrupt()

    session = Benchmark([server], plan(CLOSED, turns=3), SLO, StopAfterFive())
    found = await session.run()
    [level] = found.levels
    [turn] = level.turns
    assert found.is_interrupted
    assert turn.is_interrupted
    outcomes = [one.outcome for one in turn.answers]
    assert outcomes.count(BenchOutcome.COMPLETED) == 5
    assert level.summary.requests == 5
    assert server.is_closed


async def test_a_reply_without_tokens_has_failed() -> None:
    async def script(number: int, reply: ServerReply) -> None:
        reply.complete()

    found = await run(plan(CLOSED, requests=2), ScriptedServer(script))
    assert found.levels[0].summary.errors == {"an answer without tokens": 2}


@pytest.mark.parametrize("was_frozen", [False, True])
async def test_only_what_the_benchmark_froze_is_thawed(was_frozen: bool) -> None:
    frozen_within = list[bool]()

    async def script(number: int, reply: ServerReply) -> None:
        frozen_within.append(gc.get_freeze_count() > 0)
        await complete(number, reply)

    gc.freeze() if was_frozen else gc.unfreeze()
    try:
        await run(plan(CLOSED, requests=1), ScriptedServer(script))
        assert (frozen_within, gc.get_freeze_count() > 0) == ([True], was_frozen)
    finally:
        gc.freeze()  # as tests/conftest.py leaves it
