"""A simulated decode worker: decode_worker.program with a clock in place of an engine. Pure.

Steps that only decode are not simulated one by one. While no sequence joins, leaves, ends or needs a block, the time of
a run of steps is computed by speed.py and applied at once. A message that arrives during a run is read at the end of
the step in which it arrives. If it changes which sequences decode, the run ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

from decode_worker.decode_sequence import DecodeStage
from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import DecodeStep
from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey
from pdserve.core.cost.latency import CostModel
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.pulls import LONG_QUERIES
from pdserve.core.protocol import TokenRow
from simulator.cluster.machine import Environment, Machine, Order
from simulator.cluster.network import SimulatedGrant
from simulator.cluster.prefiller import DREW, READ
from simulator.cluster.prompts import TOKEN
from simulator.cluster.speed import Speed, StepTimes
from simulator.cluster.tally import Tally
from simulator.model import WorkerShape

# --- tokens that are not reported yet -------------------------------------------------------------------------


@dataclass(slots=True)
class _Tokens:
    """The tokens of one attempt."""

    output_index: int  # of the first
    count: int
    decode_s: float = 0.0
    decode_queue_s: float = 0.0
    preempted_s: float = 0.0
    preemptions: int = 0


@final
class UnreportedTokens:
    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._of: dict[AttemptKey, _Tokens] = {}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def attempts(self) -> list[AttemptKey]:
        return list(self._of)

    def add(self, key: AttemptKey, output_index: int, count: int) -> None:
        """`output_index` is that of the first of these tokens."""
        held = self._of.get(key)
        if held is None:
            self._of[key] = _Tokens(output_index, count)
        else:
            held.count += count

    def add_account(self, row: TokenRow) -> None:
        """Adds the durations and the number of preemptions that the row reports."""
        if row.decode_s or row.decode_queue_s or row.preempted_s or row.preemptions:
            held = self._of[row.key]
            held.decode_s += row.decode_s
            held.decode_queue_s += row.decode_queue_s
            held.preempted_s += row.preempted_s
            held.preemptions += row.preemptions

    def discard(self, key: AttemptKey) -> None:
        self._of.pop(key, None)

    def take(self, rows: Iterable[TokenRow]) -> dict[int, list[TokenRow]]:
        """Removes the tokens of the attempts of `rows`. Returns for each router the rows with these tokens."""
        by_router: dict[int, list[TokenRow]] = {}
        for row in rows:
            key, held = row.key, self._of.pop(row.key)
            full = replace(
                row,
                key=key._replace(peer=self._worker_id),
                output_index=held.output_index,
                tokens=(TOKEN,) * held.count,
                decode_s=held.decode_s,
                decode_queue_s=held.decode_queue_s,
                preempted_s=held.preempted_s,
                preemptions=held.preemptions,
            )
            by_router.setdefault(key.router, []).append(full)
        return by_router


# --- decode worker --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepRun:
    """The steps in progress. `count` 0: one step with more than decode rows."""

    step: DecodeStep
    count: int
    times: StepTimes
    jitter: float
    since_s: float
    border: int = 0  # the step after which the inbox must be read; 0: none

    def end_of(self, steps: int) -> float:
        return self.since_s + self.times.after(steps) * self.jitter

    def steps_by(self, now_s: float) -> int:
        """The number, in this run, of the step that is running or ends now."""
        return self.times.steps_until((now_s - self.since_s) / self.jitter)


@final
class DecodeMachine(Machine[DecodeStep, fx.DecodeEffect]):
    scheduler: DecodeScheduler

    def __init__(self, env: Environment, shape: WorkerShape, speed: Speed, tally: Tally, incarnation: str) -> None:
        super().__init__(env, shape, speed, tally, incarnation)
        cost = CostModel(shape.prior or shape.cost)
        self._chunks = ChunkRule(cost, most=shape.max_batch_tokens)
        self.scheduler = DecodeScheduler(
            kv=self.kv,
            fetches=self.fetches_with(
                lambda uncached, cached: self._chunks.cost.prefill_s(uncached, cached, shape.max_batch_tokens)
            ),
            max_batch=shape.max_batch,
            chunks=self._chunks,
            inbox_depth=shape.inbox_depth,
            end_rule=self.end_rule,
        )
        self._num_grants = 0
        self._noted_preemptions = 0
        self._run: StepRun | None = None
        self._unreported = UnreportedTokens(shape.worker_id)
        self._report_at_s = 0.0  # when the unreported ones are due
        self._block_bytes = self.block_size * shape.kv_bytes_per_token  # the real model's

    @property
    def is_computing(self) -> bool:
        return self._run is not None

    @property
    def is_step_long(self) -> bool:
        return self._run is not None and any(count >= LONG_QUERIES for _, count in self._run.step.prefilling)

    @property
    def num_rows(self) -> int:
        """Sequences that decode in the present step."""
        return 0 if self._run is None else len(self._run.step.decoding)

    def load(self) -> pr.Load:
        load = self.scheduler.load()
        run = self._run
        if run is None or run.count <= 1 or self.is_stalled:
            return load
        done = min(run.steps_by(self.agenda.now_s), run.count) - 1
        return replace(load, context_tokens=load.context_tokens + done * len(run.step.decoding))

    # -- messages ------------------------------------------------------------------------------------------------

    def reserve(self, order: Order, is_local: bool) -> None:
        attempt = self.begin(order)
        if attempt is not None:
            self.act(self.scheduler.offer(attempt, is_local=is_local, now_s=self.agenda.now_s))

    def prefill(self, order: Order, encoded: bytes) -> None:
        grant = SimulatedGrant.decode(encoded)
        attempt = self.begin(order)
        if attempt is None:
            return
        self.grants[order.key] = grant
        self.act(
            self.scheduler.offer_send(
                attempt,
                receiver_cached_blocks=grant.num_cached_blocks,
                num_granted=grant.num_blocks,
                granted_size=self.block_size,
                now_s=self.agenda.now_s,
            )
        )

    def send_ended(self, key: AttemptKey, *, is_whole: bool, error: str) -> None:
        if self.scheduler.stage(key) is DecodeStage.RUNNING:
            self._settle()  # as in `cancel`
        self.act(self.scheduler.sent(key, is_whole=is_whole, error=error))

    def admit(self, key: AttemptKey, first_token: int) -> None:
        effects = self.scheduler.admit(key, first_token, self.agenda.now_s)
        if effects is not None:
            self.act(effects)
            self._joined(key)

    def received(
        self, key: AttemptKey, transfer: TransferKey, transfer_s: float, busy_s: float, num_bytes: int
    ) -> None:
        self.post(self._received, key, transfer, transfer_s, busy_s, num_bytes)

    def not_received(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        self.post(self._not_received, key, transfer, error)

    def _received(
        self, key: AttemptKey, transfer: TransferKey, transfer_s: float, busy_s: float, num_bytes: int
    ) -> None:
        if not self.holds_transfer(key, transfer):
            return
        now_s = self.agenda.now_s
        self.act(self.scheduler.received(key, transfer_s=transfer_s, busy_s=busy_s, num_bytes=num_bytes, now_s=now_s))
        self._joined(key)

    def _not_received(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        if self.holds_transfer(key, transfer):
            self.act(self.scheduler.lost(key, error))

    def _joined(self, key: AttemptKey) -> None:
        stage = self.scheduler.stage(key)
        if stage is DecodeStage.RUNNING:
            self.unstrand(key)
        elif stage is DecodeStage.RECEIVING and self.scheduler.has_received(key):
            self.strand(key, self.scheduler.num_held(key))

    def fetched(self, fetch: Fetch, num_blocks: int) -> None:
        self._settle()  # the prompt may be in the next step
        super().fetched(fetch, num_blocks)

    def give_up(self) -> None:
        self._settle()
        super().give_up()

    def cancel(self, key: AttemptKey) -> None:
        if self.scheduler.stage(key) is DecodeStage.RUNNING:
            self._settle()  # the steps so far are applied
        super().cancel(key)

    def update_tally(self) -> None:
        super().update_tally()
        preemptions = self.scheduler.num_preemptions
        self.tally.row.preemptions += preemptions - self._noted_preemptions
        self._noted_preemptions = preemptions

    # -- steps ---------------------------------------------------------------------------------------------------

    def stall(self, for_s: float) -> None:
        self._cut()
        super().stall(for_s)

    def change_speed(self) -> None:
        """The duration of steps that have not begun has changed."""
        self._cut()
        super().change_speed()

    def _cut(self) -> None:
        """Makes the current step the last of its run."""
        run = self._run
        if run is not None and run.count > 1:
            last = run.steps_by(self.agenda.now_s)
            if last < run.count:
                run.count = last
                self.agenda.at(run.end_of(last), self._ended, run, last)

    def _interrupt(self) -> None:
        run = self._run
        assert run is not None
        if run.count > 1 and run.border == 0:
            under_way = run.steps_by(self.agenda.now_s)
            if under_way < run.count:  # otherwise the inbox is read at the end of the run
                run.border = under_way
                self.agenda.at(run.end_of(under_way), self._at_border, run)

    def _at_border(self, run: StepRun) -> None:
        """A step within a run has ended, and there are messages."""
        if self.is_dead or run is not self._run:
            return
        if self.is_stalled:
            self.agenda.at(self.stalled_until_s, self._at_border, run)
            return
        self.update_tally()
        changes = self.scheduler.num_changes
        self.read_inbox()
        if self._run is None:  # a message cannot be processed before the run's steps are applied
            self._changed()
            self._go()
            return
        if self.scheduler.num_changes != changes:
            self._settle()
            self._changed()
            self._go()
        else:
            run.border = 0
            self._changed()

    def _go(self) -> None:
        if self._run is not None or not self.scheduler.has_work or self.is_dead:
            return
        now_s, scheduler = self.agenda.now_s, self.scheduler
        step, effects = scheduler.plan(now_s)
        if effects:
            self.act(effects)
        self.expect_give_up()
        if step.is_empty:
            return
        if not self._unreported:
            self._report_at_s = now_s + self.env.config.report_s
        longest = scheduler.run_length(step)
        if longest == 0:
            times = StepTimes(self.speed.step_s(step.account), 0.0)
            run = self._run = StepRun(step, 0, times, self.speed.jitter(), now_s + self.copies.take_s())
            self.agenda.at(run.end_of(1), self._ended, run, 0)
            return
        times = self.speed.times(step.account)
        count = min(longest, times.steps_until(max(self._report_at_s - now_s, 0.0)))
        run = self._run = StepRun(step, count, times, self.speed.jitter(count), now_s + self.copies.take_s())
        self.agenda.at(run.end_of(count), self._ended, run, count)

    def _ended(self, run: StepRun, count: int) -> None:
        if self.is_dead or run is not self._run or run.count != count:
            return
        if self.is_stalled:
            self.agenda.at(self.stalled_until_s, self._ended, run, count)
            return
        self.update_tally()
        self._settle()
        self.read_inbox()
        self._changed()
        self._go()

    def _settle(self) -> None:
        """Ends the run with the step that ends now, and applies its steps."""
        run, now_s, scheduler = self._run, self.agenda.now_s, self.scheduler
        if run is None:
            return
        self._run = None
        step, count = run.step, run.border or run.count or 1
        self._computed(step.account, count, now_s - run.since_s, run.times.first_s * self.speed.jitter())
        unreported = self._unreported
        for sequence in step.decoding:
            if not sequence.is_sending:
                unreported.add(sequence.key, sequence.num_output, count)
        outs = [DREW if share == each.remaining else READ for each, share in step.prefilling]
        for (sequence, _), out in zip(step.prefilling, outs, strict=True):
            if out.sampled and not sequence.is_sending:
                unreported.add(sequence.key, sequence.num_output, 1)
        self.act(scheduler.apply_run(step, count, TOKEN, now_s, outs))
        if unreported and now_s >= self._report_at_s:
            self._report([pr.TokenRow(key=key, output_index=0, tokens=()) for key in unreported.attempts])

    def _computed(self, account: fx.StepAccount, count: int, busy_s: float, step_s: float) -> None:
        self.num_steps += count
        self.tally.computed(account, count, busy_s, self.agenda.now_s)
        if self.timed(account, step_s):
            self._chunks.observe(account, step_s)

    # -- tokens --------------------------------------------------------------------------------------------------

    def _report(self, rows: Iterable[pr.TokenRow]) -> None:
        """Sends the unreported tokens of the attempts of `rows`, one message per router."""
        for router, full in self._unreported.take(rows).items():
            self.send_event(router, pr.TokensArrived(worker_id=self.shape.worker_id, rows=tuple(full)))

    # -- effects -------------------------------------------------------------------------------------------------

    def act(self, effects: Iterable[fx.DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.TokensSampled():
                    assert effect.plain is None, "a simulated step has no plain tokens"
                    self._sampled(effect.rows)
                case pr.Released() | pr.Refused():
                    self._unreported.discard(effect.key)
                    self.act_on_common(effect)
                case fx.SendStarted() | fx.BlocksDone() | fx.SendAborted() | pr.FirstToken():
                    self.act_on_send(effect)
                case fx.BlocksReserved():
                    self._blocks_reserved(effect)
                case pr.Granted():
                    self.forward(effect)
                case fx.KvCommitted():
                    ended = pr.TransferEnded(
                        key=effect.key,
                        is_committed=True,
                        transfer_s=effect.transfer_s,
                        busy_s=effect.busy_s,
                        num_bytes=effect.num_bytes,
                        saved_bytes=effect.num_cached_blocks * self._block_bytes,
                    )
                    self.forward(ended)
                case fx.ReceiveAborted():
                    self.strand(effect.key, self.scheduler.num_held(effect.key))
                    self.env.network.abort_receiving(self.grants[effect.key].key)
                case fx.TransferCancelled():
                    pass  # for the statistics of a real worker
                case fx.KvMistaken():
                    raise AssertionError("a simulated worker checks no KV")
                case _:
                    self.act_on_common(effect)

    def _sampled(self, rows: list[pr.TokenRow]) -> None:
        for row in rows:
            self._unreported.add_account(row)
        first_or_last = [row for row in rows if row.finish is not None or row.prefill_s > 0.0]
        if first_or_last:
            self._report(first_or_last)

    def _blocks_reserved(self, effect: fx.BlocksReserved) -> None:
        key = effect.key
        self._num_grants += 1
        name = f"{self.shape.worker_id}.{self.incarnation}.{self._num_grants}"
        grant = SimulatedGrant(
            key=TransferKey(transfer_id=name, attempt=key.attempt, generation=self._num_grants),
            worker_id=self.shape.worker_id,
            num_cached_blocks=effect.num_cached_blocks,
            num_blocks=len(effect.blocks),
        )
        self.grants[key] = grant
        self.strand(key, self.scheduler.num_held(key))
        self.env.network.expect(self, key, grant, self._block_bytes)
        self.forward(pr.Granted(key=key, grant=grant.encode()))
