"""The prefill program: computes prompts, samples their first token, and pushes their KV to the decode worker that
granted blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, final

from kvtransfer.attempt_sender import AttemptSender, OutgoingTransfer
from kvtransfer.device_staging import device_staging
from kvtransfer.device_tier import device_tier
from kvtransfer.devices import issuer
from kvtransfer.link.endpoint import config_of, make_receiver, make_sender
from kvtransfer.protocol.grants import check_movable, fingerprint_of
from kvtransfer.protocol.transport import Sender, events, total
from kvtransfer.pulls import Peers, add_pulls, can_pull
from kvtransfer.ranks.rank_endpoints import joined_sender
from pdserve.config import WorkerConfig
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.step_rule import PromptOrder
from pdserve.core.effects import PrefillEffect
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role
from pdserve.engine.interface import Engine, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.v1 import worker_pb2
from pdserve.v1.transfer_pb2_grpc import add_TransferServiceServicer_to_server
from pdserve.worker.context import ProgramContext, ProgramParts, engine_of, parts_of, stamps_of, with_defaults
from pdserve.worker.host import Build, WorkerHost
from pdserve.worker.program import RoleProgram
from pdserve.worker.steps import Begun, RowFailed
from prefill_worker.prefill_sequence import PrefillStep
from prefill_worker.pushing import DEVICE_MESSAGE_S, MAX_GROUPS, MESSAGE_S, PushRule
from prefill_worker.scheduler import PrefillScheduler

NO_DIVISOR: Final = f"the layers cannot be divided into 2 to {MAX_GROUPS} equal groups"


@final
class PrefillProgram(RoleProgram[PrefillStep, PrefillEffect, OutgoingTransfer]):
    scheduler: PrefillScheduler

    def __init__(
        self,
        context: ProgramContext,
        parts: ProgramParts,
        sender: Sender,
        peers: Peers | None = None,
    ) -> None:
        """Without `peers`, it neither pulls KV from other workers nor gives them its own."""
        config, engine = context.config, parts.engine
        super().__init__(context, parts, sender, fingerprint_of(engine.spec))
        self._peers = peers
        add_pulls(self, peers, sender)
        self._sender = sender
        self._moved_bytes = 0  # total at the end of the last step
        order = PromptOrder(CostModel(self.cost), most=config.max_batch_tokens)
        self.scheduler = PrefillScheduler(
            kv=self.kv,
            fetches=self.fetches_with(order.remaining_s),
            prompt_order=order,
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
        scheduler = self.scheduler
        self._sending = AttemptSender(self, sender, scheduler.sent, scheduler.pushing.sent, kv_wire=config.kv_wire)

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
        order = self._sending.begin(session, message.prefill)
        if order is None:
            return
        self.act(
            self.scheduler.offer(
                order.attempt,
                receiver=order.grant.worker_id,
                receiver_cached_blocks=order.grant.num_cached_blocks,
                num_granted=len(order.grant.blocks),
                granted_size=order.granted_size,
                may_divide=order.may_divide,
                now_s=self.context.now(),
            )
        )

    def compute(self, begun: Begun[PrefillStep]) -> Sequence[RowOut | RowFailed]:
        step = begun.step
        if not self.scheduler.wants_layers(step):
            return super().compute(begun)
        of, rows = self.engine.spec.num_layers, list(step.rows)
        answer = self.between_layers(rows)

        def on_layer(num_layers: int) -> None:
            self.act(self.scheduler.stored(step, num_layers, of))
            if answer is not None:
                answer(num_layers)

        return self.isolation.step(rows, on_layer)

    def observe(self, account: fx.StepAccount, step_s: float) -> None:
        self.scheduler.order.observe(account, step_s)
        moved_bytes = self._sender.moved_bytes
        self.scheduler.pushing.stepped(account, step_s, moved_bytes - self._moved_bytes)
        self._moved_bytes = moved_bytes

    def transfer_events(self) -> Mapping[str, int]:
        withheld = self.scheduler.pushing.num_withheld
        ends = [self._sender.stats] if self._peers is None else [self._sender.stats, self._peers.receiver.stats]
        return {**events(total(ends)), **issuer.events(), "layer_groups_withheld": withheld}

    def kv_links(self) -> list[tuple[str, str, str]]:
        return sorted((link.worker_id, link.transport, link.reason) for link in self._sender.links)

    def add_servicers(self, server: Any) -> None:
        if self._peers is not None:
            add_TransferServiceServicer_to_server(self._peers.receiver.servicer, server)

    @property
    def is_healthy(self) -> bool:
        return super().is_healthy and (self._peers is None or self._peers.receiver.is_healthy)

    def close_transfers(self) -> None:
        try:
            if self._peers is not None:
                self._peers.receiver.close()
        finally:
            super().close_transfers()

    def check(self) -> None:
        super().check()
        assert set(self.transfers) == set(self.scheduler.live()), "an attempt has no grant"

    # -- effects ------------------------------------------------------------------------------------------------

    def act(self, effects: Iterable[PrefillEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendStarted() | fx.BlocksDone() | fx.SendAborted() | pr.FirstToken():
                    self._sending.act(effect)
                case _:
                    self.act_on_common(effect)


def build(context: ProgramContext, load: Callable[[WorkerConfig, Role], Engine] = load_engine) -> PrefillProgram:
    """Runs on the engine thread. Raises ModelError, and ConfigError, for instance if `push` asks for groups of layers
    and blocks cannot be divided."""
    context = replace(context, device_tier=device_tier, device_staging=device_staging)
    with ExitStack() as opened:
        engine = engine_of(context, load, opened)
        context, stamps = with_defaults(context, engine), stamps_of(context, engine)
        config = context.config
        check_movable(engine.spec.tp_degree, 1 + len(getattr(engine, "rank_addresses", ())))
        endpoint = config_of(config, engine.spec, engine.pool, context.incarnation, stamps, context.tls)
        sender = joined_sender(make_sender(endpoint, config.kv_wire), engine, endpoint)
        opened.callback(sender.close)
        peers = None
        if can_pull(config, engine):
            peers = Peers(endpoint, make_receiver(endpoint, config.host))
            opened.callback(peers.receiver.close)
        program = PrefillProgram(context, parts_of(context, engine, stamps, opened), sender, peers)
        if config.push == "layers" and not program.scheduler.pushing.groups:
            raise ConfigError("push", config.push, f"auto, end or chunk: {program.why_whole or NO_DIVISOR}")
        opened.pop_all()
    return program


def make_host(config: WorkerConfig, build_decode: Build | None = None) -> WorkerHost:
    """`build_decode`: for a worker that may become a decode worker."""
    return WorkerHost(config, Role.PREFILL, build, build_decode)
