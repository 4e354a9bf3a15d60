"""Simulating a recorded run on the recorded cluster reproduces its requests, outcomes and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Role, Slo
from router.recording import replay
from router.state.interface import Command, Event, RouterSettings
from simulator.cluster.world import World, simulate
from simulator.model import NumberedLine, SimConfig, SimResult, TraceRequest, WorkerFault, WorkerFaultKind, WorkerShape
from simulator.traces.recorded import block_tokens, read_cluster, read_recording
from tests.support.slow import slow_except

BLOCK = 64
COST = CostPrior(
    prefill_base_s=0.004,
    prefill_per_token_s=4e-5,
    prefill_per_token_context_s=2e-9,
    decode_base_s=0.008,
    decode_per_row_s=1e-4,
    decode_per_context_token_s=2e-8,
)


class Recorder:
    """Wraps a router and records its events and commands."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self.lines = [replay.encode_settings(router.settings)]

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands: list[Command] = self._router.handle(event, now_s)
        self.lines.append(replay.encode_step(replay.make_step(now_s, event, commands)))
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)


class Requests:
    """Conversations of four turns. Every eleventh client disconnects early."""

    name, block_tokens = "talks", BLOCK

    def __iter__(self) -> Iterator[TraceRequest]:
        for number in range(400):
            talk, turn = number // 4 % 25 + 25 * (number // 100), number % 4
            blocks = tuple(1000 * talk + index for index in range(4 * (turn + 1)))
            yield TraceRequest(
                arrival_s=0.05 * number,
                prompt_tokens=BLOCK * len(blocks),
                output_tokens=20 + 37 * number % 100,
                block_ids=blocks,
                tenant=f"t{number % 3}",
                cancel_after_s=0.15 if number % 11 == 0 else None,
            )


class Recorded:
    name = "r"

    def __init__(self, lines: list[NumberedLine]) -> None:
        self._lines = lines
        self.block_tokens = block_tokens(lines, self.name)

    def __iter__(self) -> Iterator[TraceRequest]:
        return read_recording(self._lines, self.name)


def workers(prior: CostPrior | None = None) -> tuple[WorkerShape, ...]:
    names = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    return tuple(
        WorkerShape(worker_id=name, role=role, cost=COST, prior=prior, kv_capacity_tokens=64_000)
        for name, role in names.items()
    )


def recorded(policy: str) -> tuple[SimResult, list[NumberedLine]]:
    death = WorkerFault(at_s=8.0, worker_id="d1", kind=WorkerFaultKind.DIE, for_s=2.0)
    config = SimConfig(
        workers=workers(prior=CostPrior()),
        slo=Slo(ttft_s=0.5, tpot_s=0.05),
        router=RouterSettings(policy=policy),
        block_size=BLOCK,
        heartbeat_s=0.2,
        message_s=1e-3,
        faults=(death,),
    )
    world = World(Requests(), config)
    (front,) = world.fronts
    recorder = Recorder(front.state)
    front.state = recorder  # type: ignore[assignment]
    result = world.run()
    return result, list(enumerate(recorder.lines, start=1))


# Every run has a policy with transfers and one without. The third policy also transfers KV.
@pytest.mark.parametrize("policy", slow_except(["goodput", "dynamo", "colocated"], "goodput"))
def test_a_recorded_run_is_reproduced(policy: str) -> None:
    first, lines = recorded(policy)
    assert list(replay.replay(text for _, text in lines)) == []
    cluster = read_cluster(lines, "r")
    assert cluster.message_s == pytest.approx(1e-3)
    (death,) = cluster.faults
    assert death.worker_id == "d1"
    assert (death.at_s, death.for_s) == (pytest.approx(8.0, abs=0.05), pytest.approx(2.0, abs=0.1))
    second = simulate(Recorded(lines), cluster.config())
    assert len(second.requests) == len(first.requests) == 400
    for one, other in zip(first.requests, second.requests, strict=True):
        assert (one.prompt_tokens, one.tenant, one.slo) == (other.prompt_tokens, other.tenant, other.slo)
    outcomes = Counter(one.outcome for one in first.requests)
    again = Counter(one.outcome for one in second.requests)
    assert (outcomes - again).total() <= 8, (outcomes, again)
    assert min(outcomes["served"], outcomes["cancelled"]) > 10
    assert second.attainment == pytest.approx(first.attainment, abs=0.02)
    for name in ("ttft_s", "tpot_s"):
        was = median(getattr(one, name) for one in first.requests if one.outcome == "served")
        now = median(getattr(one, name) for one in second.requests if one.outcome == "served")
        assert now == pytest.approx(was, rel=0.05), name
    cached = [sum(one.cached_tokens for one in run.requests) for run in (first, second)]
    assert cached[1] == pytest.approx(cached[0], rel=0.1)
