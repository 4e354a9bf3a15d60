"""Base of both role programs: reads messages, runs steps, reports to routers. Runs on the engine thread only.

A program turns messages into calls of its scheduler, and the resulting effects into messages and transfer calls. It
owns no thread and no socket: tests and the host drive it in the same way.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, assert_never, cast

from pdserve.build import FULL_VERSION
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey, AttemptLedger, EndRule, FailureKind, RefusalReason
from pdserve.core.errors import InternalError, InvalidRequest
from pdserve.core.kv.blocks import CacheChange
from pdserve.core.kv.fetch import Fetch, FetchAborted, Fetches, FetchStarted, tier_speeds
from pdserve.core.kv.hashing import hash_seed
from pdserve.core.kv.kv_shape import Fingerprint, TransferKey
from pdserve.core.kv.pulls import LONG_QUERIES
from pdserve.engine.interface import OnLayer, PlainOuts, Row, RowOut, compacted
from pdserve.engine.memory.disk import DiskTier
from pdserve.engine.memory.store import StoreTier
from pdserve.engine.ranks.rejected_joins import rejected_joins
from pdserve.outage_log import PeerLog
from pdserve.telemetry import metric_names
from pdserve.v1 import worker_pb2
from pdserve.wire.convert import role_to_proto
from pdserve.wire.protocol import ADAPTERS, COST, FINGERPRINT, decode_adapter_command
from pdserve.worker.context import ProgramContext, ProgramParts
from pdserve.worker.interface import Effect, Scheduler, Step
from pdserve.worker.messages import AttemptFields, Outbox, SequenceLimits, key_of, read_block_hashes, read_sequence
from pdserve.worker.reports import StatusReports
from pdserve.worker.steps import Begun, Isolation, RowFailed, free_row
from pdserve.worker.tiers import FetchSource

log = logging.getLogger(__name__)


class Giver(Protocol):
    """Sends cached KV to other workers that ask for it. Called on the engine thread."""

    def answer(self) -> None:
        """Answers those that have asked. Also called between two layers of a long step. Never raises."""
        ...

    def end_given(self) -> None:
        """Stops what is being sent."""
        ...


class TransferEndpoint(Protocol):
    """The role's Sender or Receiver."""

    def close(self) -> None: ...


@dataclass(slots=True)
class AttemptTransfer:
    """The KV transfer of an attempt that a program holds. Each role adds to it."""

    key: TransferKey
    deadline_at_s: float | None  # by this process's clock

    def remaining_s(self, now_s: float) -> float | None:
        return None if self.deadline_at_s is None else max(0.0, self.deadline_at_s - now_s)


Transfer = TypeVar("Transfer", bound=AttemptTransfer)


