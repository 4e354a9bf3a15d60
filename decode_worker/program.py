"""The decode program: grants blocks, prefills prompts of local placements, sends answers token by token, and the KV of
answers that leave the worker to other decode workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence_table import KvCheck
from decode_worker.speculation import DraftRule
from decode_worker.step import DecodeStep
from decode_worker.steps_in_flight import make_steps_in_flight
from kvtransfer.attempt_sender import AttemptSender, OutgoingTransfer
from kvtransfer.device_staging import device_staging
from kvtransfer.device_tier import device_tier
from kvtransfer.devices import issuer
from kvtransfer.link.endpoint import config_of, make_receiver, make_sender
from kvtransfer.protocol.grants import check_movable, encode_grant, fingerprint_of
from kvtransfer.protocol.transport import Received, ReceiveOutcome, Receiver, Sender, events, total
from kvtransfer.pulls import Peers, add_pulls, can_pull
from kvtransfer.ranks.rank_endpoints import joined_receiver, joined_sender
from pdserve.config import WorkerConfig
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, FailureKind
from pdserve.core.cost.latency import CostModel
from pdserve.core.effects import DecodeEffect, PlainTokens
from pdserve.core.errors import PdserveError
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.protocol import TokenRow
from pdserve.core.types import Role
from pdserve.engine.interface import Engine, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.telemetry import metric_names
from pdserve.v1 import worker_pb2
from pdserve.v1.transfer_pb2_grpc import add_TransferServiceServicer_to_server
from pdserve.wire.protocol import TOKEN_ROW
from pdserve.worker import messages
from pdserve.worker.context import ProgramContext, ProgramParts, engine_of, parts_of, stamps_of, with_defaults
from pdserve.worker.host import Build, WorkerHost
from pdserve.worker.messages import key_of
from pdserve.worker.program import AttemptTransfer, RoleProgram
from pdserve.worker.steps import Begun, RowFailed

# --- token rows -----------------------------------------------------------------------------------------------
# Those of one call are joined by attempt, and put into one message for each router. No I/O.


def join_rows(rows: Iterable[TokenRow]) -> list[TokenRow]:
    """Joins the rows of each attempt. With accepted drafts, a step yields several tokens."""
    joined: list[TokenRow] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last is None or last.key != row.key:
            joined.append(row)
            continue
        joined[-1] = replace(
            last,
            tokens=last.tokens + row.tokens,
            finish=row.finish,
            decode_s=last.decode_s + row.decode_s,
            preemptions=last.preemptions + row.preemptions,
        )
    return joined


def responses_by_router(rows: Iterable[TokenRow], plain: PlainTokens | None) -> dict[int, worker_pb2.AttachResponse]:
    """One message for each router, by the number of its stream."""
    by_router: dict[int, worker_pb2.AttachResponse] = {}
    if plain is not None:
        for router, tokens in messages.plain_tokens(plain):
            by_router[router] = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=tokens))
    for row in rows:
        response = by_router.setdefault(row.key.router, worker_pb2.AttachResponse())
        response.tokens.rows.append(TOKEN_ROW.encode(row))
    return by_router


# --- program --------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


@dataclass(slots=True)
class IncomingTransfer(AttemptTransfer):
    reserved_s: float  # arrival of Reserve


@final
class DecodeProgram(RoleProgram[DecodeStep, DecodeEffect, IncomingTransfer | OutgoingTransfer]):
    scheduler: DecodeScheduler

    def __init__(
        self,
        context: ProgramContext,
        parts: ProgramParts,
        receiver: Receiver,
        add_servicers: Callable[[Any], None],
        sender: Sender | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Without a sender, answers leave the worker without their KV. Without `peers`, it neither pulls KV from other
        workers nor gives them its own."""
        config, engine = context.config, parts.engine
        super().__init__(context, parts, receiver, fingerprint_of(engine.spec))
        self._receiver = receiver
        self._sender = sender
        self._add_servicers = add_servicers
        add_pulls(self, peers, sender)
        self._num_grants = 0
        self._chunks = ChunkRule(CostModel(self.cost), most=config.max_batch_tokens)
        self._drafting = (
            DraftRule(self.cost, most=config.max_drafts, most_together=config.max_batch_tokens)
            if config.speculation == "ngram"
            else None
        )
        self.scheduler = DecodeScheduler(
            kv=self.kv,
            fetches=self.fetches_with(
                lambda uncached, cached: self._chunks.cost.prefill_s(uncached, cached, config.max_batch_tokens)
            ),
            max_batch=config.max_batch,
            chunks=self._chunks,
            inbox_depth=config.inbox_depth,
            end_rule=self.end_rule,
            drafting=self._drafting,
            check=KvCheck(self.blocks.stamps) if config.kv_check == "step" else None,
        )
        self._sending = None if sender is None else AttemptSender(self, sender, self.scheduler.sent)
        choice = config.async_scheduling if self._drafting is None else "off"
        self._in_flight = make_steps_in_flight(engine, choice, self.scheduler, self.isolation)

    def take(self, session: int, message: worker_pb2.AttachRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session, message.reserve)
            case "admit":
                self._admit(session, message.admit)
            case "prefill" if self._sending is not None:
                self._send(self._sending, session, message.prefill)
            case _:
                self.counts["message for the other role"] += 1

    def add_servicers(self, server: Any) -> None:
        self._add_servicers(server)

    def transfer_events(self) -> Mapping[str, int]:
        ends = [self._receiver.stats] if self._sender is None else [self._receiver.stats, self._sender.stats]
        return {**events(total(ends)), **issuer.events()}

    def kv_links(self) -> list[tuple[str, str, str]]:
        links = () if self._sender is None else self._sender.links
        return sorted((link.worker_id, link.transport, link.reason) for link in links)

    @property
    def sends_kv(self) -> bool:
        return self._sender is not None

    def close_transfers(self) -> None:
        try:
            if self._sender is not None:
                self._sender.close()
        finally:
            super().close_transfers()

    @property
    def is_healthy(self) -> bool:
        return super().is_healthy and self._receiver.is_healthy

    def observe(self, account: fx.StepAccount, step_s: float) -> None:
        if account.draft_tokens == 0:
            self._chunks.observe(account, step_s)
        if account.prefill_tokens == 0 and self._drafting is not None:
            self._drafting.observe(account, step_s)

    # -- steps: launched before the previous one is read, if the engine supports it -------------------------------

    @property
    def has_work(self) -> bool:
        return super().has_work or (self._in_flight is not None and self._in_flight.is_busy)

    def begin_step(self) -> Begun[DecodeStep] | None:
        in_flight = self._in_flight
        if in_flight is None:
            return super().begin_step()
        begun = in_flight.take_next()
        if begun is not None:
            return begun
        planned = super().begin_step()
        return None if planned is None else in_flight.launch(planned.step)

    def compute(self, begun: Begun[DecodeStep]) -> Sequence[RowOut | RowFailed]:
        if self._in_flight is None:
            return super().compute(begun)
        self._in_flight.is_paused = self.adapters.waits
        return self._in_flight.read(begun)

    @property
    def is_in_flight(self) -> bool:
        return self._in_flight is not None and self._in_flight.is_busy

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
            self.transfers[attempt.key] = IncomingTransfer(transfer, attempt.deadline_at_s, self.received_s)
        self.act(self.scheduler.offer(attempt, is_local=reserve.is_local, now_s=self.context.now()))

    def _admit(self, session: int, admit: worker_pb2.Admit) -> None:
        key = key_of(session, admit.request_id, admit.attempt)
        if admit.first_token_id >= self.limits.vocab_size:
            message = f"first_token_id: got {admit.first_token_id}, expected below {self.limits.vocab_size}"
            self.act(self.scheduler.fail(key, FailureKind.INVALID, message))
            return
        effects = self.scheduler.admit(key, admit.first_token_id, self.received_s)
        if effects is None:
            self.counts["late or duplicate admit"] += 1
            return
        self.act(effects)

    def _send(self, sending: AttemptSender, session: int, prefill: worker_pb2.Prefill) -> None:
        order = sending.begin(session, prefill)
        if order is None:
            return
        self.act(
            self.scheduler.offer_send(
                order.attempt,
                receiver_cached_blocks=order.grant.num_cached_blocks,
                num_granted=len(order.grant.blocks),
                granted_size=order.granted_size,
                now_s=self.context.now(),
            )
        )

    def _received(self, key: AttemptKey, received: Received, now_s: float) -> None:
        if self.transfer_of(key, received.key) is None:
            return
        match received.outcome:
            case ReceiveOutcome.VERIFIED:
                self.act(
                    self.scheduler.received(
                        key,
                        transfer_s=received.transfer_s,
                        busy_s=received.busy_s,
                        num_bytes=received.num_bytes,
                        now_s=now_s,
                    )
                )
            case ReceiveOutcome.FAILED | ReceiveOutcome.DRAINED:
                error = received.error or received.outcome.value
                self.act(self.scheduler.lost(key, error, is_cancelled=received.is_cancelled))
            case ReceiveOutcome.QUARANTINED:
                self.counts["quarantined transfer"] += 1  # the blocks stay reserved until DRAINED follows

    # -- effects ------------------------------------------------------------------------------------------------

    def act(self, effects: Iterable[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.TokensSampled():
                    self._send_tokens(effect)
                case fx.BlocksReserved():
                    self._blocks_reserved(effect)
                case fx.SendStarted() | fx.BlocksDone() | fx.SendAborted() | pr.FirstToken():
                    assert self._sending is not None, "no attempt is sent without a sender"
                    self._sending.act(effect)
                case pr.Granted():  # of a local attempt, while its Reserve is handled
                    self.outbox.report(replace(effect, grant_s=self.context.now() - self.received_s))
                case fx.ReceiveAborted():
                    self._receiver.abort(self.transfers[effect.key].key)
                case fx.KvCommitted():
                    self._kv_committed(effect)
                case fx.KvMistaken():
                    self.context.metrics.add(metric_names.KV_MISTAKEN)
                    message = "a KV block has wrong content; the text is computed again"
                    self.lines.line(logging.ERROR, message, error=effect.error)
                case fx.TransferCancelled():
                    self.context.metrics.add(metric_names.TRANSFERS, outcome="cancelled")
                case _:
                    self.act_on_common(effect)

    def _blocks_reserved(self, effect: fx.BlocksReserved) -> None:
        key, context = effect.key, self.context
        incoming = self.transfers[key]
        assert isinstance(incoming, IncomingTransfer), "an attempt whose KV is sent reserves nothing"
        grant = Grant(
            key=incoming.key,
            endpoint=context.endpoint,
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            fingerprint=self.fingerprint,
            blocks=effect.blocks,
            num_cached_blocks=effect.num_cached_blocks,
            hash_seed=self.limits.hash_seed,
            rank_endpoints=self._receiver.rank_endpoints,
        )
        post, now = context.post, context.now
        try:  # the receiver must expect the transfer before another process learns of the grant
            check_movable(self.engine.spec.tp_degree, 1 + len(grant.rank_endpoints))
            is_open = self._receiver.expect(
                grant,
                lambda received: post(partial(self._received, key, received, now())),
                incoming.remaining_s(now()),
                self.scheduler.content_hashes(key),
                lambda: post(partial(self._opened, key, grant)),
            )
        except PdserveError as error:
            self.act(self.scheduler.lost(key, error.message))
            return
        if is_open:
            self._opened(key, grant)

    def _opened(self, key: AttemptKey, grant: Grant) -> None:
        """Sends the grant to the router, unless the attempt was abandoned in the meantime."""
        incoming = self.transfers.get(key)
        if isinstance(incoming, IncomingTransfer) and incoming.key == grant.key:
            grant_s = self.context.now() - incoming.reserved_s
            self.outbox.report(pr.Granted(key=key, grant=encode_grant(grant), grant_s=grant_s))

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

    def _send_tokens(self, effect: fx.TokensSampled) -> None:
        rows = join_rows(effect.rows)
        for session, response in responses_by_router(rows, effect.plain).items():
            self.outbox.send(session, response)
        metrics = self.context.metrics
        for row in rows:
            if row.preemptions:
                metrics.add(metric_names.PREEMPTED, row.preemptions)
            if row.prefill_s > 0.0:
                metrics.add(metric_names.REUSED_TOKENS, row.cached_tokens)


def build(context: ProgramContext, load: Callable[[WorkerConfig, Role], Engine] = load_engine) -> DecodeProgram:
    """Runs on the engine thread. Raises ConfigError and ModelError."""
    context = replace(context, device_tier=device_tier, device_staging=device_staging)
    with ExitStack() as opened:
        engine = engine_of(context, load, opened)
        context, stamps = with_defaults(context, engine), stamps_of(context, engine)
        config = context.config
        endpoint = config_of(config, engine.spec, engine.pool, context.incarnation, stamps, context.tls)
        receiver = make_receiver(endpoint, config.host)
        opened.callback(receiver.close)
        joined = joined_receiver(receiver, engine, endpoint)
        opened.callback(joined.close)
        # A sender is idle until the first answer leaves. Sending from pools of several ranks has not been run from a
        # decode worker.
        sender = None
        if config.is_prefix_cache_on and engine.spec.tp_degree == 1:
            sender = joined_sender(make_sender(endpoint), engine, endpoint)
            opened.callback(sender.close)
        program = DecodeProgram(
            context,
            parts_of(context, engine, stamps, opened),
            joined,
            partial(add_TransferServiceServicer_to_server, receiver.servicer),
            sender,
            Peers(endpoint, receiver) if can_pull(config, engine) else None,
        )
        opened.pop_all()
    return program


def make_host(config: WorkerConfig, build_prefill: Build | None = None) -> WorkerHost:
    """`build_prefill`: for a worker that may become a prefill worker."""
    return WorkerHost(config, Role.DECODE, build, build_prefill)
