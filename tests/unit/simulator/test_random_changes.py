"""Random sequences of changes, drains and crashes of a simulated cluster: nothing leaks, and each request ends once.

Changes are planned by the launcher's own code (pdserve/launch/changes/plans.py). `Launcher` carries the plans out as
pdserve/launch/changes/cluster.py does, with simulated times. The cluster is the simulator's, with the router's state
machine and the workers' schedulers. `python -m benchmarks.changes` makes such sequences on a live cluster.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final, final

import pytest

from pdserve.core.errors import ChangeFailed, ConfigError, InvalidRequest
from pdserve.core.live import LiveFrame
from pdserve.core.types import Role
from pdserve.launch.changes.plans import (
    RollStep,
    add_worker,
    check_serving,
    index_of,
    plan_roll,
    plan_scale,
    vacate,
    with_role,
    with_slots,
)
from pdserve.launch.spec import ClusterSpec, ports
from router.state.interface import DrainRequested, UndrainRequested
from simulator.cluster.world import Station, World
from simulator.model import RequestRow, TraceRequest, WorkerFault, WorkerFaultKind
from tests.unit.simulator.small import Listed, asked, cluster

NUM_SEQUENCES: Final = 1000
PER_TEST: Final = 50
FEW: Final = 30  # in each run of the tests
GPUS: Final = 9
POLL_S: Final = 0.05
DRAIN_S: Final = 2.0  # then requests that are left continue on other workers
SETTLE_S: Final = 0.2
RESTART_S: Final = 0.8
BAD_STARTS: Final = 0.1  # share of the starts
Script = Generator[float, None, None]  # yields the seconds that it waits


@final
class Launcher:
    """One change at a time; crashes, drains and undrains of operators come in between."""

    def __init__(self, world: World, spec: ClusterSpec, draw: random.Random) -> None:
        self.world, self.spec, self._draw = world, spec, draw
        self.is_changing = False
        self.made: Counter[str] = Counter()
        self._ended: set[Station] = set()
        self._next_port = 30_000
        self._most_workers = len(spec.slots)
        self.check()

    # -- what it sees --------------------------------------------------------------------------------------------

    def live(self) -> LiveFrame | None:
        """None while no router runs."""
        routers = self.world.routers
        return self.world.fronts[routers[0]].state.live_frame(self.world.agenda.now_s, 0) if routers else None

    def check(self) -> None:
        spec = self.spec
        running = [one for one in spec.slots if not one.is_vacant]
        names = [one.worker_id for one in running]
        assert len(set(names)) == len(names), f"a name twice: {names}"
        assert any(one.role is Role.DECODE and not one.is_surge for one in running), "no decode worker is left"
        gpus = [gpu for one in spec.slots for gpu in one.gpus]
        assert len(set(gpus)) == len(gpus) == len(spec.slots), f"a GPU has leaked, or two workers have it: {gpus}"
        numbers = [port for _, _, port in ports(spec, are_workers_here=True)]
        assert len(set(numbers)) == len(numbers), f"a port twice: {numbers}"
        self._most_workers = max(self._most_workers, len(running))
        assert len(spec.slots) <= self._most_workers, "a slot has leaked"

    # -- changes -------------------------------------------------------------------------------------------------

    def change(self, kind: str) -> None:
        if self.is_changing:
            self.made["rejected"] += 1
            return
        self.is_changing = True
        self._go(self._whole(kind))

    def _go(self, script: Script) -> None:
        wait_s = next(script, None)
        if wait_s is not None:
            self.world.agenda.after(wait_s, self._go, script)

    def _whole(self, kind: str) -> Script:
        try:
            yield from {"scale": self._scale, "role": self._set_role, "roll": self._roll}[kind]()
            self.made[kind] += 1
        except (ConfigError, InvalidRequest):
            self.made["refused"] += 1
        except ChangeFailed:
            self.made["stopped"] += 1
        self.check()
        self.is_changing = False

    def _frame(self) -> Generator[float, None, LiveFrame]:
        while (frame := self.live()) is None:
            yield POLL_S
        return frame

    def _scale(self) -> Script:
        draw, before = self._draw, self.spec
        wanted = draw.choice([(draw.randint(0, 3), None), (None, draw.randint(0, 4)), (1, 2), (0, 1), (2, 3)])
        plan = plan_scale(before.slots, (yield from self._frame()).workers, *wanted)
        try:
            for worker_id, role in plan.add:
                self._take_slot(worker_id, role, is_surge=False)
        except ConfigError:
            self.spec = before
            raise
        yield self._draw.uniform(0.1, 2.0)
        have_started = [self._start_added(worker_id) for worker_id, _ in plan.add]
        yield POLL_S
        if not all(have_started):
            raise ChangeFailed("a worker did not start")
        for worker_id in plan.remove:
            yield from self._end(worker_id)

    def _set_role(self) -> Script:
        worker_id = self._draw.choice(self.spec.worker_ids)
        slot = self.spec.slots[index_of(self.spec, worker_id)]
        with_role(self.spec, worker_id, slot.role.other)
        check_serving((yield from self._frame()).workers, worker_id)
        yield from self._replace(worker_id, slot.role.other)

    def _roll(self) -> Script:
        draw = self._draw
        frame = yield from self._frame()
        chosen = draw.sample(self.spec.worker_ids, draw.choice([0, 0, 1]))
        surge = draw.choice([0, 1])
        added = ""
        try:
            for step in plan_roll(self.spec.slots, frame.workers, chosen, surge, is_undo=draw.random() < 0.3):
                added = yield from self._step(step, added)
                self.check()
                yield SETTLE_S
        finally:
            if added:
                yield from self._end(added)

    def _step(self, step: RollStep, added: str) -> Generator[float, None, str]:
        """The worker that stands in for others after it."""
        match step.kind:
            case "add":
                self._take_slot(step.worker_id, step.role, is_surge=True)
                yield self._draw.uniform(0.1, 2.0)
                if not self._start_added(step.worker_id):
                    raise ChangeFailed("a worker did not start")
                yield POLL_S
                return step.worker_id
            case "replace":
                check_serving((yield from self._frame()).workers, step.worker_id)
                yield from self._replace(step.worker_id, step.role)
            case "end":
                yield from self._end(step.worker_id)
                return ""
        return added

    # -- one worker ----------------------------------------------------------------------------------------------

    def _take_slot(self, worker_id: str, role: Role, *, is_surge: bool) -> None:
        self._next_port += 1
        self.spec = add_worker(self.spec, worker_id, role, self._next_port, is_surge=is_surge)
        self.check()

    def _start(self, worker_id: str) -> None:
        role = self.spec.slots[index_of(self.spec, worker_id)].role
        self.world.add_worker(replace(self.world.config.workers[0], worker_id=worker_id, role=role))

    def _start_added(self, worker_id: str) -> bool:
        """Whether it has started. Otherwise its slot is free again."""
        if self._draw.random() < BAD_STARTS:
            self.spec = vacate(self.spec, worker_id)
            return False
        self._start(worker_id)
        return True

    def _end(self, worker_id: str) -> Script:
        yield from self._drain(worker_id)
        self._stop(worker_id, is_forgotten=True)
        self.spec = vacate(self.spec, worker_id)

    def _replace(self, worker_id: str, role: Role) -> Script:
        yield from self._drain(worker_id)
        self._stop(worker_id, is_forgotten=False)
        before = self.spec
        self.spec = with_role(before, worker_id, role)
        yield self._draw.uniform(0.1, 2.0)
        is_bad = self._draw.random() < BAD_STARTS
        if is_bad:  # it is started again as before
            self.spec = before
        self._start(worker_id)
        yield POLL_S
        if is_bad:
            raise ChangeFailed("a worker did not start")

    def _drain(self, worker_id: str) -> Script:
        yield from self._frame()
        self.tell(DrainRequested(worker_id=worker_id))
        ends_s = self.world.agenda.now_s + DRAIN_S
        yield POLL_S
        station = self.world.stations[worker_id]
        while station.machine is not None and not station.machine.is_idle and self.world.agenda.now_s < ends_s:
            yield POLL_S

    def _stop(self, worker_id: str, *, is_forgotten: bool) -> None:
        self._ended.add(self.world.stations[worker_id])
        self.world.stop_worker(worker_id, is_forgotten=is_forgotten)

    # -- operators and crashes -----------------------------------------------------------------------------------

    def tell(self, event: DrainRequested | UndrainRequested) -> None:
        routers = self.world.routers
        if routers:
            self.world.fronts[self._draw.choice(routers)].submit(event)

    def drain(self) -> None:
        """During a change only of prefill workers: the launcher ends the worker that stood in, and those that `scale`
        ends, also if all other decode workers were drained meanwhile."""
        frame, worker_id = self.live(), self._draw.choice(self.spec.worker_ids)
        role = self.spec.slots[index_of(self.spec, worker_id)].role
        if frame is not None and not (self.is_changing and role is Role.DECODE):
            try:
                check_serving(frame.workers, worker_id)
            except ConfigError:
                return
            self.tell(DrainRequested(worker_id=worker_id))
            self.made["drain"] += 1

    def undrain(self) -> None:
        self.tell(UndrainRequested(worker_id=self._draw.choice(self.spec.worker_ids)))

    def kill_worker(self) -> None:
        station = self.world.stations.get(self._draw.choice(self.spec.worker_ids))
        if station is None or station.machine is None:
            return
        die(self.world, station)
        self.made["kill"] += 1
        self.world.agenda.after(RESTART_S, self._restart, station)

    def _restart(self, station: Station) -> None:
        if station not in self._ended:
            station.start()

    def kill_router(self) -> None:
        if self.world.routers:
            self.world.kill_router(self._draw.choice(self.world.routers), start_s=0.5)
            self.made["kill router"] += 1


def die(world: World, station: Station) -> None:
    station.inject(WorkerFault(at_s=world.agenda.now_s, worker_id=station.shape.worker_id, kind=WorkerFaultKind.DIE))


# --- one sequence ---------------------------------------------------------------------------------------------

CHANGES: Final = ("scale", "role", "roll")
OTHERS: Final = ("drain", "undrain", "kill_worker", "kill_router")
END_S: Final = 8.0  # after which no further operation begins
LONGEST_S: Final = 300.0


def requests(draw: random.Random) -> list[TraceRequest]:
    now_s, rows = 0.0, []
    for _ in range(draw.randint(12, 30)):
        now_s += draw.expovariate(4.0)
        cancel_after_s = draw.choice([None] * 9 + [draw.uniform(0.0, 2.0)])
        prompt = min(6000, round(draw.lognormvariate(6.0, 1.0)) + 1)
        rows.append(asked(now_s, prompt, draw.randint(1, 150), cancel_after_s=cancel_after_s))
    return rows


def run_sequence(seed: int) -> Counter[str]:
    """What was made."""
    draw = random.Random(seed)
    prefill, decode = draw.randint(0, 2), draw.randint(1, 3)
    config = cluster(
        prefill,
        decode,
        policy=draw.choice(["goodput", "goodput", "least-ttft"]),
        num_routers=draw.randint(1, 3),
        noise=0.1,
        seed=seed,
    )
    spec = ClusterSpec(
        model="toy",
        prefill=prefill,
        decode=decode,
        cores=4,
        redis="redis://127.0.0.1:7/0",
        metrics=draw.choice([None, 9500]),
        gpus=tuple(map(str, range(GPUS))),
        worker_ports=tuple(range(20_001, 20_001 + prefill + decode)),
    )
    rows = requests(draw)
    ends: Counter[int] = Counter()

    def ended(row: RequestRow) -> bool:
        ends[row.number] += 1
        return True

    world = World(Listed(rows), config, ended)
    launcher = Launcher(world, with_slots(spec), draw)
    for _ in range(draw.randint(3, 8)):
        at_s = draw.uniform(0.0, END_S)
        if draw.random() < 0.6:
            world.agenda.at(at_s, launcher.change, draw.choice(CHANGES))
        else:
            world.agenda.at(at_s, getattr(launcher, draw.choice(OTHERS)))
    world.start()
    steps = 0
    while world.step() or launcher.is_changing or world.agenda.now_s < END_S:
        steps += 1
        assert world.agenda.now_s < LONGEST_S, "a request or a change never ends"
        if world._is_over():
            world.agenda.step()
        if steps % 200 == 0:
            world.check()
    until_s = world.agenda.now_s + 2.0  # restarts, last messages
    while world.agenda.now_s < until_s:
        world.agenda.step()
    check_end(world, launcher, world.result().requests, ends)
    return launcher.made


def check_end(world: World, launcher: Launcher, rows: Sequence[RequestRow], ends: Counter[int]) -> None:
    made = launcher.made
    assert ends == Counter(row.number for row in rows), "a request has no end, or two"
    for row in rows:
        if row.outcome in ("served", "late"):
            assert row.tokens == row.output_tokens, f"{row.number}: {row.tokens} of {row.output_tokens} tokens"
        elif row.outcome == "rejected":  # by a new router while the only decode worker is away; the SDK tries again
            assert min(made["kill"], made["kill router"]) > 0, f"{row} was rejected, after {made}"
        elif row.outcome == "failed":  # a request that was on two workers when they crashed
            assert made["kill"] > 1, f"{row} has failed, after {made}"
        else:
            assert row.outcome == "cancelled", f"{row}, after {made}"
    launcher.check()
    assert world.network.is_quiet, "a transfer has no end"
    running = {one.worker_id: one.role for one in launcher.spec.slots if not one.is_vacant}
    machines = {one.shape.worker_id: one for one in world.machines()}
    assert {name: one.shape.role for name, one in machines.items()} == running, "workers of no slot, or slots of none"
    for machine in machines.values():
        assert machine.is_idle, "an attempt is held for nobody"
        assert machine.blocks.num_referenced == 0, "a block is held by nobody"
    for number in world.routers:
        state = world.fronts[number].state
        assert state.is_empty, "a router knows a request that has ended"
        known = {one.worker_id: one.role for one in state.snapshot().workers}
        assert known == running, "a router knows other workers than there are"
    assert len(world.routers) == world.config.num_routers


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(one, marks=pytest.mark.slow) for one in range(FEW, NUM_SEQUENCES, PER_TEST))],
)
def test_random_changes_leak_nothing_and_end_each_request_once(first: int) -> None:
    made: Counter[str] = Counter()
    for seed in range(first, FEW if first == 0 else min(first + PER_TEST, NUM_SEQUENCES)):
        try:
            made += run_sequence(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert made.keys() >= {"scale", "role", "roll", "drain", "kill", "kill router"}, "not each kind was made"
