"""The prefill program: computes prompts, samples their first token, and pushes their KV to the decode worker that
granted blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

from kvtransfer.devices import issuer
from kvtransfer.link.endpoint import config_of, make_sender
from kvtransfer.protocol.grants import check_movable, decode_grant, fingerprint_of
from kvtransfer.protocol.transport import Sender, SendOutcome, Sent, Text, events
from kvtransfer.ranks.rank_endpoints import joined_sender
from pdserve.config import WorkerConfig
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import Attempt, AttemptKey, FailureKind
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.overlap import hidden_share
from pdserve.core.cost.step_rule import PromptOrder
from pdserve.core.effects import PrefillEffect
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.core.kv.hashing import chain_key
from pdserve.core.kv.kv_shape import Grant, is_same_bytes
from pdserve.core.kv.stamps import BlockStamps
from pdserve.core.types import Role
from pdserve.engine.interface import Engine, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.telemetry import metric_names
from pdserve.v1 import worker_pb2
from pdserve.worker.host import Build, WorkerHost
from pdserve.worker.program import AttemptTransfer, ProgramContext, RoleProgram
from pdserve.worker.steps import Begun, RowFailed
from prefill_worker.prefill_sequence import PrefillStep
from prefill_worker.pushing import DEVICE_MESSAGE_S, MAX_GROUPS, MESSAGE_S, PushRule
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)

NO_DIVISOR: Final = f"the layers cannot be divided into 2 to {MAX_GROUPS} equal groups"


@dataclass(slots=True)
class OutgoingTransfer(AttemptTransfer):
    grant: Grant
    text: Text | None  # the data that a receiver of another shape requires


@final
class PrefillProgram(RoleProgram[PrefillStep, PrefillEffect, OutgoingTransfer]):
    scheduler: PrefillScheduler

    def __init__(
        self, context: ProgramContext, engine: Engine, sender: Sender, stamps: BlockStamps | None = None
    ) -> None:
        super().__init__(context, engine, sender, fingerprint_of(engine.spec), stamps)
        config = self.context.config
        self._sender = sender
        self._moved_bytes = 0  # total at the end of the last step
        self.scheduler = PrefillScheduler(
            kv=self.kv,
            prompt_order=PromptOrder(CostModel(self.cost), most=config.max_batch_tokens),
            inbox_depth=config.inbox_depth,
            end_rule=self.end_rule,
            pushing=PushRule(
                self.cost,
                block_size=engine.spec.block_size,
                block_bytes=engine.spec.block_bytes * engine.spec.tp_degree,
                num_layers=1 if self.why_whole else engine.spec.num_layers,
                max_batch_tokens=config.max_batch_tokens,
                choice=config.push,
                message_s=MESSAGE_S if engine.pool.is_on_host else DEVICE_MESSAGE_S,
            ),
        )

    @property
    def why_whole(self) -> str:
        """Why blocks cannot be sent in groups of layers; empty if they can."""
        if self.engine.spec.num_layers == 1:
            return "these KV blocks have no equal runs of layers"
        if not self._sender.divides_blocks:
            is_several = self.engine.spec.tp_degree > 1
            return "ranks on GPUs send whole blocks" if is_several else "the transport sends whole blocks"
        return ""

    def take(self, session: int, message: worker_pb2.AttachRequest) -> None:
        if message.WhichOneof("message") != "prefill":
            self.counts["message for the other role"] += 1
            return
        attempt = self.begin(session, message.prefill.sequence)
        if attempt is None:
            return
        key = attempt.key
        try:
            grant = decode_grant(message.prefill.grant)
        except InvalidRequest as error:
            self.act([pr.AttemptFailed(key=key, kind=FailureKind.INVALID, message=error.message), pr.Released(key=key)])
            return
        if any(grant.key == other.key for other in self.transfers.values()):
            why = "grant: another attempt already writes to it"
            self.act([pr.AttemptFailed(key=key, kind=FailureKind.TRANSFER, message=why), pr.Released(key=key)])
            return
        own, theirs = self.fingerprint.shape, grant.fingerprint.shape
        text = None
        is_alike = is_same_bytes(own, theirs) and grant.hash_seed in (b"", self.limits.hash_seed)
        if not is_alike or self.context.config.kv_wire != "exact":
            their_key = chain_key(message.prefill.sequence.cache_salt, grant.hash_seed or self.limits.hash_seed)
            text = text_of(attempt, own.block_size, grant, their_key)
        self.transfers[key] = OutgoingTransfer(grant.key, attempt.deadline_at_s, grant, text)
        self.act(
            self.scheduler.offer(
                attempt,
                receiver=grant.worker_id,
                receiver_cached_blocks=grant.num_cached_blocks,
                num_granted=len(grant.blocks),
                granted_size=theirs.block_size,
                may_divide=text is None,
                now_s=self.context.now(),
            )
        )

    def compute(self, begun: Begun[PrefillStep]) -> Sequence[RowOut | RowFailed]:
        step = begun.step
        if not self.scheduler.wants_layers(step):
            return super().compute(begun)
        of = self.engine.spec.num_layers
        return self.isolation.step(
            list(step.rows), lambda num_layers: self.act(self.scheduler.stored(step, num_layers, of))
        )

    def observe(self, account: fx.StepAccount, step_s: float) -> None:
        self.scheduler.order.observe(account, step_s)
        moved_bytes = self._sender.moved_bytes
        self.scheduler.pushing.stepped(account, step_s, moved_bytes - self._moved_bytes)
        self._moved_bytes = moved_bytes

    def transfer_events(self) -> Mapping[str, int]:
        withheld = self.scheduler.pushing.num_withheld
        return {**events(self._sender.stats), **issuer.events(), "layer_groups_withheld": withheld}

    def kv_links(self) -> list[tuple[str, str, str]]:
        return sorted((link.worker_id, link.transport, link.reason) for link in self._sender.links)

    def check(self) -> None:
        super().check()
        assert set(self.transfers) == set(self.scheduler.live()), "an attempt has no grant"

    # -- effects ------------------------------------------------------------------------------------------------

    def act(self, effects: Iterable[PrefillEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendStarted():
                    self._start_sending(effect)
                case fx.BlocksDone():
                    groups = range(effect.first_group, effect.end_group)
                    self._sender.push(self.transfers[effect.key].key, effect.blocks, effect.is_last, groups)
                case fx.SendAborted():
                    self._sender.abort(self.transfers[effect.key].key)
                case pr.FirstToken():
                    self.outbox.report(effect)
                    self.context.metrics.add(metric_names.REUSED_TOKENS, effect.cached_tokens)
                case _:
                    self.act_on_common(effect)

    def _start_sending(self, effect: fx.SendStarted) -> None:
        key = effect.key
        outgoing = self.transfers[key]
        self.context.metrics.add(metric_names.PUSHES, plan=effect.plan)
        post = self.context.post
        try:
            self._sender.start(
                outgoing.grant,
                lambda sent: post(partial(self._sent, key, sent)),
                outgoing.remaining_s(self.context.now()),
                outgoing.text,
                groups=effect.groups,
            )
        except PdserveError as error:
            self.act(self.scheduler.sent(key, is_whole=False, error=error.message))

    def _sent(self, key: AttemptKey, sent: Sent) -> None:
        outgoing = self.transfer_of(key, sent.key)
        if outgoing is None:
            return
        is_whole = sent.outcome is SendOutcome.SENT
        if is_whole:
            self._measure_sent(key, outgoing.grant, sent)
        self.act(self.scheduler.sent(key, is_whole=is_whole, error=sent.error, is_cancelled=sent.is_cancelled))

    def _measure_sent(self, key: AttemptKey, grant: Grant, sent: Sent) -> None:
        if not sent.num_bytes:
            return
        # A transfer in one piece measures the link, including all overheads before and after the bytes.
        took_s = sent.busy_s if sent.early_bytes else sent.exposed_s
        self.scheduler.pushing.sent(grant.worker_id, sent.num_bytes, took_s)
        metrics = self.context.metrics
        metrics.observe(metric_names.TRANSFER_EXPOSED_TIME, sent.exposed_s)
        metrics.observe(metric_names.TRANSFER_HIDDEN_SHARE, hidden_share(sent.busy_s, sent.exposed_s))
        metrics.add(
            metric_names.TRANSFER_WIRE_BYTES, sent.num_bytes, dtype=sent.wire_dtype or self.fingerprint.shape.dtype
        )
        metrics.add(metric_names.TRANSFER_SENT_BYTES, sent.early_bytes, when="early")
        metrics.add(metric_names.TRANSFER_SENT_BYTES, sent.num_bytes - sent.early_bytes, when="late")
        self.outbox.report(pr.TransferEnded(key=key, is_committed=True, exposed_s=sent.exposed_s))


def text_of(attempt: Attempt, block_size: int, grant: Grant, their_key: bytes) -> Text:
    """The content hashes of the blocks to send, on this worker and on the granting one."""
    tokens, theirs = attempt.token_ids, replace(attempt, chain_key=their_key)
    their_size = grant.fingerprint.shape.block_size
    own = attempt.content_hashes(attempt.extend_hashes([], tokens, block_size), tokens, block_size)
    names = theirs.content_hashes(theirs.extend_hashes([], tokens, their_size), tokens, their_size)
    return Text(
        num_tokens=len(tokens),
        own=own[grant.num_cached_blocks * their_size // block_size :],
        theirs=names[grant.num_cached_blocks :],
    )


def build(context: ProgramContext, load: Callable[[WorkerConfig, Role], Engine] = load_engine) -> PrefillProgram:
    """Runs on the engine thread. Raises ModelError, and ConfigError, for instance if `push` asks for groups of layers
    and blocks cannot be divided."""
    config = context.config
    engine = load(config, context.role) if context.kept is None else context.kept.engine
    check_movable(engine.spec.tp_degree, 1 + len(getattr(engine, "rank_addresses", ())))
    stamps = BlockStamps(engine.spec.num_blocks) if context.kept is None else context.kept.kv.blocks.stamps
    endpoint = config_of(config, engine.spec, engine.pool, context.incarnation, stamps, context.tls)
    sender = joined_sender(make_sender(endpoint, config.kv_wire), engine, endpoint)
    program = PrefillProgram(context, engine, sender, stamps)
    if config.push == "layers" and not program.scheduler.pushing.groups:
        program.close()
        raise ConfigError("push", config.push, f"auto, end or chunk: {program.why_whole or NO_DIVISOR}")
    return program


def make_host(config: WorkerConfig, build_decode: Build | None = None) -> WorkerHost:
    """`build_decode`: for a worker that may become a decode worker."""
    return WorkerHost(config, Role.PREFILL, build, build_decode)
