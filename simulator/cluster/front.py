"""One simulated router: RouterState, the requests in progress, and its commands as future events. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, final

from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey
from pdserve.core.errors import QuotaExceeded
from pdserve.core.results import Timings
from pdserve.prefix.index import PrefixDepths
from router.policy.interface import Choice
from router.service.tenants import AnswerClaim, PendingReleases, Quotas
from router.state import interface
from router.state.state import RouterState
from simulator.cluster.agenda import Agenda
from simulator.cluster.machine import AnyMachine, Order
from simulator.cluster.prompts import BlockNames, blank, sampling_of
from simulator.model import RequestRow, SimConfig, TraceRequest

IN_TIME = frozenset({interface.Outcome.SERVED, interface.Outcome.LATE})


class Machines(Protocol):
    def __call__(self, worker_id: str) -> AnyMachine | None:
        """The running instance of the worker; None while it is dead."""
        ...


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """A request whose client waits for its end."""

    row: RequestRow
    names: BlockNames
    claim: AnswerClaim | None  # None: its tenant has no quotas
    arrived: interface.RequestArrived
    leaves_at_s: float | None = None


OnStep = Callable[[float, interface.Event, list[interface.Command]], None]


@final
class Front:
    def __init__(
        self,
        number: int,
        config: SimConfig,
        agenda: Agenda,
        machines: Machines,
        lookup: Callable[[tuple[bytes, ...]], PrefixDepths],
        on_ended: Callable[[RequestRow], None],
        on_step: OnStep | None = None,
    ) -> None:
        """Raises ConfigError on an unknown policy."""
        self.state = RouterState(config.router)
        self._number, self._config, self._agenda = number, config, agenda
        self._machines, self._lookup, self._on_ended, self._on_step = machines, lookup, on_ended, on_step
        self._calls: dict[str, SimulatedCall] = {}
        self._tenants = {one.name: one for one in config.tenants}
        self._quotas = Quotas(config.quota_burst_s)
        self._releases = PendingReleases(self.state.knows)
        self._wake_at_s: float | None = None
        self._is_dead = False

    def arrive(self, request: TraceRequest, row: RequestRow, names: BlockNames) -> None:
        name = f"r{row.number}"
        allowed = request.max_tokens or self._config.max_tokens
        max_tokens = allowed * -(-row.output_tokens // allowed)
        try:
            claim = self._claim(request, max_tokens)
        except QuotaExceeded as error:
            row.outcome, row.retry_after_s = interface.Outcome.REJECTED.value, error.retry_after_s
            row.ended_s = self._agenda.now_s
            self._on_ended(row)
            return
        cached = self._lookup(names.prompt)
        arrived = interface.RequestArrived(
            request_id=name,
            num_prompt_tokens=row.prompt_tokens,
            sampling=sampling_of(max_tokens),
            slo=row.slo,
            deadline_s=self._config.deadline_s,
            priority=request.priority,
            tenant=request.tenant,
            session_id=request.session,
            block_hashes=names.prompt,
            cached_blocks=cached,
            cached_tiers=cached.tiers,
            slo_task_s=request.slo_task_s,
        )
        stated = frozenset() if request.slo is None else frozenset(("ttft_s", "tpot_s"))
        row.slo = self.state.targets(arrived, stated, self._agenda.now_s)
        arrived = replace(arrived, slo=row.slo)
        wait_s = request.cancel_after_s
        leaves_at_s = None if wait_s is None else self._agenda.now_s + wait_s
        self._begin(SimulatedCall(row, names, claim, arrived, leaves_at_s), arrived)

    def _begin(self, call: SimulatedCall, event: interface.RequestArrived) -> None:
        self._calls[event.request_id] = call
        if call.leaves_at_s is not None:
            self._agenda.at(call.leaves_at_s, self._leave, event.request_id)
        self.submit(event)

    def die(self) -> list[SimulatedCall]:
        """Returns the calls in progress, which `resume` of another router continues."""
        self._is_dead = True
        calls = list(self._calls.values())
        self._calls.clear()
        return calls

    def resume(self, call: SimulatedCall) -> None:
        """Of a router that has died. Its client has the tokens so far. Quotas are not charged again."""
        call.claim = None
        arrived, row = call.arrived, call.row
        deadline_s = self._config.deadline_s
        if deadline_s is not None:
            deadline_s = max(row.arrival_s + deadline_s - self._agenda.now_s, 0.0)
        output_ids = blank(row.tokens)
        cached = self._lookup(call.names.prompt)
        arrived = replace(arrived, cached_blocks=cached, cached_tiers=cached.tiers)
        self._begin(call, replace(arrived, output_ids=output_ids, deadline_s=deadline_s))

    def submit(self, event: interface.Event) -> None:
        """Events on their way to a dead router are lost."""
        if self._is_dead:
            return
        if isinstance(event, pr.PullEnded) and (call := self._calls.get(event.request_id)) is not None:
            call.row.pulled_tokens += event.num_tokens
        done = self.state.handle(event, self._agenda.now_s)
        if self._on_step is not None:
            self._on_step(self._agenda.now_s, event, done)
        for command in done:
            self._execute(command)
        self._releases.after(event, self._agenda.now_s)

    def _claim(self, request: TraceRequest, max_tokens: int) -> AnswerClaim | None:
        """Raises QuotaExceeded."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            return None
        now_s = self._agenda.now_s
        call = self._quotas.open(tenant, now_s, least_tokens=0)
        try:
            call.admit(request.prompt_tokens, [max_tokens], now_s)
            return call.take()
        finally:
            call.close(now_s)

    def _leave(self, name: str) -> None:
        if name in self._calls:
            self.submit(interface.ClientLeft(request_id=name))

    def _execute(self, command: interface.Command) -> None:
        match command:
            case interface.EmitTokens():
                call = self._calls.get(command.request_id)
                if call is not None:
                    call.row.tokens += len(command.tokens)
                    if call.claim is not None:
                        call.claim.emitted(len(command.tokens))
            case pr.Reserve() | pr.Prefill():
                self._order(command)
            case pr.Admit():
                key, first_token = self._key(command), command.first_token_id
                self._send(command.worker_id, lambda machine: machine.admit(key, first_token))
            case pr.Cancel():
                key = self._key(command)
                self._send(command.worker_id, lambda machine: machine.cancel(key))
            case pr.EndText():
                hashes = command.block_hashes
                self._send(command.worker_id, lambda machine: machine.kv.end(hashes))
            case pr.DrainWorker():
                self._send(command.worker_id, lambda machine: machine.drain())
            case pr.UndrainWorker():
                self._send(command.worker_id, lambda machine: machine.undrain())
            case interface.FinishRequest():
                self._row(command.request_id).cached_tokens = command.usage.cached_prompt_tokens
                self._end(command.request_id, command.outcome, command.timings)
            case interface.FailRequest():
                self._row(command.request_id).retry_after_s = command.retry_after_s
                self._end(command.request_id, command.outcome, command.timings)
            case interface.EndCancelled():
                self._end(command.request_id, interface.Outcome.CANCELLED, command.timings)
            case interface.WakeAt():
                self._wake_at_s = command.at_s
                self._agenda.at(command.at_s, self._ring, command.at_s)

    def _ring(self, at_s: float) -> None:
        if self._wake_at_s == at_s:  # a newer one replaces it
            self._wake_at_s = None
            self.submit(interface.TimePassed())

    # -- to workers ----------------------------------------------------------------------------------------------

    def _order(self, command: pr.Reserve | pr.Prefill) -> None:
        call = self._calls.get(command.request_id)
        if call is None:
            return
        row = call.row
        order = Order(
            key=self._key(command),
            names=call.names,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            answered=len(command.output_token_ids),
            ttft_s=row.slo.ttft_s,
            tpot_s=row.slo.tpot_s,
            waited_s=command.waited_s,
            deadline_s=command.deadline_s,
            source=command.source,
        )
        if isinstance(command, pr.Prefill):
            grant = command.grant
            self._send(command.worker_id, lambda machine: machine.prefill(order, grant))
        else:
            if row.predicted_ttft_s is None:
                self._note_prediction(command.request_id, row)
            is_local = command.is_local
            self._send(command.worker_id, lambda machine: machine.reserve(order, is_local))

    def _note_prediction(self, name: str, row: RequestRow) -> None:
        found = self.state.explain(name)
        if found is None:
            return
        decision = found.decision
        pair = (decision.prefill_worker if decision.choice is Choice.REMOTE else "", decision.decode_worker)
        for one in decision.candidates:
            if (one.prefill_worker, one.decode_worker) == pair:
                row.predicted_ttft_s = self._agenda.now_s - row.arrival_s + one.ttft_s
                row.predicted_tpot_s = one.tpot_s
                return

    def _send(self, worker_id: str, message: Callable[[AnyMachine], None]) -> None:
        machine = self._machines(worker_id)
        if machine is not None:  # otherwise WorkerLost is about to arrive
            self._agenda.after(self._config.message_s, machine.deliver, message, machine)

    def _key(self, command: pr.Reserve | pr.Prefill | pr.Admit | pr.Cancel) -> AttemptKey:
        return AttemptKey(self._number, command.request_id, command.attempt)

    # -- to clients ----------------------------------------------------------------------------------------------

    def _row(self, name: str) -> RequestRow:
        return self._calls[name].row

    def _end(self, name: str, outcome: interface.Outcome, timings: Timings | None) -> None:
        call = self._calls.pop(name)
        row = call.row
        if call.claim is not None:
            # As in router/service/runtime.py.
            is_ours = outcome in (interface.Outcome.REJECTED, interface.Outcome.FAILED)
            call.claim.end(is_free=is_ours or timings is None or timings.attempts == 0)
            self._releases.ended(name, call.claim, self._agenda.now_s)
        row.outcome = outcome.value
        row.ended_s = self._agenda.now_s
        if timings is not None:
            if row.tokens:
                row.ttft_s = timings.ttft_s
            if outcome in IN_TIME:
                row.tpot_s = timings.tpot_s
            row.path = timings.path
            row.prefill_worker, row.decode_worker = timings.prefill_worker, timings.decode_worker
            row.queue_s = timings.phases.queue_s + timings.phases.prefill_queue_s
            row.transfer_s = timings.transfer_s
            row.transfer_exposed_s = timings.transfer_exposed_s
            row.transfer_bytes, row.attempts = timings.transfer_bytes, timings.attempts
            row.preemptions = timings.preemptions
        self._on_ended(row)
