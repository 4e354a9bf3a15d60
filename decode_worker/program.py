"""The decode program: grants blocks, prefills prompts of local placements, and sends answers token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, final

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler, is_token
from decode_worker.sequence_table import KvCheck
from decode_worker.speculation import DraftRule
from kvtransfer.devices import issuer
from kvtransfer.link.endpoint import config_of, make_receiver
from kvtransfer.protocol.grants import check_movable, encode_grant, fingerprint_of
from kvtransfer.protocol.transport import Received, ReceiveOutcome, Receiver, events
from kvtransfer.ranks.rank_endpoints import joined_receiver
from pdserve.config import WorkerConfig
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.cost.latency import CostModel
from pdserve.core.effects import PlainSampled
from pdserve.core.errors import PdserveError
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.core.protocol import TokenRow
from pdserve.core.types import Role
from pdserve.engine.interface import Engine
from pdserve.engine.load_engine import load_engine
from pdserve.engine.ranks.rejected_joins import rejected_joins
from pdserve.telemetry import metric_names
from pdserve.v1 import transfer_pb2, worker_pb2
from pdserve.v1.transfer_pb2_grpc import add_TransferServiceServicer_to_server
from pdserve.wire.protocol import FINGERPRINT, TOKEN_ROW
from pdserve.worker import messages
from pdserve.worker.host import WorkerHost
from pdserve.worker.interface import ProgramContext
from pdserve.worker.messages import key_of
from pdserve.worker.program import RoleProgram

# --- token rows -----------------------------------------------------------------------------------------------
# Those of one call are joined by attempt, and put into one message for each router. No I/O.


def join_rows(rows: Iterable[TokenRow]) -> list[TokenRow]:
    """Joins the rows of each attempt. With accepted drafts, a step yields several tokens."""
    joined: list[TokenRow] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last is None or last.key != row.key:
            joined.append(replace(row))
            continue
        last.tokens += row.tokens
        last.finish = row.finish
        last.decode_s += row.decode_s
        last.preemptions += row.preemptions
    return joined


def responses_by_router(
    rows: Iterable[TokenRow], plain: Iterable[PlainSampled]
) -> dict[int, worker_pb2.AttachResponse]:
    """One message for each router, by the number of its stream."""
    by_router: dict[int, worker_pb2.AttachResponse] = {}
    for columns in plain:
        for router, tokens in messages.plain_tokens(columns):
            by_router[router] = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=tokens))
    for row in rows:
        response = by_router.setdefault(row.key.router, worker_pb2.AttachResponse())
        response.tokens.rows.append(TOKEN_ROW.encode(row))
    return by_router


# --- program --------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingReceive:
    key: TransferKey
    deadline_at_s: float | None
    reserved_s: float  # arrival of Reserve


@final
class DecodeProgram(RoleProgram):
    def __init__(
        self,
        context: ProgramContext,
        engine: Engine,
        receiver: Receiver,
        add_servicers: Callable[[Any], None],
        stamps: BlockStamps | None = None,
    ) -> None:
        super().__init__(context, engine, stamps)
        config = self.context.config
        self._receiver = receiver
        self._add_servicers = add_servicers
        self._fingerprint = fingerprint_of(engine.spec)
        self._receives: dict[AttemptKey, PendingReceive] = {}
        self._num_grants = 0
        self._chunks = ChunkRule(CostModel(self.cost), most=config.max_batch_tokens)
        self._drafting = (
            DraftRule(self.cost, most=config.max_drafts, most_together=config.max_batch_tokens)
            if config.speculation == "ngram"
            else None
        )
        self._scheduler = DecodeScheduler(
            kv=self.kv,
            max_batch=config.max_batch,
            chunks=self._chunks,
            inbox_depth=config.inbox_depth,
            end_rule=self.end_rule,
            drafting=self._drafting,
            check=KvCheck(self.blocks.stamps) if config.kv_check == "step" else None,
        )
        if self._drafting is None:
            self.schedule_asynchronously(self._scheduler)

    @property
    def scheduler(self) -> DecodeScheduler:
        return self._scheduler

    def actions(self) -> dict[type, Callable[[Any], None]]:
        return {
            fx.BlocksReserved: self._blocks_reserved,
            pr.Granted: self._granted,
            fx.ReceiveAborted: self._receive_aborted,
            fx.KvCommitted: self._kv_committed,
            fx.KvMistaken: self._kv_mistaken,
            fx.TransferCancelled: self._transfer_cancelled,
            pr.Released: self._attempt_released,
            pr.Refused: self._attempt_refused,
        }

    def act(self, effects: Iterable[Any]) -> None:
        """In order; consecutive tokens are sent in one message per router."""
        for are_tokens, group in groupby(effects, key=is_token):
            if are_tokens:
                self._send_tokens(list(group))
            else:
                super().act(group)

    def take(self, session: int, message: worker_pb2.AttachRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session, message.reserve)
            case "admit":
                self._admit(session, message.admit)
            case _:
                self.counts["message for the other role"] += 1

    def fingerprint(self) -> transfer_pb2.Fingerprint:
        return FINGERPRINT.encode(self._fingerprint)

    def add_servicers(self, server: Any) -> None:
        self._add_servicers(server)

    def transfer_events(self) -> Mapping[str, int]:
        return {**events(self._receiver.stats), **issuer.events()}

    def rejected_rank_joins(self) -> Mapping[str, int]:
        return rejected_joins()

    def close(self) -> None:
        self._receiver.close()
        self.engine.close()

    @property
    def is_healthy(self) -> bool:
        return super().is_healthy and self._receiver.is_healthy

    def check(self) -> None:
        super().check()
        live = set(self._scheduler.live())
        assert set(self._receives) <= live, "a pending receive has no attempt"

    def observe(self, account: fx.StepAccount, step_s: float) -> None:
        if account.draft_tokens == 0:
            self._chunks.observe(account, step_s)
        if account.prefill_tokens == 0 and self._drafting is not None:
            self._drafting.observe(account, step_s)

    # -- messages -----------------------------------------------------------------------------------------------

    def _reserve(self, session: int, reserve: worker_pb2.Reserve) -> None:
        attempt = self.begin(session, reserve.sequence)
        if attempt is None:
            return
        if not reserve.is_local:
            self._num_grants += 1
            # The transfer's name appears in another worker's logs, so it does not contain the request id.
            name = f"{self.context.config.worker_id}.{self.context.incarnation}.{self._num_grants}"
            transfer = TransferKey(transfer_id=name, attempt=attempt.key.attempt, generation=self._num_grants)
            self._receives[attempt.key] = PendingReceive(transfer, attempt.deadline_at_s, self.received_s)
        self.act(self._scheduler.offer(attempt, is_local=reserve.is_local, now_s=self.context.now()))

    def _admit(self, session: int, admit: worker_pb2.Admit) -> None:
        key = key_of(session, admit.request_id, admit.attempt)
        if admit.first_token_id >= self.limits.vocab_size:
            message = f"first_token_id: got {admit.first_token_id}, expected below {self.limits.vocab_size}"
            self.act(self._scheduler.fail(key, FailureKind.INVALID, message))
            return
        effects = self._scheduler.admit(key, admit.first_token_id, self.received_s)
        if effects is None:
            self.counts["late or duplicate admit"] += 1
            return
        self.act(effects)

    def _received(self, key: AttemptKey, received: Received, now_s: float) -> None:
        pending = self._receives.get(key)
        if pending is None or pending.key != received.key:
            self.counts["late end of a transfer"] += 1
            return
        match received.outcome:
            case ReceiveOutcome.VERIFIED:
                self.act(
                    self._scheduler.received(
                        key,
                        transfer_s=received.transfer_s,
                        busy_s=received.busy_s,
                        num_bytes=received.num_bytes,
                        now_s=now_s,
                    )
                )
            case ReceiveOutcome.FAILED | ReceiveOutcome.DRAINED:
                error = received.error or received.outcome.value
                self.act(self._scheduler.lost(key, error, is_cancelled=received.is_cancelled))
            case ReceiveOutcome.QUARANTINED:
                self.counts["quarantined transfer"] += 1  # the blocks stay reserved until DRAINED follows

    # -- effects ------------------------------------------------------------------------------------------------

    def _blocks_reserved(self, effect: fx.BlocksReserved) -> None:
        key, context = effect.key, self.context
        pending = self._receives[key]
        grant = Grant(
            key=pending.key,
            endpoint=context.endpoint,
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            fingerprint=self._fingerprint,
            blocks=effect.blocks,
            num_cached_blocks=effect.num_cached_blocks,
            hash_seed=self.limits.hash_seed,
            rank_endpoints=self._receiver.rank_endpoints,
        )
        remaining_s = None if pending.deadline_at_s is None else max(0.0, pending.deadline_at_s - context.now())
        post, now = context.post, context.now
        try:  # the receiver must expect the transfer before another process learns of the grant
            check_movable(self.engine.spec.tp_degree, 1 + len(grant.rank_endpoints))
            is_open = self._receiver.expect(
                grant,
                lambda received: post(partial(self._received, key, received, now())),
                remaining_s,
                self._scheduler.content_hashes(key),
                lambda: post(partial(self._opened, key, grant)),
            )
        except PdserveError as error:
            self.act(self._scheduler.lost(key, error.message))
            return
        if is_open:
            self._opened(key, grant)

    def _opened(self, key: AttemptKey, grant: Grant) -> None:
        """Sends the grant to the router, unless the attempt was abandoned in the meantime."""
        pending = self._receives.get(key)
        if pending is not None and pending.key == grant.key:
            grant_s = self.context.now() - pending.reserved_s
            self.outbox.report(pr.Granted(key=key, grant=encode_grant(grant), grant_s=grant_s))

    def _granted(self, effect: pr.Granted) -> None:
        """Reports the grant of a local attempt, which the scheduler makes while it handles the Reserve."""
        self.outbox.report(replace(effect, grant_s=self.context.now() - self.received_s))

    def _receive_aborted(self, effect: fx.ReceiveAborted) -> None:
        self._receiver.abort(self._receives[effect.key].key)

    def _kv_committed(self, effect: fx.KvCommitted) -> None:
        key, metrics = effect.key, self.context.metrics
        saved_bytes = effect.num_cached_blocks * self.engine.spec.block_bytes * self.engine.spec.tp_degree
        ended = pr.TransferEnded(
            key=key,
            is_committed=True,
            transfer_s=effect.transfer_s,
            busy_s=effect.busy_s,
            num_bytes=effect.num_bytes,
            saved_bytes=saved_bytes,
        )
        self.outbox.report(ended)
        metrics.add(metric_names.TRANSFERS, outcome="committed")
        metrics.add(metric_names.TRANSFER_BYTES_TOTAL, effect.num_bytes)
        metrics.add(metric_names.TRANSFER_SAVED_BYTES, saved_bytes)
        metrics.observe(metric_names.TRANSFER_TIME, effect.transfer_s)
        metrics.observe(metric_names.TRANSFER_BUSY_TIME, effect.busy_s)

    def _transfer_cancelled(self, effect: fx.TransferCancelled) -> None:
        self.context.metrics.add(metric_names.TRANSFERS, outcome="cancelled")

    def _kv_mistaken(self, effect: fx.KvMistaken) -> None:
        self.context.metrics.add(metric_names.KV_MISTAKEN)
        message = "a KV block has wrong content; the text is computed again"
        self.lines.line(logging.ERROR, message, error=effect.error)

    def _send_tokens(self, sampled: list[pr.TokenRow | fx.PlainSampled]) -> None:
        rows = join_rows(one for one in sampled if isinstance(one, pr.TokenRow))
        plain = (one for one in sampled if isinstance(one, fx.PlainSampled))
        for session, response in responses_by_router(rows, plain).items():
            self.outbox.send(session, response)
        metrics = self.context.metrics
        for row in rows:
            if row.preemptions:
                metrics.add(metric_names.PREEMPTED, row.preemptions)
            if row.prefill_s > 0.0:
                metrics.add(metric_names.REUSED_TOKENS, row.cached_tokens)

    def _attempt_released(self, effect: pr.Released) -> None:
        self._receives.pop(effect.key, None)
        self._released(effect)

    def _attempt_refused(self, effect: pr.Refused) -> None:
        self._receives.pop(effect.key, None)
        self._refused(effect)


def build(context: ProgramContext, load: Callable[[WorkerConfig, Role], Engine] = load_engine) -> DecodeProgram:
    """Runs on the engine thread. Raises ConfigError and ModelError."""
    config = context.config
    engine = load(config, context.role)
    stamps = BlockStamps(engine.spec.num_blocks)
    endpoint = config_of(config, engine.spec, engine.pool, context.incarnation, stamps, context.tls)
    receiver = make_receiver(endpoint, config.host)
    add_servicers = partial(add_TransferServiceServicer_to_server, receiver.servicer)
    return DecodeProgram(context, engine, joined_receiver(receiver, engine, endpoint), add_servicers, stamps)


def make_host(config: WorkerConfig) -> WorkerHost:
    return WorkerHost(config, Role.DECODE, build)
