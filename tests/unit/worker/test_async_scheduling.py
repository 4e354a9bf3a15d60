"""A decode worker with asynchronous scheduling, over real gRPC: with an engine whose steps sometimes fail, and with
rows whose sampling waits for the step before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from decode_worker.steps_in_flight import DeferredFlight, StepsInFlight
from pdserve.config import WorkerConfig
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Role
from pdserve.engine.interface import Flight, Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.toy import answer
from pdserve.text.tokenizer import load_tokenizer
from pdserve.v1 import worker_pb2
from pdserve.worker.steps import MAX_BARREN_STEPS, Begun, EngineBroken, Isolation, RowFailed

PROMPT = list(range(10, 30))


class FlakyEngine:
    """Launches steps asynchronously. While `is_flaky` is set, every fifth step with several rows raises."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self._engine = load_engine(config, role)
        self.spec, self.pool = self._engine.spec, self._engine.pool
        self.num_steps = self.num_failed = self.num_async = 0
        self.is_flaky = False

    def step(self, rows: Sequence[Row]) -> list[RowOut]:
        self.num_steps += 1
        if self.is_flaky and len(rows) > 1 and self.num_steps % 5 == 0:
            self.num_failed += 1
            raise RuntimeError("a launch failed")
        return self._engine.step(rows)

    def launch(self, rows: Sequence[Row], after: Flight | None) -> DeferredFlight:
        self.num_async += after is not None
        return DeferredFlight(self, rows, after if isinstance(after, DeferredFlight) else None)

    def close(self) -> None:
        self._engine.close()


def is_empty(program: Any) -> bool:
    program.check()
    return program.is_idle and program.blocks.num_referenced == 0


async def test_a_failed_step_drops_the_next_one(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, load=FlakyEngine, speculation="off", toy_step_s=0.001)
    d.program.engine.is_flaky = True
    router = await attach(d)
    lengths = {"a": 40, "b": 25, "c": 33}
    for name, length in lengths.items():
        bad = {} if name == "a" else {"bad_token_ids": ((1, 2),)}  # Sampled late in an asynchronous step.
        sequence = ask(name, [*PROMPT, ord(name)], max_tokens=length, **bad)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    for name, length in lengths.items():
        assert await router.finished(name) == answer([*PROMPT, ord(name)], length), name
    await d.until(is_empty, "an empty worker")
    engine = d.program.engine
    assert engine.num_failed > 3
    assert engine.num_async > 10
    assert not d.fatal


async def test_async_scheduling_is_automatic_or_forced(start: Any, attach: Any, ask: Any) -> None:
    for choice, is_used in (("auto", False), ("on", True), ("off", False)):
        d = start(Role.DECODE, speculation="off", async_scheduling=choice, worker_id=f"d-{choice}")
        assert (d.program._in_flight is not None) == is_used


def test_successful_async_steps_clear_suspicion() -> None:
    """Only consecutive failed steps break an engine. Without a free block for a probe, only a successful step resets
    the count."""

    class Flying:
        is_failing = True
        unsampled = ()

        def wait(self) -> list[RowOut]:
            if self.is_failing:
                raise RuntimeError("a launch failed")
            return []

        def step(self, rows: Sequence[Row]) -> list[RowOut]:
            raise RuntimeError("and alone")

    class Step:
        def rows_again(self) -> list[Row | None]:
            return [Row(tokens=[1], start=0, blocks=[0]), None]

    class Nothing:
        def plan_after(self, step: Any) -> None:
            return None

    engine: Any = Flying()
    scheduler: Any = Nothing()
    in_flight = StepsInFlight(engine, scheduler, Isolation(engine, lambda: None))
    for _ in range(2):
        engine.is_failing = True
        for _ in range(MAX_BARREN_STEPS - 1):
            failed, left = in_flight.read(Begun(Step(), engine))
            assert isinstance(failed, RowFailed)
            assert left == RowOut()
        engine.is_failing = False
        in_flight.read(Begun(Step(), engine))
    engine.is_failing = True
    for _ in range(MAX_BARREN_STEPS - 1):
        in_flight.read(Begun(Step(), engine))
    with pytest.raises(EngineBroken):
        in_flight.read(Begun(Step(), engine))


# -- grammars and bad words together with plain rows -----------------------------------------------------------

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
SETTINGS: dict[str, Any] = {
    "model": str(BUNDLED),
    "deterministic": "on",  # answers from steps of different rows are compared
    "block_size": 16,
    "kv_blocks": 200,
    "max_context_tokens": 256,
    "max_batch_tokens": 64,
    "speculation": "off",
    "profile": "h100-sxm.llama-3.1-8b.bf16",
}
SEEDED = {"temperature": 0.9, "seed": 7}
LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4}
DEAD_END = Grammar(GrammarKind.LARK, 'start: "ab" X\nX: /a/ & /b/')
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 40},
    "seeded": {"max_tokens": 30, **SEEDED},
    "list": {"max_tokens": 60, "grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LIST)), **SEEDED},
    "digits": {"max_tokens": 50, "grammar": Grammar(GrammarKind.REGEX, "[0-9 ]{25,28}")},
    "penalised": {
        "max_tokens": 40,
        "grammar": Grammar(GrammarKind.REGEX, "[a-f]{30}"),
        "frequency_penalty": 0.5,
        **SEEDED,
    },
    "bad words": {"max_tokens": 40, "bad_token_ids": ((13,), (12, 14))},
}


async def test_async_tokens_equal_synchronous_ones(start: Any, attach: Any, ask: Any, monkeypatch: Any) -> None:
    prompt = load_tokenizer(str(BUNDLED)).encode("def config():\n    return ")
    num_late = 0
    sample = DeferredFlight.sample

    def counted(flight: DeferredFlight, rows: Any) -> None:
        nonlocal num_late
        num_late += len(rows)
        sample(flight, rows)

    monkeypatch.setattr(DeferredFlight, "sample", counted)
    answers = {}
    for choice in ("off", "on"):
        d = start(Role.DECODE, **SETTINGS, async_scheduling=choice, worker_id=f"d-{choice}")
        router = await attach(d)
        stuck = ask("stuck", prompt, max_tokens=20, grammar=DEAD_END)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=stuck, is_local=True))
        asked = [router.local(ask(name, prompt, **sampling)) for name, sampling in ASKED.items()]
        answers[choice] = dict(zip(ASKED, await asyncio.gather(*asked), strict=True))
        failed = await router.next("failed", "stuck")
        assert "stuck after 1 tokens" in failed.message
        await router.released("stuck", Role.DECODE)
        await router.close()
        assert (num_late > 60) == (choice == "on")
        assert not d.fatal
    assert answers["on"] == answers["off"]
    text = load_tokenizer(str(BUNDLED)).decode(answers["on"]["list"][:-1])
    assert set(json.loads(text)) <= {"red", "green", "blue"}