class RoleProgram(ABC, Generic[Step, Effect, Transfer]):
    scheduler: Scheduler[Step, Effect]  # set by each role

    def __init__(
        self, context: ProgramContext, parts: ProgramParts, endpoint: TransferEndpoint, fingerprint: Fingerprint
    ) -> None:
        """Opens nothing that must be closed. If it raises, `build` closes the parts and the endpoint."""
        config, engine = context.config, parts.engine
        spec = engine.spec
        self.context = context
        self.engine, self.cost, self.kv = engine, parts.cost, parts.kv
        self.tiers, self.adapters = parts.tiers, parts.adapters
        self._endpoint = endpoint
        self.fingerprint = fingerprint
        self.transfers: dict[AttemptKey, Transfer] = {}
        self.counts: Counter[str] = Counter()  # dropped messages by reason
        self.num_steps = 0
        self.received_s = 0.0  # arrival time of the message that is being handled
        self.blocks = self.kv.blocks
        self.tiers.bind(context.post)
        # A sequence must fit into the whole pool.
        max_context_tokens = min(spec.max_context_tokens, spec.num_blocks * spec.block_size)
        seed = hash_seed(spec.weights_hash, spec.dtype, spec.layout, spec.block_size)
        self.limits = SequenceLimits(vocab_size=spec.vocab_size, max_context_tokens=max_context_tokens, hash_seed=seed)
        self.end_rule = EndRule(eos_token_ids=frozenset(spec.eos_token_ids), max_context_tokens=max_context_tokens)
        self.log_fields = AttemptFields()
        self.lines = PeerLog(log)  # that other processes can cause
        self.isolation = Isolation(engine, partial(free_row, self.kv))
        self._ledger = AttemptLedger()
        self.outbox = Outbox()
        self.adapters.bind(context.post, self._adapters_changed, self.outbox.report_adapter_loaded)
        self.is_drained = False  # by an operator, who may undo it
        self.fetches: Fetches | None = None
        self._aborted_s: dict[int, float] = {}  # when each fetch was aborted whose source has not reported its end
        self.giver: Giver | None = None
        self._is_leaving = False  # drained by its own process, which then ends
        self.is_between_steps = False  # a step follows the last one at once
        self._step_ended_s = 0.0
        self.reports = StatusReports(self.outbox, context.metrics, config.heartbeat_s)

    # -- implemented by each role -------------------------------------------------------------------------------

    @abstractmethod
    def take(self, session: int, message: worker_pb2.AttachRequest) -> None:
        """Handles a message of the role's own kind. May raise InvalidRequest if it names no attempt."""

    @abstractmethod
    def act(self, effects: Iterable[Effect]) -> None:
        """Executes the effects in order: the role's own here, all others by `act_on_common`."""

    @abstractmethod
    def transfer_events(self) -> Mapping[str, int]:
        """Total counts of events of the role's KV transfers."""

    @abstractmethod
    def observe(self, account: fx.StepAccount, step_s: float) -> None:
        """A step took `step_s`, which is used for planning."""

    def add_servicers(self, server: Any) -> None:
        """Adds what other workers call to the worker's gRPC server."""

    def kv_links(self) -> list[tuple[str, str, str]]:
        """(worker, transport, reason) of each connection by which this worker sends KV, in a fixed order."""
        return []

    @property
    def sends_kv(self) -> bool:
        """As in WorkerHello."""
        return False

    def begin_step(self) -> Begun[Step] | None:
        """Plans a step; None if there is nothing to compute."""
        step, effects = self.scheduler.plan(self.context.now())
        rows = step.rows  # taken before the effects, which may change the attempts
        self.act(effects)
        return Begun(step) if rows else None

    def compute(self, begun: Begun[Step]) -> Sequence[RowOut | RowFailed]:
        """One entry per row of the step. Raises EngineBroken."""
        rows = list(begun.step.rows)
        return self.isolation.step(rows, self.between_layers(rows))

    def between_layers(self, rows: Sequence[Row]) -> OnLayer | None:
        """What is done between two layers of a step; None: the step is short, or nothing asks."""
        giver = self.giver
        if giver is None or max((row.num_queries for row in rows), default=0) < LONG_QUERIES:
            return None
        return lambda num_layers: giver.answer()

    # -- called by the host -------------------------------------------------------------------------------------

    def hello(self) -> worker_pb2.WorkerHello:
        context, config, spec, limits = self.context, self.context.config, self.engine.spec, self.limits
        return worker_pb2.WorkerHello(
            worker_id=config.worker_id,
            incarnation=context.incarnation,
            role=role_to_proto(context.role),
            model=spec.model,
            fingerprint=FINGERPRINT.encode(self.fingerprint),
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_context_tokens=limits.max_context_tokens,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_batch=config.max_batch,
            max_batch_tokens=config.max_batch_tokens,
            inbox_depth=config.inbox_depth,
            cost=COST.encode(self.cost),
            hash_seed=limits.hash_seed,
            reads_batches=True,
            version=FULL_VERSION,
            grammar_library=_grammar_library(),
            adapters=None if self.adapters.report is None else ADAPTERS.encode(self.adapters.report),
            sends_kv=self.sends_kv,
            pulls_kv=self.giver is not None,
            ends_texts=True,
            revision=config.revision,
        )

    def attached(self, session: int, hello: worker_pb2.RouterHello) -> None:
        self.outbox.attach(session, wants_kv_events=hello.wants_kv_events)
        if hello.wants_kv_events:
            self.outbox.report_cache(self.kv.snapshot(), session)
        if self.adapters.report is not None:  # it may have changed since the hello
            self.outbox.report_adapters(self.adapters.report, session)
        self.reports.attached(session, self._with_state(self.scheduler.load()))

    def lost(self, session: int) -> None:
        """The router's stream ended: its requests are abandoned."""
        self.outbox.detach(session)
        self.adapters.lost(session)
        for key in self.scheduler.live():
            if key.router == session:
                self.act(self.scheduler.cancel(key))
        self._ledger.forget_router(session)

    def handle(self, session: int, message: worker_pb2.AttachRequest, received_s: float | None = None) -> None:
        """`received_s`: arrival time by the context's clock; None: now."""
        self.received_s = self.context.now() if received_s is None else received_s
        if session not in self.outbox:
            self.counts["message of a lost router"] += 1
            return
        try:
            match message.WhichOneof("message"):
                case "cancel":
                    cancel = message.cancel
                    self.act(self.scheduler.cancel(key_of(session, cancel.request_id, cancel.attempt)))
                case "drain":
                    self._set_drained(True)
                case "undrain":
                    self._set_drained(False)
                case "end_text":
                    self.kv.end(read_block_hashes(message.end_text))
                case "load_adapter" | "drop_load" | "set_adapter":
                    command = decode_adapter_command(message)
                    assert command is not None
                    self.adapters.handle(session, command)
                case _:
                    self.take(session, message)
        except InvalidRequest as error:
            # The message names no attempt, so no answer is possible.
            self.counts["unusable message"] += 1
            self.context.metrics.add(metric_names.INVALID_MESSAGES, field=error.field)
            self.lines.warning("a message was dropped", field=error.field, expected=error.expected)

    @property
    def is_healthy(self) -> bool:
        """False once a required part has died, such as another rank of the engine, or a tier holds blocks of the pool
        for as long as the engine may hang."""
        oldest_s, stall_s = next(iter(self._aborted_s.values()), math.inf), self.context.config.stall_s
        return bool(getattr(self.engine, "is_healthy", True)) and self.context.now() - oldest_s < stall_s

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_draining(self) -> bool:
        return self.scheduler.is_draining

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for any request or other worker, and no fetch of an earlier one runs."""
        return not self.scheduler.live() and not self.fetches and not self.kv.lent

    def drain(self) -> None:
        """Rejects new work for good. Running attempts continue until routers move them. Idempotent."""
        self._is_leaving = True
        self.scheduler.is_draining = True
        self._end_given()

    def _set_drained(self, is_drained: bool) -> None:
        """An operator's command through any router. Running attempts continue until routers move them."""
        if is_drained is not self.is_drained:
            self.is_drained = is_drained
            self.scheduler.is_draining = is_drained or self._is_leaving
            self._end_given()
            self.reports.changed()
            message = "an operator has drained the worker" if is_drained else "an operator has undone the drain"
            log.info(message, extra={"worker_id": self.context.config.worker_id})

    def _end_given(self) -> None:
        """A worker that drains gives no KV to others. They compute what they lack."""
        if self.giver is not None and self.scheduler.is_draining:
            self.giver.end_given()

    def step(self) -> bool:
        """Plans and computes one step. False: there was nothing to compute."""
        now = self.context.now
        begun = self.begin_step()
        if begun is None:
            return False
        # The time between consecutive steps also counts for TPOT, so it is part of the later step.
        started_s = self._step_ended_s if self.is_between_steps else now()
        step = begun.step
        entries = self.compute(begun)
        self._step_ended_s = ended_s = now()
        self.num_steps += 1
        outs = entries if isinstance(entries, PlainOuts) else self._checked(step, entries)
        self.act(self.scheduler.apply(step, outs, ended_s))
        self.observe(step.account, ended_s - started_s)
        self.reports.step(step.account, outs, ended_s - started_s, ended_s)
        return True

    def _checked(self, step: Step, entries: Sequence[RowOut | RowFailed]) -> Sequence[RowOut]:
        """The rows' outputs. Attempts with failed rows end here."""
        outs: list[RowOut] = [entry for entry in entries if isinstance(entry, RowOut) and entry.failed is None]
        if len(outs) == len(entries):
            return compacted(outs) or outs
        outs = []
        for key, entry in zip(step.keys, entries, strict=True):
            if isinstance(entry, RowFailed):
                self.act(self.scheduler.fail(key, FailureKind.INTERNAL, entry.message))
                outs.append(RowOut())
            elif entry.failed is not None:
                self.act(self.scheduler.fail(key, FailureKind.INVALID, entry.failed))
                outs.append(RowOut())
            else:
                outs.append(entry)
        return outs

    @property
    def is_in_flight(self) -> bool:
        """Whether a step runs between two calls of `step`."""
        return False

    def tick(self) -> None:
        """Between steps and while idle: deadlines, heartbeats, cache changes, adapters."""
        now_s = self.context.now()
        if not self.is_in_flight:
            self.adapters.change_engine()
        self.act(self.scheduler.expire(now_s))
        if self.giver is not None:
            self.giver.answer()  # of fetches that have expired
        load = self.reports.due_load(now_s, self.scheduler.load)
        if load is not None:
            self._report(load)

    def take_messages(self) -> list[tuple[int, worker_pb2.AttachResponse]]:
        """(session, message) pairs since the last call, in order."""
        return self.outbox.take()

    def take_changes(self) -> CacheChange | None:
        """Changes of the prefix cache: sent to the routers that asked for them, and returned for the index."""
        change = self.kv.take_changes()
        if change is not None:
            self.outbox.report_cache(change)
        return change

    def fail_all(self, message: str) -> None:
        """The engine is broken: every attempt ends here."""
        for key in self.scheduler.live():
            self.act(self.scheduler.fail(key, FailureKind.INTERNAL, message))

    def hand_over(self) -> ProgramParts:
        """Ends this program. What it returns is for the program of the other role. Every router has left before, and no
        attempt is live. Raises InternalError if a block is still used."""
        while self.is_in_flight:  # a step that was launched for attempts which have ended since
            self.step()
        self.close_transfers()
        self._report(self.scheduler.load())  # the last counts of the KV transfers
        if self.scheduler.live() or self.blocks.num_referenced:
            seen = f"{len(self.scheduler.live())} attempts and {self.blocks.num_referenced} blocks in use"
            raise InternalError(f"the worker still has {seen}")
        self.kv.take_changes()  # routers and the index get a snapshot
        return ProgramParts(engine=self.engine, kv=self.kv, adapters=self.adapters, cost=self.cost, tiers=self.tiers)

    def take_over(self) -> None:
        """Called once on a program that was made from what another left: counts of the whole process go on."""
        self.reports.metrics.skip(self.transfer_events(), rejected_joins(), self.blocks.tier, self.disk, self.store)

    def check(self) -> None:
        """Raises AssertionError unless all tables are consistent; for tests."""
        self.scheduler.check()
        live = set(self.scheduler.live())
        assert self.log_fields.keys == live, "log fields differ from the attempts"
        assert set(self.transfers) <= live, "a KV transfer has no attempt"
        self.adapters.check()

    def close_transfers(self) -> None:
        """Ends their threads and connections."""
        self._endpoint.close()

    def save(self) -> None:
        """Before a regular end."""
        self.tiers.save()

    def close(self) -> None:
        """Ends the transfers, the tiers and the engine, each also if another one cannot be ended."""
        with ExitStack() as closing:  # in the reverse order
            closing.callback(self.engine.close)
            closing.callback(self.tiers.close)
            closing.callback(self.close_transfers)
            closing.callback(self.tiers.begin_close)

    # -- for roles ----------------------------------------------------------------------------------------------

    def begin(self, session: int, message: worker_pb2.Sequence) -> Attempt | None:
        """The attempt of a new Reserve or Prefill. None if it is late or a duplicate; or invalid, which is reported."""
        key = key_of(session, message.request_id, message.attempt)
        before = self._ledger.newest(key)
        if not self._ledger.begin(key):
            self.counts["late or duplicate attempt"] += 1
            return None
        if before is not None and before in self.scheduler:
            self.counts["superseded attempt"] += 1
            self.act(self.scheduler.cancel(before))
        try:
            attempt = read_sequence(message, key, self.limits, self.received_s)
        except InvalidRequest as error:
            self.context.metrics.add(metric_names.INVALID_MESSAGES, field=error.field)
            self._failed(pr.AttemptFailed(key=key, kind=FailureKind.INVALID, message=error.message))
            self._released(pr.Released(key=key))
            return None
        if attempt.adapter and not self.adapters.begin(key, attempt.adapter):
            self.act_on_common(pr.Refused(key=key, reason=RefusalReason.NO_ADAPTER))
            return None
        self.log_fields.add(attempt, message.traceparent)
        return attempt

    def transfer_of(self, key: AttemptKey, transfer: TransferKey) -> Transfer | None:
        """The attempt's transfer, if it is this one. Otherwise the call is late, and is counted."""
        held = self.transfers.get(key)
        if held is None or held.key != transfer:
            self.counts["late end of a transfer"] += 1
            return None
        return held

    def act_on_common(self, effect: fx.CommonEffect) -> None:
        match effect:
            case pr.Released():
                self._released(effect)
            case pr.Refused():
                self._forget(effect.key)
                self.context.metrics.add(metric_names.REFUSED_BY_WORKER, reason=effect.reason.value)
                self.outbox.report(effect)
            case pr.AttemptFailed():
                self._failed(effect)
            case fx.TransferLost():
                self._transfer_lost(effect)
            case fx.PromptScored():
                self.outbox.report_scores(effect)
            case FetchStarted():
                self._begin_fetch(effect.fetch)
            case FetchAborted():
                source, pulls = self.sources[effect.source], cast(object, self.giver)
                if source is not pulls:  # a pull ends by the rules of transfers, which cut off a peer that hangs
                    self._aborted_s[effect.number] = self.context.now()
                source.abort(effect.number)
            case _:
                assert_never(effect)

    # -- blocks of slower tiers ---------------------------------------------------------------------------------

    def fetches_with(self, prefill_s: Callable[[int, int], float]) -> Fetches | None:
        """For the scheduler. None: there is no slower tier."""
        if not self.sources:
            return None
        self.fetches = Fetches(self.kv, [*self.sources.values()], prefill_s, self.tiers.fetch_numbers)
        if self.store is not None:
            self.store.looked = partial(self.context.post, self.fetches.looked_up)
        return self.fetches

    @property
    def sources(self) -> dict[str, FetchSource]:
        return self.tiers.sources

    @property
    def disk(self) -> DiskTier | None:
        return self.tiers.disk

    @property
    def store(self) -> StoreTier | None:
        return self.tiers.store

    def _begin_fetch(self, fetch: Fetch) -> None:
        post = self.context.post

        def end(num_blocks: int) -> None:
            post(partial(self._fetched, fetch.number, num_blocks))

        try:
            self.sources[fetch.source].begin(fetch, end)
        except Exception as error:  # a broken source is a miss
            self.lines.warning("a tier could not be read", tier=fetch.source, error=str(error))
            end(0)

    def _fetched(self, number: int, num_blocks: int) -> None:
        assert self.fetches is not None, "a fetch ends without a source"
        fetch = self.fetches.ended(number, num_blocks)
        self._aborted_s.pop(number, None)
        self.reports.metrics.fetched(fetch, num_blocks, self.context.now() - fetch.started_s)
        if self.giver is not None:
            self.giver.answer()  # it may have read for another worker

    def _failed(self, effect: pr.AttemptFailed) -> None:
        extra = {"kind": effect.kind.value, **self.log_fields.of(effect.key)}
        log.log(logging.ERROR if effect.kind is FailureKind.INTERNAL else logging.INFO, "attempt failed", extra=extra)
        self.outbox.report(effect)

    def _transfer_lost(self, effect: fx.TransferLost) -> None:
        extra = {"error": effect.error, **self.log_fields.of(effect.key)}
        if effect.is_cancelled:
            log.debug("a KV transfer was cancelled", extra=extra)
        else:
            self.lines.warning("KV was not moved", **extra)
        self.context.metrics.add(metric_names.TRANSFERS, outcome="cancelled" if effect.is_cancelled else "failed")
        self.outbox.report(pr.TransferEnded(key=effect.key, is_committed=False, error=effect.error))

    def _released(self, effect: pr.Released) -> None:
        self._forget(effect.key)
        self.outbox.report(effect)

    def _forget(self, key: AttemptKey) -> None:
        self.transfers.pop(key, None)
        self.log_fields.remove(key)
        self.adapters.end(key)
        self._ledger.forget(key)

    # -- reports ------------------------------------------------------------------------------------------------

    def _adapters_changed(self) -> None:
        if self.adapters.report is not None:
            self.outbox.report_adapters(self.adapters.report)

    def _report(self, load: pr.Load) -> None:
        self.reports.send(self._with_state(load), self.kv_links())
        metrics = self.reports.metrics
        if metrics.is_on:
            metrics.loaded(load, self.blocks.num_referenced)
            if self.blocks.tier is not None:
                metrics.tiered(self.blocks.tier)
            metrics.stored(self.disk, self.store)
            metrics.transferred(self.transfer_events())
            metrics.rejected_rank_joins(rejected_joins())

    def _with_state(self, load: pr.Load) -> pr.Load:
        return replace(
            load,
            steps=self.num_steps,
            is_draining=self.scheduler.is_draining,
            is_drained=self.is_drained,
            tiers=tier_speeds(self.blocks.tier, self.sources.values()),
        )


#: For the host, which runs a program of either role, and sees neither its steps nor its effects.
AnyProgram: TypeAlias = RoleProgram[Any, Any, Any]


def _grammar_library() -> str:
    """The version of this environment's llguidance, with which the engine follows grammars; empty without it."""
    with suppress(PackageNotFoundError):
        return version("llguidance")
    return ""
