"""A decode worker with asynchronous scheduling, over real gRPC, with an engine whose steps sometimes fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decode_worker.steps_in_flight import DeferredFlight, StepsInFlight
from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.interface import Flight, Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.toy import answer
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
