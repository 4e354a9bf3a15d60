"""A simulated prefill worker: prefill_worker.program with a clock in place of an engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.step_rule import PromptOrder
from pdserve.core.kv.pulls import LONG_QUERIES
from pdserve.engine.interface import RowOut
from prefill_worker.prefill_sequence import PrefillStep
from prefill_worker.pushing import PushRule
from prefill_worker.scheduler import PrefillScheduler
from simulator.cluster.machine import Environment, Machine, Order
from simulator.cluster.network import SimulatedGrant
from simulator.cluster.prompts import TOKEN
from simulator.cluster.speed import Speed
from simulator.cluster.tally import Tally
from simulator.model import WorkerShape

DREW: Final = RowOut(sampled=(TOKEN,))
READ: Final = RowOut()


@final
class PrefillMachine(Machine[PrefillStep, fx.PrefillEffect]):
    scheduler: PrefillScheduler

    def __init__(self, env: Environment, shape: WorkerShape, speed: Speed, tally: Tally, incarnation: str) -> None:
        super().__init__(env, shape, speed, tally, incarnation)
        self._step: PrefillStep | None = None
        self._started_s = 0.0
        order = PromptOrder(CostModel(shape.prior or shape.cost), most=shape.max_batch_tokens)
        self.scheduler = PrefillScheduler(
            kv=self.kv,
            fetches=self.fetches_with(order.remaining_s),
            prompt_order=order,
            inbox_depth=shape.inbox_depth,
            end_rule=self.end_rule,
            pushing=PushRule(
                shape.cost,
                block_size=self.block_size,
                block_bytes=self.block_size * shape.kv_bytes_per_token,
                num_layers=1,
                max_batch_tokens=shape.max_batch_tokens,
                choice="chunk",
            ),
        )

    @property
    def is_computing(self) -> bool:
        return self._step is not None

    @property
    def is_step_long(self) -> bool:
        return self._step is not None and any(count >= LONG_QUERIES for _, count in self._step.shares)

    def prefill(self, order: Order, encoded: bytes) -> None:
        grant = SimulatedGrant.decode(encoded)
        attempt = self.begin(order)
        if attempt is None:
            return
        self.grants[order.key] = grant
        self.act(
            self.scheduler.offer(
                attempt,
                receiver=grant.worker_id,
                receiver_cached_blocks=grant.num_cached_blocks,
                num_granted=grant.num_blocks,
                granted_size=self.block_size,
                may_divide=False,
                now_s=self.agenda.now_s,
            )
        )

    def send_ended(self, key: AttemptKey, *, is_whole: bool, error: str) -> None:
        self.act(self.scheduler.sent(key, is_whole=is_whole, error=error))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """A prefill step is one step: its end reads the inbox."""

    def _go(self) -> None:
        if self._step is not None or not self.scheduler.has_work or self.is_dead:
            return
        now_s = self.agenda.now_s
        step, effects = self.scheduler.plan(now_s)
        self.act(effects)
        self.expect_give_up()
        if step.is_empty:
            return
        self._step, self._started_s = step, now_s
        copied_s = self.copies.take_s()
        self._started_s += copied_s  # what is learned of steps is without copies
        self.agenda.after(copied_s + self.speed.step_s(step.account) * self.speed.jitter(), self._ended, step)

    def _ended(self, step: PrefillStep) -> None:
        if self.is_dead:
            return
        now_s = self.agenda.now_s
        if self.is_stalled:
            self.agenda.at(self.stalled_until_s, self._ended, step)
            return
        self.update_tally()
        self._step = None
        self.num_steps += 1
        step_s = now_s - self._started_s
        self.tally.computed(step.account, 1, step_s, now_s)
        outs = [DREW if count == prompt.remaining else READ for prompt, count in step.shares]
        self.act(self.scheduler.apply(step, outs, now_s))
        if self.timed(step.account, step_s):
            self.scheduler.order.observe(step.account, step_s)
        self.read_inbox()
        self._changed()
        self._go()

    # -- effects -------------------------------------------------------------------------------------------------

    def act(self, effects: Iterable[fx.PrefillEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendStarted() | fx.BlocksDone() | fx.SendAborted() | pr.FirstToken():
                    self.act_on_send(effect)
                case _:
                    self.act_on_common(effect)
