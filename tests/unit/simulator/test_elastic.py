"""Workers that start, drain and change their role during a simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from router.scaling.controller import Controller
from router.scaling.interface import Change, ChangeKind, Decision, Observed, ScalingSettings, Size
from simulator.cluster.elastic import Elastic, TrueArrivals
from simulator.cluster.world import World
from simulator.model import SimResult
from tests.unit.simulator.small import Listed, asked, cluster

START = {role: Change(kind=ChangeKind.START, role=role, count=1) for role in Role}
STOP = {role: Change(kind=ChangeKind.STOP, role=role, count=1) for role in Role}
TO = {role: Change(kind=ChangeKind.CHANGE_ROLE, role=role, count=1) for role in Role}
SLO = Slo(ttft_s=2.0, tpot_s=0.1)


class Scripted:
    """Decides what it is told, at the decision with that number."""

    def __init__(self, changes: dict[int, Change]) -> None:
        self._changes = changes
        self.seen: list[Observed] = []

    def decide(self, observed: Observed, now_s: float) -> Decision:
        self.seen.append(observed)
        change = self._changes.get(len(self.seen))
        return Decision(at_s=now_s, changes=(change,) if change else (), reason="told", size=observed.ready)


def scripted(
    changes: dict[int, Change], prefills: int = 1, decodes: int = 2, count: int = 60
) -> tuple[World, SimResult, Scripted]:
    """Two requests per second, a decision every 5 s, 7 s for a start and 2 s for a change of role."""
    config = cluster(prefills, decodes, policy="goodput")
    rows = [asked(0.5 * number, 300, 40) for number in range(count)]
    controller = Scripted(changes)
    templates = {one.role: replace(one, worker_id="new") for one in cluster().workers}
    elastic = Elastic(
        controller=controller,
        prefill=templates[Role.PREFILL],
        decode=templates[Role.DECODE],
        start_s=7.0,
        change_role_s=2.0,
    )
    world = World(Listed(rows), config, elastic=elastic)
    result = world.run()
    world.check()
    return world, result, controller


def sizes(controller: Scripted) -> list[Size]:
    return [one.ready for one in controller.seen]


def test_a_new_worker_serves_after_its_start_and_is_paid_from_the_order() -> None:
    world, result, controller = scripted({1: START[Role.DECODE]})
    assert sizes(controller)[:4] == [Size(1, 2), Size(1, 2), Size(1, 3), Size(1, 3)]
    assert controller.seen[1].starting == Size(0, 1)
    assert any(row.decode_worker == "decode-new1" for row in result.requests)
    assert world.scaler is not None
    now_s = world.agenda.now_s
    assert world.scaler.worker_s(now_s) == pytest.approx(3 * now_s + (now_s - 5.0))


def test_a_stopped_worker_finishes_its_requests() -> None:
    world, result, controller = scripted({2: STOP[Role.DECODE]})
    assert all(row.outcome == "served" for row in result.requests)
    assert sizes(controller)[-1] == Size(1, 1)
    assert len(list(world.machines())) == 2
    assert world.scaler is not None
    now_s = world.agenda.now_s
    assert 2 * now_s + 10.0 <= world.scaler.worker_s(now_s) <= 2 * now_s + 20.0
    assert len(world.fronts[0].state.snapshot().workers) == 2


def test_a_worker_changes_its_role_after_its_drain() -> None:
    world, result, controller = scripted({2: TO[Role.PREFILL]})
    assert all(row.outcome == "served" for row in result.requests)
    assert sizes(controller)[-1] == Size(2, 1)
    assert world.scaler is not None
    assert world.scaler.worker_s(world.agenda.now_s) == pytest.approx(3 * world.agenda.now_s)


def test_the_last_decode_worker_stays() -> None:
    with pytest.raises(ConfigError, match="one decode worker stays"):
        scripted({1: STOP[Role.DECODE]}, decodes=1)


def test_arrivals_and_ends_are_counted() -> None:
    _, result, controller = scripted({})
    intervals = [one.interval for one in controller.seen]
    assert intervals[0].requests == 10
    assert intervals[0].prompt_tokens == 3000.0
    seen_until_s = intervals[-1].end_s
    ended = [row for row in result.requests if row.ended_s is not None and row.ended_s <= seen_until_s]
    assert sum(one.answers for one in intervals) == len(ended)
    assert sum(one.answer_tokens for one in intervals) == 40 * len(ended)
    assert sum(one.met for one in intervals) == sum(row.has_met_slo for row in ended)


def test_true_arrivals_count_what_an_earlier_prompt_had() -> None:
    trace = [
        asked(1.0, 1024, 10, block_ids=(1, 2)),
        asked(7.0, 1536, 10, block_ids=(1, 2, 3)),
        asked(8.0, 1024, 10, block_ids=(1, 2)),
    ]
    future = TrueArrivals(trace, SLO, block_tokens=512)(5.0)
    assert [one.requests for one in future] == [2]
    assert future[0].uncached_tokens == 512 + 1
    assert future[0].answer_tokens == 20.0


def test_equal_runs_decide_equally_and_lose_no_request() -> None:
    """A load that doubles, under the real controller: nothing fails, and all memory is returned."""
    rows = [asked(at / (4.0 if at < 240 else 12.0) + (0.0 if at < 240 else 40.0), 300, 30) for at in range(500)]
    decided = []
    for _ in range(2):
        settings = ScalingSettings(min_workers=1, max_workers=6, start_s=10.0, drain_s=3.0)
        shapes = {one.role: one for one in cluster().workers}
        elastic = Elastic(
            controller=Controller(settings),
            prefill=shapes[Role.PREFILL],
            decode=shapes[Role.DECODE],
            start_s=10.0,
        )
        world = World(Listed(rows), cluster(1, 1, policy="goodput", slo=SLO), elastic=elastic)
        result = world.run()
        world.check()
        assert world.scaler is not None
        assert any(one.changes for one in world.scaler.decisions)
        assert not [row for row in result.requests if row.outcome in ("failed", "unfinished")]
        assert all(machine.blocks.num_referenced == 0 for machine in world.machines())
        decided.append(world.scaler.decisions)
    assert decided[0] == decided[1]
