"""One instance of a simulated worker of either role: reads messages, sends events and reports. Pure.

It does what pdserve.worker.program does, with the same scheduler: it reads messages between steps, turns effects into
events for the routers in the same order, and reports its load on each heartbeat and soon after a change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeAlias, assert_never

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.attempt import AttemptKey, AttemptLedger, EndRule, PrefixSource
from pdserve.core.cost.latency import CostModel
from pdserve.core.kv.blocks import BlockAllocator, CacheChange
from pdserve.core.kv.cache import KvCache
from pdserve.core.kv.fetch import BlockSource, Fetch, FetchAborted, Fetches, FetchStarted, tier_speeds
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.retention import block_cost
from pdserve.core.types import Role
from pdserve.worker.interface import Effect, Scheduler, Step
from router.state import interface
from simulator.cluster.agenda import Agenda
from simulator.cluster.network import Network, SimulatedGrant, Transfer
from simulator.cluster.prompts import BlockNames, SyntheticAttempt, blank, sampling_of
from simulator.cluster.pulls import SimulatedPulls
from simulator.cluster.speed import Speed
from simulator.cluster.tally import Tally
from simulator.cluster.tiers import TierRules, simulated_tiers
from simulator.model import SimConfig, WorkerShape

DENSE_SAMPLES: Final = 100  # batches that are reported as often as by a live worker; after learning, fewer are enough
SPARSE_S: Final = 0.5  # interval between reports after that
IDLE_BEAT_S: Final = 1.0  # interval between the reports of a worker without changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    agenda: Agenda
    config: SimConfig
    network: Network
    routers: list[int]  # the numbers of those that run; a router that starts again gets a new one
    send_event: Callable[[int, interface.Event], None]  # a router, by its number
    cache_changed: Callable[[str, str, CacheChange], None]
    tier_rules: TierRules
    machine: Callable[[str], AnyMachine | None]  # the running instance of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A router's command to a worker, with the data of the request that the runtime adds."""

    key: AttemptKey
    names: BlockNames
    prompt_tokens: int
    output_tokens: int
    answered: int  # tokens that the client has
    ttft_s: float
    tpot_s: float
    waited_s: float
    deadline_s: float | None
    source: PrefixSource | None  # from which a worker that computes the text may pull KV


