"""Simulates a whole cluster with a trace: `simulate`. Pure: time comes from the agenda, randomness from the seed.

The decisions are made by production code: RouterState, the workers' schedulers, the block allocator, PrefixIndex and
kvtransfer's sessions. Only time, bytes and messages between them are simulated. docs/simulator.md has the formulas.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.kv.blocks import CacheChange
from pdserve.core.types import Role
from pdserve.prefix.index import PrefixDepths, PrefixIndex
from router.state.interface import (
    Command,
    DrainRequested,
    Event,
    SessionEnded,
    UndrainRequested,
    WorkerForgotten,
    WorkerLost,
)
from simulator.cluster.agenda import Agenda
from simulator.cluster.decoder import DecodeMachine
from simulator.cluster.elastic import Elastic, Scaler
from simulator.cluster.front import Front, OnStep, SimulatedCall
from simulator.cluster.machine import AnyMachine, Environment
from simulator.cluster.network import Network
from simulator.cluster.prefiller import PrefillMachine
from simulator.cluster.prompts import BlockNames, block_names
from simulator.cluster.speed import Speed
from simulator.cluster.tally import Samples, Tally
from simulator.cluster.tiers import TierRules
from simulator.model import (
    RequestRow,
    Sample,
    SimConfig,
    SimResult,
    TraceRequest,
    WorkerFault,
    WorkerFaultKind,
    WorkerShape,
)

# --- a worker and its successors ------------------------------------------------------------------------------
# Their speed, their statistics, and the current instance.


@final
class Station:
    def __init__(self, env: Environment, shape: WorkerShape, number: int) -> None:
        config = env.config
        self._env, self.shape = env, shape
        self._speed = Speed(shape, config.noise, random.Random(config.seed * 1_000_003 + number))
        self.tally = Tally(shape)
        self.machine: AnyMachine | None = None
        self.num_lives = 0

    def start(self) -> None:
        self.num_lives += 1
        kind = PrefillMachine if self.shape.role is Role.PREFILL else DecodeMachine
        self.machine = kind(self._env, self.shape, self._speed, self.tally, str(self.num_lives))
        self.machine.connect()

    def inject(self, fault: WorkerFault) -> None:
        machine, agenda = self.machine, self._env.agenda
        match fault.kind:
            case WorkerFaultKind.DIE:
                if machine is None:
                    return
                self.machine = None
                machine.die()
                lost = WorkerLost(worker_id=self.shape.worker_id, reason="it died")
                for router in self._env.routers:
                    machine.send_event(router, lost)
                if fault.for_s < math.inf:
                    agenda.after(fault.for_s, self.start)
            case WorkerFaultKind.SLOW:
                self._turn(fault.factor, begins=True)
                if fault.for_s < math.inf:
                    agenda.after(fault.for_s, self._turn, fault.factor, False)
            case WorkerFaultKind.STALL:
                if machine is not None:
                    machine.stall(fault.for_s)
            case WorkerFaultKind.DRAIN:
                worker_id = self.shape.worker_id
                self._tell_a_router(DrainRequested(worker_id=worker_id))
                if fault.for_s < math.inf:
                    agenda.after(fault.for_s, self._tell_a_router, UndrainRequested(worker_id=worker_id))

    def _tell_a_router(self, event: Event) -> None:
        self._env.send_event(self._env.routers[0], event)

    def _turn(self, factor: float, begins: bool) -> None:
        if self.machine is not None:
            self.machine.change_speed()
        if begins:
            self._speed.factors.append(factor)
        else:
            self._speed.factors.remove(factor)

    def finish(self) -> None:
        """The statistics up to now."""
        if self.machine is not None:
            self.machine.update_tally()


# --- the cluster ----------------------------------------------------------------------------------------------

LONGEST_S: Final = 86_400.0  # after the last arrival; requests that have not ended by then will never end
RESUME_S: Final = 0.1  # after which the SDK sends an interrupted call again
MOST_ENDED: Final = 100_000  # requests whose end is known to later ones that follow them
SETTLE_S: Final = 300.0  # after the last request has ended, for workers to release memory

OnEnded = Callable[[RequestRow], bool]


def simulate(
    trace: Iterable[TraceRequest],
    config: SimConfig,
    on_ended: OnEnded | None = None,
    *,
    on_step: OnStep | None = None,
    keeps_rows: bool = True,
) -> SimResult:
    """`on_ended` is called with each row as it ends; if it returns False, the run stops. `on_step` is called with each
    event of the first router and its commands. Without `keeps_rows` the result has no request rows, so that a trace may
    be larger than memory.

    Raises ConfigError on an invalid config, an unknown policy, or an invalid row of the trace, with its number.
    """
    return World(trace, config, on_ended, on_step=on_step, keeps_rows=keeps_rows).run()


@final
class World:
    """One run. A class of its own, so that callers can inspect it afterwards."""

    def __init__(
        self,
        trace: Iterable[TraceRequest],
        config: SimConfig,
        on_ended: OnEnded | None = None,
        *,
        on_step: OnStep | None = None,
        keeps_rows: bool = True,
        elastic: Elastic | None = None,
        tier_rules: TierRules | None = None,
    ) -> None:
        """With `elastic`, `config.workers` are only the first ones. `tier_rules` None: those of live workers."""
        self.config = config
        self.agenda = Agenda()
        self.network = Network(self.agenda)
        self.index = PrefixIndex()
        self._name: str = getattr(trace, "name", "trace")
        self._block_tokens: int = getattr(trace, "block_tokens", 0)
        if self._block_tokens % config.block_size:
            expected = f"a divisor of the trace's {self._block_tokens} tokens per block id"
            raise ConfigError("block_size", config.block_size, expected)
        self._env = Environment(
            agenda=self.agenda,
            config=config,
            network=self.network,
            routers=list(range(config.num_routers)),
            send_event=self._send_event,
            cache_changed=self._cache_changed,
            tier_rules=tier_rules or TierRules(),
            machine=self._machine,
        )
        self._on_step, self._on_ended = on_step, on_ended
        self._open = set(self._env.routers)  # those that take calls
        self.fronts = [self._front(number, elastic) for number in self._env.routers]  # also those that have died
        self.stations = {
            shape.worker_id: Station(self._env, shape, number) for number, shape in enumerate(config.workers)
        }
        self.scaler = Scaler(elastic, self.agenda, self.fronts, self) if elastic is not None else None
        for fault in config.faults:
            station = self.stations.get(fault.worker_id)
            if station is None:
                known = ", ".join(self.stations)
                raise ConfigError("faults", fault.worker_id, f"a worker of this cluster: {known}")
            self.agenda.at(fault.at_s, station.inject, fault)
        self.rows: list[RequestRow] = []
        self._samples = Samples()
        self._arrivals = self._checked(trace)
        self._keeps_rows = keeps_rows
        self._pending: set[int] = set()  # numbers of the requests that are due and have not ended
        self._following: dict[int, list[tuple[int, TraceRequest]]] = {}  # requests that wait for the end of another
        self._ended_s: OrderedDict[int, float] = OrderedDict()  # of the last requests, by number
        self._last_turns: dict[int, TraceRequest] = {}  # that have not ended, and end their session
        self._has_more = True
        self._is_stopped = False
        self._last_word_s = 0.0
        self._first_arrival_s: float | None = None
        self._last_arrival_s = 0.0

    def run(self) -> SimResult:
        self.start()
        while self.step():
            pass
        return self.result()

    def start(self) -> None:
        for station in self.stations.values():
            station.start()
        if self.scaler is not None:
            self.scaler.start()
        self._next_arrival()
        self._sample()

    def step(self) -> bool:
        """Runs the next event. False: the run has ended."""
        return not self._is_over() and self.agenda.step()

    def result(self) -> SimResult:
        for station in self.stations.values():
            station.finish()
        counters = Counter[str]()
        for front in self.fronts:
            counters.update(front.state.counters)
        counters["transferred_bytes"] = self.network.num_bytes
        return SimResult(
            trace=self._name,
            config=self.config,
            requests=self.rows,
            workers=[station.tally.finish() for station in self.stations.values()],
            samples=self._samples.kept,
            span_s=self._last_arrival_s - (self._first_arrival_s or 0.0),
            counters=dict(counters),
        )

    def machines(self) -> Iterator[AnyMachine]:
        for station in self.stations.values():
            if station.machine is not None:
                yield station.machine

    # -- workers that come and go --------------------------------------------------------------------------------

    def all_stations(self) -> Iterable[Station]:
        return self.stations.values()

    def add_worker(self, shape: WorkerShape) -> None:
        """It may have the name of one that has ended."""
        former = self.stations.get(shape.worker_id)
        station = self.stations[shape.worker_id] = Station(self._env, shape, len(self.stations))
        if former is not None:
            assert former.machine is None, f"{shape.worker_id} has not ended"
            station.num_lives = former.num_lives
        station.start()

    def end_worker(self, worker_id: str) -> None:
        """Of a worker that is idle. Routers lose its stream, and forget it."""
        machine = self.stations[worker_id].machine
        assert machine is not None, f"{worker_id} has ended"
        assert machine.is_idle, f"{worker_id} has requests"
        self.stop_worker(worker_id)

    def stop_worker(self, worker_id: str, *, is_forgotten: bool = True) -> None:
        """`is_forgotten` False: another one takes its place, with its name."""
        fault = WorkerFault(at_s=self.agenda.now_s, worker_id=worker_id, kind=WorkerFaultKind.DIE)
        self.stations[worker_id].inject(fault)
        if is_forgotten:
            for router in self._env.routers:
                self.agenda.after(self.config.message_s, self._send_event, router, WorkerForgotten(worker_id=worker_id))

    # -- routers that die ----------------------------------------------------------------------------------------

    @property
    def routers(self) -> tuple[int, ...]:
        """The numbers of those that run."""
        return tuple(self._env.routers)

    def kill_router(self, number: int, start_s: float = 1.0) -> None:
        """Another router starts `start_s` later. The calls in progress continue on any router at the next token, as
        those of the SDK do."""
        calls = self.fronts[number].die()
        self._env.routers.remove(number)
        self._open.discard(number)
        for machine in self.machines():  # after its last messages
            self.agenda.after(self.config.message_s, machine.deliver, machine.router_gone, number)
        for call in calls:
            self.agenda.after(RESUME_S, self._resume, call)
        self.agenda.after(start_s, self._start_router)

    def _start_router(self) -> None:
        number = len(self.fronts)
        self.fronts.append(self._front(number, None))
        self._env.routers.append(number)
        for machine in self.machines():
            machine.attach(number)
        self.agenda.after(self.config.message_s, self._open_router, number)

    def _open_router(self, number: int) -> None:
        """It takes calls once the workers are attached to it."""
        if number in self._env.routers:
            self._open.add(number)

    def _resume(self, call: SimulatedCall) -> None:
        front = self._front_of(call.row.number)
        if front is None:
            self.agenda.after(RESUME_S, self._resume, call)
        else:
            front.resume(call)

    def _front_of(self, request: int) -> Front | None:
        """The router that serves the request with that number; None: none takes calls."""
        routers = sorted(self._open)
        return self.fronts[routers[request % len(routers)]] if routers else None

    def _front(self, number: int, elastic: Elastic | None) -> Front:
        seen = self._step_of(number, elastic)
        return Front(number, self.config, self.agenda, self._machine, self._lookup, self._ended, seen)

    def _step_of(self, number: int, elastic: Elastic | None) -> OnStep | None:
        """What sees the events of the router: the caller those of the first, the scaler those of each."""
        caller = None if number else self._on_step
        if elastic is None:
            return caller

        def seen(now_s: float, event: Event, commands: list[Command]) -> None:
            assert self.scaler is not None
            self.scaler.logs[number].handled(event, commands)
            if caller is not None:
                caller(now_s, event, commands)

        return seen

    def check(self) -> None:
        """Raises AssertionError unless all tables are consistent."""
        for front in self.fronts:
            front.state.check()
        for machine in self.machines():
            machine.scheduler.check()
        self.index.check()

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def _num_open(self) -> int:
        """Requests that are due and have not ended."""
        return len(self._pending)

    def _is_over(self) -> bool:
        if self._is_stopped:
            return True
        if self._has_more:
            return False
        now_s = self.agenda.now_s
        if self._num_open:
            return now_s > self._last_arrival_s + LONGEST_S
        is_settled = self.network.is_quiet and all(machine.is_idle for machine in self.machines())
        return (is_settled and all(self.fronts[number].state.is_empty for number in self._env.routers)) or (
            now_s > self._last_word_s + SETTLE_S
        )

    def _ended(self, row: RequestRow) -> None:
        self._pending.discard(row.number)
        self._ended_s[row.number] = self.agenda.now_s
        if len(self._ended_s) > MOST_ENDED:
            self._ended_s.popitem(last=False)
        if (last := self._last_turns.pop(row.number, None)) is not None:
            self.agenda.after(0.0, self._end_session, SessionEnded(tenant=last.tenant, session_id=last.session))
        for number, request in self._following.pop(row.number, ()):
            self._follow(number, request, self.agenda.now_s)
        self._last_word_s = self.agenda.now_s
        if self._on_ended is not None and not self._is_stopped and not self._on_ended(row):
            self._is_stopped = True

    def _end_session(self, event: SessionEnded) -> None:
        """The router that the client asks tells the others."""
        for number in self._env.routers:
            self.fronts[number].submit(event)

    # -- requests ------------------------------------------------------------------------------------------------

    def _checked(self, trace: Iterable[TraceRequest]) -> Iterator[tuple[int, TraceRequest]]:
        before_s = 0.0
        for number, request in enumerate(trace):
            where = f"trace[{number}]"
            if not 0.0 <= request.arrival_s < math.inf:
                raise ConfigError(f"{where}.arrival_s", request.arrival_s, "a finite number, at least 0")
            if request.arrival_s < before_s:
                raise ConfigError(
                    f"{where}.arrival_s", request.arrival_s, f"no earlier than the one before, {before_s}"
                )
            before_s = request.arrival_s
            for field in ("prompt_tokens", "output_tokens"):
                if getattr(request, field) < 1:
                    raise ConfigError(f"{where}.{field}", getattr(request, field), "at least 1")
            if request.cancel_after_s is not None and not request.cancel_after_s >= 0.0:
                raise ConfigError(f"{where}.cancel_after_s", request.cancel_after_s, "at least 0")
            if request.ends_session and not request.session:
                raise ConfigError(f"{where}.ends_session", True, "false for a request without a session")
            if request.block_ids and not self._block_tokens:
                raise ConfigError(f"{where}.block_ids", "ids", "a trace with the number of tokens per id")
            yield number, request

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._has_more = False
            return
        number, request = arrival
        self.agenda.at(request.arrival_s, self._due, number, request)

    def _due(self, number: int, request: TraceRequest) -> None:
        """The time in the trace has come. If the request follows another one, it also waits for the end of that."""
        before = request.follows
        if before is None:
            self._arrive(number, request)
        elif before in self._pending:
            self._following.setdefault(before, []).append((number, request))
            self._pending.add(number)
        else:
            self._follow(number, request, self._ended_s.get(before, 0.0))
        self._next_arrival()

    def _follow(self, number: int, request: TraceRequest, ended_s: float) -> None:
        self._pending.add(number)
        self.agenda.at(max(self.agenda.now_s, ended_s + request.pause_s), self._arrive, number, request)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        now_s = self.agenda.now_s
        if self._first_arrival_s is None:
            self._first_arrival_s = now_s
        self._last_arrival_s = now_s
        row = RequestRow(
            number=number,
            arrival_s=now_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            slo=request.slo or self.config.slo,
            tenant=request.tenant,
        )
        if self._keeps_rows:
            self.rows.append(row)
        self._pending.add(number)
        if request.ends_session:
            self._last_turns[number] = request
        names = block_names(number, request, self._block_tokens, self.config.block_size)
        self._send_request(request, row, names)

    def _send_request(self, request: TraceRequest, row: RequestRow, names: BlockNames) -> None:
        front = self._front_of(row.number)
        if front is None:
            self.agenda.after(RESUME_S, self._send_request, request, row, names)
        else:
            front.arrive(request, row, names)

    # -- between routers and workers -------------------------------------------------------------------------------

    def _machine(self, worker_id: str) -> AnyMachine | None:
        return self.stations[worker_id].machine

    def _send_event(self, router: int, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._forget_cache(event.worker_id)
        self.fronts[router].submit(event)

    def _lookup(self, hashes: tuple[bytes, ...]) -> PrefixDepths:
        return self.index.lookup(hashes)

    def _cache_changed(self, worker_id: str, incarnation: str, change: CacheChange) -> None:
        self.agenda.after(self.config.index_delay_s, self._apply_change, worker_id, incarnation, change)

    def _apply_change(self, worker_id: str, incarnation: str, change: CacheChange) -> None:
        machine = self._machine(worker_id)
        if machine is not None and machine.incarnation == incarnation:
            self.index.apply(worker_id, incarnation, change)

    def _forget_cache(self, worker_id: str) -> None:
        machine = self._machine(worker_id)
        number = int(machine.incarnation) - 1 if machine is not None else self.stations[worker_id].num_lives
        self.index.remove(worker_id, str(number))

    # -- samples -------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        states = [self.fronts[number].state for number in self._env.routers]
        machines = list(self.machines())
        decoders = [machine for machine in machines if isinstance(machine, DecodeMachine)]
        held = sum(machine.blocks.num_referenced for machine in decoders)
        there = sum(machine.blocks.num_blocks for machine in decoders)
        sample = Sample(
            at_s=self.agenda.now_s,
            queued=sum(state.num_queued for state in states),
            running=sum(state.num_running for state in states),
            busy_prefills=sum(one.is_computing for one in machines if one.shape.role is Role.PREFILL),
            busy_decodes=sum(one.is_computing for one in decoders),
            rows=sum(one.num_rows for one in decoders),
            kv_share=held / there if there else 0.0,
        )
        self._samples.add(sample)
        self.agenda.after(self._samples.interval_s, self._sample)
