"""Workers that start, drain, end and change their role during a simulation, as a controller decides. Pure.

The controller is production code (`router/scaling/`) or a baseline of the same interface. Simulated are only the times:
a start takes `start_s`, a worker that drains ends when its last request has ended, and a worker that changes its role
serves again `change_role_s` later, with an empty cache. Running answers do not move to other workers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, final

from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from router.scaling.demand import ArrivalLog, true_interval
from router.scaling.interface import Change, ChangeKind, Decision, Interval, Observed, ScalingController, Size
from router.scaling.observing import mean_cost, together
from router.state import interface
from simulator.cluster.agenda import Agenda
from simulator.cluster.decoder import DecodeMachine
from simulator.cluster.front import Front
from simulator.cluster.machine import AnyMachine
from simulator.cluster.tally import Tally
from simulator.model import TraceRequest, WorkerShape

POLL_S: Final = 0.25  # how often a draining worker is asked whether it is idle


class Foresight(Protocol):
    def __call__(self, now_s: float) -> tuple[Interval, ...]:
        """The true arrivals after `now_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How the size of a cluster changes. New workers have the shape of `prefill` or `decode`, apart from their id."""

    controller: ScalingController
    prefill: WorkerShape
    decode: WorkerShape
    every_s: float = 5.0  # between decisions
    start_s: float = 60.0
    change_role_s: float = 2.0
    foresight: Foresight | None = None  # makes the controller clairvoyant

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        if not self.every_s > 0.0:
            raise ConfigError("every_s", self.every_s, "a number above 0")
        for name in ("start_s", "change_role_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(name, getattr(self, name), "at least 0")


class AnyStation(Protocol):
    machine: AnyMachine | None
    tally: Tally

    @property
    def shape(self) -> WorkerShape: ...


class Workers(Protocol):
    """The world's workers."""

    def all_stations(self) -> Iterable[AnyStation]: ...

    def add_worker(self, shape: WorkerShape) -> None: ...

    def end_worker(self, worker_id: str) -> None: ...


@final
class Scaler:
    """Calls the controller, and carries its decisions out."""

    def __init__(self, elastic: Elastic, agenda: Agenda, fronts: Sequence[Front], workers: Workers) -> None:
        self._elastic, self._agenda, self._fronts, self._workers = elastic, agenda, fronts, workers
        self.logs = [ArrivalLog() for _ in fronts]
        self.decisions: list[Decision] = []
        self._starting = {Role.PREFILL: 0, Role.DECODE: 0}
        self._draining: dict[str, Role | None] = {}  # worker id -> role that it changes to; None: it ends
        self._changing = {Role.PREFILL: 0, Role.DECODE: 0}  # drained workers that start in this role
        self._num_started = 0
        self._worker_s = self._as_of_s = 0.0
        self._busy_s: dict[str, float] = {}

    def start(self) -> None:
        self._agenda.after(self._elastic.every_s, self._tick)

    def worker_s(self, now_s: float) -> float:
        """Worker-seconds until now, from the order to start a worker until its end."""
        return self._worker_s + self._num_paid * (now_s - self._as_of_s)

    # -- observation ---------------------------------------------------------------------------------------------

    @property
    def _num_paid(self) -> int:
        running = sum(one.machine is not None for one in self._workers.all_stations())
        return running + sum(self._starting.values()) + sum(self._changing.values())

    def _pay(self) -> None:
        """Called before the number of workers changes."""
        self._worker_s, self._as_of_s = self.worker_s(self._agenda.now_s), self._agenda.now_s

    def _ready(self, role: Role) -> list[AnyStation]:
        return [
            one
            for one in self._workers.all_stations()
            if one.machine is not None and one.shape.role is role and one.shape.worker_id not in self._draining
        ]

    def _observed(self) -> Observed:
        now_s, elastic = self._agenda.now_s, self._elastic
        prefills, decodes = self._ready(Role.PREFILL), self._ready(Role.DECODE)
        drains = [one.shape.role for one in self._workers.all_stations() if one.shape.worker_id in self._draining]
        starting = {role: self._starting[role] + self._changing[role] for role in Role}
        facts = self._fronts[0].state.snapshot()
        rows = [one.machine.num_rows for one in decodes if isinstance(one.machine, DecodeMachine)]
        parts = [log.take(now_s) for log in self.logs]
        answers = [log.running_tokens() for log in self.logs]
        num_answers = sum(count for count, _ in answers)
        return Observed(
            interval=parts[0] if len(parts) == 1 else together(parts, parts[0].begin_s, parts[0].end_s),
            ready=Size(len(prefills), len(decodes)),
            starting=Size(starting[Role.PREFILL], starting[Role.DECODE]),
            draining=Size(drains.count(Role.PREFILL), drains.count(Role.DECODE)),
            queued=sum(front.state.num_queued for front in self._fronts),
            running=sum(front.state.num_running for front in self._fronts),
            tokens_so_far=sum(tokens for _, tokens in answers) / num_answers if num_answers else 0.0,
            cost=mean_cost([one.cost for one in facts.workers if one.is_connected]) or elastic.decode.cost,
            prefill_busy=self._busy_share(prefills),
            decode_rows=sum(rows) / len(rows) if rows else 0.0,
            kv_tokens=elastic.decode.kv_capacity_tokens,
            max_batch=elastic.decode.max_batch,
            max_batch_tokens=elastic.prefill.max_batch_tokens,
            future=elastic.foresight(now_s) if elastic.foresight is not None else (),
        )

    def _busy_share(self, stations: Sequence[AnyStation]) -> float:
        """Of the last interval."""
        busy_s = 0.0
        for one in stations:
            total_s = one.tally.row.busy_s
            busy_s += total_s - self._busy_s.get(one.shape.worker_id, 0.0)
            self._busy_s[one.shape.worker_id] = total_s
        return min(1.0, busy_s / (self._elastic.every_s * len(stations))) if stations else 0.0

    # -- decisions -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        decision = self._elastic.controller.decide(self._observed(), self._agenda.now_s)
        self.decisions.append(decision)
        for change in decision.changes:
            self._carry_out(change)
        self._agenda.after(self._elastic.every_s, self._tick)

    def _carry_out(self, change: Change) -> None:
        self._pay()
        match change.kind:
            case ChangeKind.START:
                self._starting[change.role] += change.count
                for _ in range(change.count):
                    self._agenda.after(self._elastic.start_s, self._started, change.role, self._starting)
            case ChangeKind.STOP:
                self._drain(change.role, change.count, None)
            case ChangeKind.CHANGE_ROLE:
                self._drain(change.role.other, change.count, change.role)

    def _drain(self, role: Role, count: int, becomes: Role | None) -> None:
        """Those whose loss costs least: with the fewest requests, and the least memory held."""
        ready = sorted(self._ready(role), key=_work_held)
        if len(ready) < count or (role is Role.DECODE and len(ready) == count):
            raise ConfigError("change", f"{count} of {len(ready)} {role.value} workers", "one decode worker stays")
        for one in ready[:count]:
            worker_id = one.shape.worker_id
            self._draining[worker_id] = becomes
            for front in self._fronts:
                front.submit(interface.DrainRequested(worker_id=worker_id))
            self._agenda.after(POLL_S, self._poll, one)

    def _poll(self, station: AnyStation) -> None:
        machine, worker_id = station.machine, station.shape.worker_id
        if machine is not None and not machine.is_idle:
            self._agenda.after(POLL_S, self._poll, station)
            return
        self._pay()
        becomes = self._draining.pop(worker_id)
        if machine is not None:
            self._workers.end_worker(worker_id)
        if becomes is not None:
            self._changing[becomes] += 1
            self._agenda.after(self._elastic.change_role_s, self._started, becomes, self._changing)

    def _started(self, role: Role, waiting: dict[Role, int]) -> None:
        self._pay()
        waiting[role] -= 1
        self._num_started += 1
        shape = self._elastic.prefill if role is Role.PREFILL else self._elastic.decode
        self._workers.add_worker(replace(shape, worker_id=f"{role.value}-new{self._num_started}"))


def _work_held(station: AnyStation) -> tuple[int, int]:
    machine = station.machine
    return (len(machine.scheduler.live()), machine.blocks.num_referenced) if machine is not None else (0, 0)


@final
class TrueArrivals:
    """The arrivals of a trace in bins, with the lengths of their answers. Prompts count as cached where an earlier
    prompt had the same blocks."""

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        slo: Slo,
        *,
        block_tokens: int,
        width_s: float = 5.0,
        ahead_s: float = 600.0,
    ) -> None:
        bins: dict[int, list[tuple[int, int, int, Slo]]] = {}
        seen: set[int] = set()
        for one in trace:
            held = 0
            while held < len(one.block_ids) and one.block_ids[held] in seen:
                held += 1
            seen.update(one.block_ids)
            cached = min(held * block_tokens, one.prompt_tokens - 1)
            request = (one.prompt_tokens, cached, one.output_tokens, one.slo or slo)
            bins.setdefault(int(one.arrival_s / width_s), []).append(request)
        last = max(bins, default=-1)
        self._intervals = [
            true_interval(number * width_s, (number + 1) * width_s, bins.get(number, ())) for number in range(last + 1)
        ]
        self._ahead_s = ahead_s

    def __call__(self, now_s: float) -> tuple[Interval, ...]:
        intervals = self._intervals
        begin = bisect_left(intervals, now_s - 1e-6, key=lambda one: one.begin_s)
        end = bisect_left(intervals, now_s + self._ahead_s, key=lambda one: one.begin_s)
        return tuple(intervals[begin:end])