class Machine(ABC, Generic[Step, Effect]):
    scheduler: Scheduler[Step, Effect]  # set by each role
    flows: dict[TransferKey, Transfer]

    def __init__(self, env: Environment, shape: WorkerShape, speed: Speed, tally: Tally, incarnation: str) -> None:
        self.env, self.shape, self.speed, self.tally, self.incarnation = env, shape, speed, tally, incarnation
        self.agenda, self.link, self.flows = env.agenda, shape.link, {}
        self.block_size = env.config.block_size
        num_blocks = shape.kv_capacity_tokens // self.block_size
        model = CostModel(shape.prior or shape.cost)
        tiers = simulated_tiers(
            self.agenda, shape, self.block_size, model.prefill_s, env.tier_rules, self._disk_changed
        )
        self.disk, self.copies = tiers.disk, tiers.copies
        self.sources = {one.name: one for one in tiers.sources}
        self.blocks = BlockAllocator(
            num_blocks,
            tier=tiers.host,
            lower=tiers.disk,
            computed_s=block_cost(model.prefill_s, self.block_size),
        )
        self.kv = KvCache(self.blocks, self.block_size)
        self.fetches: Fetches | None = None
        self.pulls: SimulatedPulls | None = None
        if shape.pulls_kv:
            self.pulls = SimulatedPulls(self, env.network, env.config.message_s, self.block_size, self._pulls_of)
        self._gives_up_at_s = math.inf  # the next event for it
        self.end_rule = EndRule(
            eos_token_ids=frozenset(),
            max_context_tokens=min(shape.max_context_tokens, num_blocks * self.block_size),
        )
        self.grants: dict[AttemptKey, SimulatedGrant] = {}  # of the attempts whose KV is transferred
        self.is_dead = False
        self.stalled_until_s = 0.0
        self.num_steps = 0
        self.num_timed = 0
        self.stranded: dict[AttemptKey, int] = {}  # blocks held that are not computed, transferred or decoded
        self._num_stranded = 0
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._ledger = AttemptLedger()
        self._timed_s = self._beat_s = float("-inf")
        self._told: pr.Load | None = None
        self._is_beat_due = False

    # -- implemented by each role -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_computing(self) -> bool: ...

    @property
    @abstractmethod
    def is_step_long(self) -> bool:
        """Whether a step runs in which a live worker answers others between two layers."""

    @abstractmethod
    def _interrupt(self) -> None:
        """A message arrived during a step; it is read when the step ends."""

    @abstractmethod
    def _go(self) -> None:
        """Begins the next step, if there is work."""

    @abstractmethod
    def act(self, effects: Iterable[Effect]) -> None:
        """Executes the effects in order: the role's own here, all others by `act_on_common`."""

    def load(self) -> pr.Load:
        return self.scheduler.load()

    # -- coming and going ----------------------------------------------------------------------------------------

    def hello(self) -> interface.WorkerConnected:
        shape = self.shape
        return interface.WorkerConnected(
            worker_id=shape.worker_id,
            incarnation=self.incarnation,
            role=shape.role,
            endpoint=shape.worker_id,
            block_size=self.block_size,
            num_blocks=self.blocks.num_blocks,
            max_context_tokens=self.end_rule.max_context_tokens,
            max_batch=shape.max_batch,
            max_batch_tokens=shape.max_batch_tokens,
            inbox_depth=shape.inbox_depth,
            block_bytes=self.block_size * shape.kv_bytes_per_token,
            cost=shape.prior or shape.cost,
            sends_kv=shape.role is Role.DECODE,
            pulls_kv=shape.pulls_kv,
            ends_texts=True,
        )

    @property
    def is_idle(self) -> bool:
        """True if it holds no memory for any request or other worker."""
        return not self.scheduler.live() and not self.fetches and not self.kv.lent

    def connect(self) -> None:
        """Workers that exist before the first request are known immediately."""
        delay_s = self.env.config.message_s if self.agenda.now_s > 0.0 else 0.0
        for router in self.env.routers:
            self.agenda.after(delay_s, self.env.send_event, router, self.hello())
        self._beat(self.load())
        self.agenda.after(self.env.config.heartbeat_s or IDLE_BEAT_S, self._tick)

    def attach(self, router: int) -> None:
        """A router has started, and reads the hello first."""
        self.send_event(router, self.hello())
        self._beat(self.load())

    def router_gone(self, router: int) -> None:
        """As in pdserve/worker/program.py."""
        for key in self.scheduler.live():
            if key.router == router:
                self.cancel(key)
        self._ledger.forget_router(router)

    def die(self) -> None:
        self.update_tally()
        self.is_dead = True
        self.inbox.clear()
        self.env.network.cut(self)
        if self.pulls is not None:
            self.pulls.die()

    def stall(self, for_s: float) -> None:
        self.stalled_until_s = max(self.stalled_until_s, self.agenda.now_s + for_s)

    def change_speed(self) -> None:
        """Called before the speed changes."""
        self.num_timed = 0  # the learned cost is no longer valid

    @property
    def is_stalled(self) -> bool:
        return self.agenda.now_s < self.stalled_until_s

    # -- messages ------------------------------------------------------------------------------------------------

    def deliver(self, action: Callable[..., None], *details: Any) -> None:
        """Runs `action` between steps."""
        if self.is_dead:
            return
        if self.is_stalled:
            self.agenda.at(self.stalled_until_s, self.deliver, action, *details)
        elif self.is_computing:
            self.inbox.append((action, details))
            self._interrupt()
        else:
            self.update_tally()
            action(*details)
            self._changed()
            self._go()

    def post(self, action: Callable[..., None], *details: Any) -> None:
        """Called by the network, perhaps during an action of this machine; the message is read after that action."""
        self.agenda.after(0.0, self.deliver, action, *details)

    def read_inbox(self) -> None:
        while self.inbox:
            action, details = self.inbox.popleft()
            action(*details)

    @abstractmethod
    def prefill(self, order: Order, encoded: bytes) -> None:
        """Computes what the worker lacks of the text, and sends its KV to the worker that made the grant."""

    def reserve(self, order: Order, is_local: bool) -> None:
        raise AssertionError("only decode workers reserve blocks")

    def admit(self, key: AttemptKey, first_token: int) -> None:
        raise AssertionError("only decode workers continue texts")

    def cancel(self, key: AttemptKey) -> None:
        self.act(self.scheduler.cancel(key))

    def drain(self) -> None:
        self._told = None  # the next report tells all routers, also of no other change
        self.scheduler.is_draining = True
        if self.pulls is not None:
            self.pulls.end_given()

    def undrain(self) -> None:
        self._told = None
        self.scheduler.is_draining = False

    def sent(self, key: AttemptKey, transfer: TransferKey, is_whole: bool, error: str, exposed_s: float = 0.0) -> None:
        self.post(self._sent, key, transfer, is_whole, error, exposed_s)

    def _sent(self, key: AttemptKey, transfer: TransferKey, is_whole: bool, error: str, exposed_s: float) -> None:
        if self.holds_transfer(key, transfer):
            if is_whole:
                self.forward(pr.TransferEnded(key=key, is_committed=True, exposed_s=exposed_s))
            self.send_ended(key, is_whole=is_whole, error=error)

    @abstractmethod
    def send_ended(self, key: AttemptKey, *, is_whole: bool, error: str) -> None:
        """The network no longer reads the blocks of the attempt."""

    def moving(self, key: AttemptKey) -> None:
        """The transfer into granted blocks has begun."""
        self.update_tally()
        self.unstrand(key)

    def received(
        self, key: AttemptKey, transfer: TransferKey, transfer_s: float, busy_s: float, num_bytes: int
    ) -> None:
        raise AssertionError("only decode workers receive")

    def not_received(self, key: AttemptKey, transfer: TransferKey, error: str) -> None:
        raise AssertionError("only decode workers receive")

    def holds_transfer(self, key: AttemptKey, transfer: TransferKey) -> bool:
        """Whether the attempt's transfer is this one; False for a late call."""
        grant = self.grants.get(key)
        return grant is not None and grant.key == transfer

    def begin(self, order: Order) -> SyntheticAttempt | None:
        """None: a late or repeated message."""
        before = self._ledger.newest(order.key)
        if not self._ledger.begin(order.key):
            return None
        if before is not None and before in self.scheduler:
            self.cancel(before)
        now_s = self.agenda.now_s
        return SyntheticAttempt(
            key=order.key,
            prompt_ids=blank(order.prompt_tokens),
            output_ids=blank(order.answered),
            sampling=sampling_of(order.output_tokens),
            arrived_s=now_s,
            deadline_at_s=None if order.deadline_s is None else now_s + order.deadline_s,
            ttft_s=order.ttft_s,
            begun_at_s=now_s - order.waited_s,
            tpot_s=order.tpot_s,
            names=order.names,
            source=order.source,
        )

    # -- blocks of slower tiers ----------------------------------------------------------------------------------

    def fetches_with(self, prefill_s: Callable[[int, int], float]) -> Fetches | None:
        """As in pdserve/worker/program.py."""
        sources: list[BlockSource] = [*map(self.env.tier_rules.source, self.sources.values())]
        if self.pulls is not None:
            sources.append(self.pulls)
        if sources:
            self.fetches = Fetches(self.kv, sources, prefill_s)
        return self.fetches

    def fetched(self, fetch: Fetch, num_blocks: int) -> None:
        """The source no longer writes to the blocks of the fetch."""
        assert self.fetches is not None, "a fetch ends without a source"
        self.fetches.ended(fetch.number, num_blocks)
        if self.pulls is not None:
            self.pulls.answer()  # it may have read for another worker

    def give_up(self) -> None:
        """The time of a prompt that waits for a tier may be over, so that the next step may begin with it."""
        if self.pulls is not None:
            self.pulls.give_up()

    def expect_give_up(self) -> None:
        """Called after each plan."""
        at_s = math.inf if self.fetches is None else self.fetches.next_give_up_s
        if at_s < self._gives_up_at_s:
            self._gives_up_at_s = at_s
            self.agenda.at(max(at_s, self.agenda.now_s), self._give_up_due, at_s)

    def _give_up_due(self, at_s: float) -> None:
        if at_s == self._gives_up_at_s:
            self._gives_up_at_s = math.inf
            self.deliver(self.give_up)

    def _disk_changed(self, hashes: Sequence[bytes]) -> None:
        assert self.disk is not None, "a change without a disk"
        added = [one for one in hashes if one in self.disk]
        self.blocks.lower_changed(added, [one for one in hashes if one not in self.disk])

    # -- pulls ---------------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self.scheduler.is_draining

    @property
    def num_running(self) -> int:
        return self.scheduler.load().running

    @property
    def has_disk(self) -> bool:
        return self.disk is not None

    def between_layers(self, action: Callable[..., None]) -> None:
        if self.is_dead or self.is_stalled or not self.is_step_long:
            self.deliver(action)
        else:
            self.update_tally()
            action()
            self._changed()

    def _pulls_of(self, worker_id: str) -> SimulatedPulls | None:
        machine = self.env.machine(worker_id)
        return None if machine is None else machine.pulls

    # -- events --------------------------------------------------------------------------------------------------

    def send_event(self, router: int, event: interface.Event) -> None:
        self.agenda.after(self.env.config.message_s, self.env.send_event, router, event)

    def forward(self, message: pr.AttemptMessage) -> None:
        """Sends the message to the router of its attempt. There, the attempt's key has the worker's id."""
        theirs = message.key._replace(peer=self.shape.worker_id)
        self.send_event(message.key.router, replace(message, key=theirs))

    def act_on_send(self, effect: fx.SendEffect) -> None:
        network, key = self.env.network, effect.key
        match effect:
            case fx.BlocksDone():
                if effect.blocks:
                    network.push(self.grants[key].key, effect.blocks[0][0], len(effect.blocks))
            case fx.SendStarted():
                network.start(self, key, self.grants[key])
            case pr.FirstToken():
                self.forward(effect)
            case fx.SendAborted():
                network.abort_sending(self.grants[key].key)

    def act_on_common(self, effect: fx.CommonEffect) -> None:
        match effect:
            case pr.Released() | pr.Refused():
                self.grants.pop(effect.key, None)
                self.unstrand(effect.key)
                self.forward(effect)
            case pr.AttemptFailed():
                self.forward(effect)
            case fx.TransferLost():
                self.forward(pr.TransferEnded(key=effect.key, is_committed=False, error=effect.error))
            case fx.PromptScored():
                raise AssertionError("a simulated prompt has no logprobs")
            case FetchStarted():
                fetch = effect.fetch
                if self.pulls is not None and fetch.source == self.pulls.name:
                    self.pulls.begin(fetch, partial(self.fetched, fetch))
                else:
                    self.sources[fetch.source].begin(fetch, partial(self.post, self.fetched, fetch))
            case FetchAborted():
                if self.pulls is not None and effect.source == self.pulls.name:
                    self.pulls.abort(effect.number)
                else:
                    self.sources[effect.source].abort(effect.number)
            case _:
                assert_never(effect)

    # -- reports -------------------------------------------------------------------------------------------------

    def timed(self, account: fx.StepAccount, step_s: float) -> bool:
        """Records the time of a step; True if it is reported."""
        now_s, heartbeat_s = self.agenda.now_s, self.env.config.heartbeat_s
        every_s = heartbeat_s / 10 if self.num_timed < DENSE_SAMPLES else max(SPARSE_S, heartbeat_s / 10)
        if now_s - self._timed_s < every_s:
            return False
        self._timed_s = now_s
        self.num_timed += 1
        event = account.timed(step_s, self.shape.worker_id)
        for router in self.env.routers:
            self.send_event(router, event)
        return True

    def strand(self, key: AttemptKey, num_blocks: int) -> None:
        self._num_stranded += num_blocks - self.stranded.get(key, 0)
        self.stranded[key] = num_blocks

    def unstrand(self, key: AttemptKey) -> None:
        self._num_stranded -= self.stranded.pop(key, 0)

    def update_tally(self) -> None:
        """Updates the worker's statistics to the present time. Called before the memory in use changes."""
        size = self.block_size
        self.tally.kv_held(self.agenda.now_s, self.blocks.num_referenced * size, self._num_stranded * size)

    def _changed(self) -> None:
        change = self.kv.take_changes()
        if change is not None:
            self.env.cache_changed(self.shape.worker_id, self.incarnation, change)
        if self._is_beat_due:
            return
        soon_s = self._beat_s + self.env.config.heartbeat_s / 5
        if self.agenda.now_s >= soon_s:
            self._beat_if_changed()
        else:
            self._is_beat_due = True
            self.agenda.at(soon_s, self._beat_soon)

    def _beat_soon(self) -> None:
        self._is_beat_due = False
        if not self.is_dead and not self.is_stalled:
            self._beat_if_changed()

    def _beat_if_changed(self) -> None:
        load = self.load()
        if load != self._told:
            self._beat(load)

    def _tick(self) -> None:
        if self.is_dead:
            return
        heartbeat_s = self.env.config.heartbeat_s or IDLE_BEAT_S
        if self.is_stalled:
            self.agenda.at(self.stalled_until_s, self._tick)
            return
        since_s = self.agenda.now_s - self._beat_s
        if since_s >= 0.999 * heartbeat_s:
            load = self.load()
            if load != self._told or since_s >= 0.999 * max(IDLE_BEAT_S, heartbeat_s):
                self._beat(load)
        self.agenda.after(heartbeat_s, self._tick)

    def _beat(self, load: pr.Load) -> None:
        self._beat_s, self._told = self.agenda.now_s, load
        report = replace(
            load,
            worker_id=self.shape.worker_id,
            steps=self.num_steps,
            tiers=tier_speeds(self.blocks.tier, self.sources.values()),
            is_draining=self.scheduler.is_draining,
            is_drained=self.scheduler.is_draining,
        )
        for router in self.env.routers:
            self.send_event(router, report)


#: For the cluster, which sees neither the steps nor the effects of its workers.
AnyMachine: TypeAlias = Machine[Any, Any]
