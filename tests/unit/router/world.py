"""A small random world for RouterState: workers that keep the protocol of worker.proto, and clients.

Each stream is a queue in each direction. The one that moves next is sampled, so messages of different streams
interleave in every way. Workers know the right answer of each request and check what they receive. The world checks
what each client receives. The simulator does not replace it: its workers do not fail or send wrong messages at random.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from pdserve.core.attempt import AttemptKey, FailureKind, RefusalReason
from pdserve.core.cost.latency import CostPrior
from pdserve.core.protocol import (
    Admit,
    AttemptFailed,
    BatchTimed,
    Cancel,
    DrainWorker,
    FirstToken,
    Granted,
    Prefill,
    PullEnded,
    Refused,
    Released,
    Reserve,
    TokenRow,
    TokensArrived,
    TransferEnded,
)
from pdserve.core.types import FinishReason, Role, TokenOut
from router.state.interface import (
    ClientLeft,
    Command,
    EmitTokens,
    EndCancelled,
    Event,
    FailRequest,
    FinishRequest,
    RequestArrived,
    RouterSettings,
    StopMatched,
    TimePassed,
    WakeAt,
    WorkerLost,
)
from router.state.state import RouterState
from tests.unit.router.router_events import answer, hello
from tests.unit.router.world_parts import Client, Held, Key, Worker, grant_of

WEIGHTS: Final = ("a", "b")


class World:
    def __init__(self, seed: int, settings: RouterSettings, faults: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.state = RouterState(settings)
        self.faults = faults
        self.workers: dict[str, Worker] = {}
        self.clients: dict[str, Client] = {}
        self.now_s = 0.0
        self.wake_at_s: float | None = None
        self.log: list[tuple[float, Event, tuple[Command, ...]]] = []
        self.own_events: deque[Event] = deque()
        self.num_pulls = 0

    # -- the router's side ---------------------------------------------------------------------------------------

    def submit(self, event: Event) -> list[Command]:
        commands = self.state.handle(event, self.now_s)
        self.log.append((self.now_s, event, tuple(commands)))
        self.state.check()
        for command in commands:
            self._execute(command)
        while self.own_events:
            self.submit(self.own_events.popleft())
        return commands

    def _execute(self, command: Command) -> None:
        match command:
            case WakeAt():
                assert command.at_s > self.now_s
                self.wake_at_s = command.at_s
            case EmitTokens():
                client = self.clients[command.request_id]
                assert client.last_word is None, f"{command.request_id} hears tokens after its last word"
                assert command.first_index == len(client.heard), "tokens are not contiguous"
                client.weights = client.weights or command.weights
                client.heard += [token.token_id for token in command.tokens]
                right = [answer(command.request_id, index) for index in range(len(client.heard))]
                assert client.heard == right, f"{command.request_id} hears wrong tokens"
                if client.stop_after is not None and len(client.heard) >= client.stop_after:
                    event = StopMatched(request_id=command.request_id, num_output_tokens=client.stop_after)
                    self.own_events.append(event)
            case FinishRequest() | FailRequest() | EndCancelled():
                client = self.clients[command.request_id]
                assert client.last_word is None, f"{command.request_id} has two last words"
                client.last_word = command
            case Reserve() | Prefill() | Admit() | Cancel() | DrainWorker():
                worker = self.workers[command.worker_id]
                if worker.is_connected:
                    worker.inbox.append(command)

    def pass_time(self, seconds: float) -> None:
        """Advances the time, with the alarms that are due on the way."""
        until_s = self.now_s + seconds
        while self.wake_at_s is not None and self.wake_at_s <= until_s:
            self.now_s = self.wake_at_s
            self.wake_at_s = None
            self.submit(TimePassed())
        self.now_s = until_s

    # -- clients -------------------------------------------------------------------------------------------------

    def arrive(self, request: RequestArrived, length: int | None = None, stop_after: int | None = None) -> Client:
        most = request.sampling.max_tokens
        client = Client(request, min(length or most, most), stop_after=stop_after)
        self.clients[request.request_id] = client
        self.submit(request)
        return client

    # -- workers -------------------------------------------------------------------------------------------------

    def start(
        self, worker_id: str, role: Role, *, sends_kv: bool = False, pulls_kv: bool = False, weights: str = ""
    ) -> Worker:
        """With `weights`, one of WEIGHTS, the worker has a random one of these after each crash."""
        worker = Worker(worker_id, role, sends_kv=sends_kv, pulls_kv=pulls_kv, weights=weights)
        self.workers[worker_id] = worker
        self.connect(worker)
        return worker

    def connect(self, worker: Worker) -> None:
        worker.is_connected = True
        facts = {"sends_kv": worker.sends_kv, "pulls_kv": worker.pulls_kv, "weights": worker.weights}
        cost = CostPrior(prefill_per_token_s=0.01) if worker.pulls_kv else CostPrior()  # so that pulls pay
        self.submit(hello(worker.worker_id, worker.role, worker.generation, cost=cost, **facts))

    def disconnect(self, worker: Worker, is_dead: bool) -> None:
        """Loses messages in both directions that were on their way."""
        worker.inbox.clear()
        worker.outbox.clear()
        worker.held.clear()
        worker.is_connected = worker.is_frozen = worker.is_draining = False
        if is_dead:
            worker.generation += 1
            worker.weights = self.rng.choice(WEIGHTS) if worker.weights else ""
        self.submit(WorkerLost(worker_id=worker.worker_id, reason="gone"))

    def take(self, worker: Worker) -> None:
        """The worker reads one message."""
        command = worker.inbox.popleft()
        match command:
            case Reserve():
                self._reserve(worker, command)
            case Prefill():
                self._prefill(worker, command)
            case Admit():
                held = worker.held.get((command.request_id, command.attempt))
                if held is not None and held.stage == "landing":
                    assert command.first_token_id == answer(command.request_id, held.output)
                    held.is_admitted = True
                    held.output += 1
                    held.tokens += 1
                    self._join(held)
            case Cancel():
                self._cancel(worker, command)
            case DrainWorker():
                worker.is_draining = True

    def _check_output(self, worker: Worker, request_id: str, output: tuple[int, ...]) -> None:
        assert not output or worker.weights == self.clients[request_id].weights, "an answer changes its weights"
        assert output == tuple(answer(request_id, index) for index in range(len(output))), "wrong resumption point"

    def _reserve(self, worker: Worker, command: Reserve) -> None:
        assert worker.role is Role.DECODE
        self._check_output(worker, command.request_id, command.output_token_ids)
        key = (command.request_id, command.attempt)
        assert key not in worker.held, "an attempt number is used twice"
        if self._refuses(worker, key):
            return
        tokens = self.clients[command.request_id].request.num_prompt_tokens + len(command.output_token_ids)
        held = Held(len(command.output_token_ids), tokens, command.is_local)
        held.stage = "running" if command.is_local else "landing"
        worker.held[key] = held
        self._pull(worker, command)
        grant = None if command.is_local else grant_of(worker, command.attempt)
        self.say(worker, Granted(key=AttemptKey(worker.worker_id, key[0], key[1]), grant=grant))

    def _prefill(self, worker: Worker, command: Prefill) -> None:
        assert worker.role is Role.PREFILL or worker.sends_kv
        self._check_output(worker, command.request_id, command.output_token_ids)
        key = (command.request_id, command.attempt)
        assert key not in worker.held, "an attempt number is used twice"
        if self._refuses(worker, key, may_drain=worker.sends_kv):
            return
        tokens = self.clients[command.request_id].request.num_prompt_tokens + len(command.output_token_ids)
        granter, generation, attempt = command.grant.decode().split("/")
        assert int(attempt) == command.attempt, "an old grant is used"
        if self.workers[granter].generation == int(generation):
            assert self.workers[granter].weights == worker.weights, "a pair has different weights"
        worker.held[key] = Held(len(command.output_token_ids), tokens, granted_by=(granter, int(generation)))
        self._pull(worker, command)

    def _pull(self, worker: Worker, command: Reserve | Prefill) -> None:
        """The worker pulls what it is told to, or fails, or computes its tokens before it has reported either."""
        source = command.source
        if source is None:
            return
        assert worker.pulls_kv
        assert isinstance(command, Prefill) or command.is_local
        assert source.worker_id != worker.worker_id
        assert source.endpoint == f"{source.worker_id}:1"
        self.num_pulls += 1
        if self.rng.random() < 0.2:
            return
        is_whole = self.rng.random() < 0.8
        self.say(
            worker,
            PullEnded(
                key=AttemptKey(worker.worker_id, command.request_id, command.attempt),
                source=source.worker_id,
                num_tokens=source.num_tokens if is_whole else 0,
                num_bytes=1024,
                busy_s=0.001,
                pull_s=0.002,
                error="" if is_whole else "by chance",
            ),
        )

    def _refuses(self, worker: Worker, key: Key, *, may_drain: bool = False) -> bool:
        reason: RefusalReason | None = None
        if worker.is_draining and not may_drain:
            reason = RefusalReason.DRAINING
        elif self.rng.random() < self.faults * (20 if may_drain else 1):
            lacks = RefusalReason.NO_KV if may_drain else RefusalReason.NO_BLOCKS
            reason = self.rng.choice([RefusalReason.INBOX_FULL, lacks])
        if reason is not None:
            self.say(
                worker,
                Refused(key=AttemptKey(worker.worker_id, key[0], key[1]), reason=reason, retry_after_s=0.05),
            )
        return reason is not None

    def _cancel(self, worker: Worker, command: Cancel) -> None:
        key = (command.request_id, command.attempt)
        held = worker.held.get(key)
        if held is None:
            self._released(worker, key)  # Like real workers.
        elif held.stage in ("landing", "sending") and not held.has_landed:
            held.stage = "ending"  # A copy may still access the blocks.
        else:
            self.release(worker, key)

    def release(self, worker: Worker, key: Key) -> None:
        del worker.held[key]
        self._released(worker, key)

    def _released(self, worker: Worker, key: Key) -> None:
        self.say(worker, Released(key=AttemptKey(worker.worker_id, key[0], key[1])))

    def say(self, worker: Worker, event: Event) -> None:
        worker.outbox.append(event)

    @staticmethod
    def _join(held: Held) -> None:
        if held.is_admitted and held.has_landed:
            held.stage = "running"

    def work(self, worker: Worker) -> None:
        """One of the worker's attempts makes a possible next step."""
        if not worker.held:
            return
        worker.steps += 1
        key = self.rng.choice(sorted(worker.held))
        held = worker.held[key]
        if held.stage == "ending":
            self.release(worker, key)
        elif self.rng.random() < self.faults:
            self._fail(worker, key, held)
        elif held.granted_by is not None:
            self._step_prefill(worker, key, held)
        elif held.stage == "running":
            self._step_decode(worker, key, held)

    def _fail(self, worker: Worker, key: Key, held: Held) -> None:
        name = AttemptKey(worker.worker_id, key[0], key[1])
        if held.stage == "landing" and held.has_landed:
            return
        if held.stage in ("landing", "sending") and self.rng.random() < 0.7:
            self.say(worker, TransferEnded(key=name, is_committed=False, error="checksum"))
        else:
            kind = self.rng.choice([FailureKind.INTERNAL, FailureKind.TRANSFER])
            self.say(worker, AttemptFailed(key=name, kind=kind, message="by chance"))
        self.release(worker, key)

    def _step_prefill(self, worker: Worker, key: Key, held: Held) -> None:
        """The token and the KV are reported on different streams, so either may reach the router first."""
        if held.stage == "waiting":
            token = TokenOut(token_id=answer(key[0], held.output))
            finish = self._finish_of(key[0], held.output + 1)
            held.stage = "sending"
            self.say(
                worker,
                FirstToken(
                    key=AttemptKey(worker.worker_id, key[0], key[1]),
                    token=token,
                    finish=finish,
                    queue_s=0.01,
                    prefill_s=0.1,
                ),
            )
            tokens = held.tokens
            self.say(
                worker,
                BatchTimed(
                    worker_id=worker.worker_id,
                    rows=0,
                    prefill_tokens=tokens,
                    prefill_token_context=tokens * tokens / 2,
                    context_tokens=0,
                    step_s=0.01 + 1e-4 * tokens,
                ),
            )
            return
        # The blocks reach the decode worker, if it still waits for them.
        assert held.granted_by is not None
        granter, generation = held.granted_by
        target = self.workers[granter]
        landing = target.held.get(key)
        if landing is not None and landing.stage == "landing" and target.generation == generation:
            landing.has_landed = True
            self.say(
                target,
                TransferEnded(
                    key=AttemptKey(target.worker_id, key[0], key[1]),
                    is_committed=True,
                    transfer_s=0.01,
                    busy_s=0.01,
                    num_bytes=1024 * held.tokens,
                ),
            )
            self._join(landing)
        elif not target.is_frozen:
            self.say(
                worker,
                TransferEnded(key=AttemptKey(worker.worker_id, key[0], key[1]), is_committed=False, error="gone"),
            )
        self.release(worker, key)

    def _finish_of(self, request_id: str, num_output: int) -> FinishReason | None:
        client = self.clients[request_id]
        if num_output < client.length:
            return None
        return FinishReason.LENGTH if num_output >= client.request.sampling.max_tokens else FinishReason.STOP

    def _step_decode(self, worker: Worker, key: Key, held: Held) -> None:
        """One token, or several if drafts were accepted."""
        left = self.clients[key[0]].length - held.output
        count = max(1, min(self.rng.choice((1, 1, 2, 5)), left))
        finish = self._finish_of(key[0], held.output + count)
        row = TokenRow(
            key=AttemptKey(worker.worker_id, key[0], key[1]),
            output_index=held.output,
            tokens=tuple(TokenOut(token_id=answer(key[0], held.output + index)) for index in range(count)),
            finish=finish,
            decode_s=0.5 if finish else 0.0,
        )
        held.output += count
        held.tokens += count
        self.say(worker, TokensArrived(worker_id=worker.worker_id, rows=(row,)))
        if finish is not None:
            self.release(worker, key)

    # -- the whole cluster ---------------------------------------------------------------------------------------

    def deliver(self, worker: Worker) -> None:
        """The router reads one message of this worker."""
        self.submit(worker.outbox.popleft())

    def settle(self, limit_s: float = 300.0) -> None:
        """Runs without new faults until there are no messages left and every client has its last message."""
        self.faults = 0.0
        until_s = self.now_s + limit_s
        while not (self.state.is_empty and all(client.last_word for client in self.clients.values())):
            assert self.now_s < until_s, [c.request.request_id for c in self.clients.values() if not c.last_word]
            is_busy = False
            for worker in list(self.workers.values()):
                if worker.is_frozen:
                    worker.is_frozen = False
                if not worker.is_connected:
                    self.connect(worker)
                worker.is_draining = False
                while worker.inbox:
                    self.take(worker)
                    is_busy = True
                if worker.held:
                    self.work(worker)
                    is_busy = True
                while worker.outbox:
                    self.deliver(worker)
                    is_busy = True
            self.beat()
            self.pass_time(0.001 if is_busy else 0.05)
        for worker in self.workers.values():
            assert not worker.held, f"{worker.worker_id} still holds {worker.held}"

    def beat(self) -> None:
        for worker in self.workers.values():
            if worker.is_connected and not worker.is_frozen:
                self.say(worker, worker.load())

    def stir(self) -> None:
        """Causes one random event."""
        rng = self.rng
        workers = [one for one in self.workers.values() if one.is_connected and not one.is_frozen]
        movable = [one for one in self.workers.values() if one.outbox and one.is_connected]
        roll = rng.random()
        if roll < 0.3 and movable:
            self.deliver(rng.choice(movable))
        elif roll < 0.5 and (readers := [one for one in workers if one.inbox]):
            self.take(rng.choice(readers))
        elif roll < 0.85 and workers:
            self.work(rng.choice(workers))
        elif roll < 0.93:
            self.pass_time(rng.choice([0.0, 0.001, 0.01, 0.1]))
        elif roll < 0.96:
            self.beat()
        else:
            self._mishap()

    def _mishap(self) -> None:
        rng = self.rng
        if rng.random() > 10 * self.faults:
            return
        worker = rng.choice(list(self.workers.values()))
        match rng.choice(["kill", "cut", "freeze", "drain", "leave"] + ["thaw", "start"] * 6):
            case "kill" if worker.is_connected:
                self.disconnect(worker, is_dead=True)
            case "cut" if worker.is_connected:
                self.disconnect(worker, is_dead=False)
            case "freeze" if worker.is_connected:
                worker.is_frozen = True
            case "thaw":
                worker.is_frozen = worker.is_draining = False
            case "drain" if worker.is_connected and rng.random() < 0.2:
                worker.is_draining = True
            case "start" if not worker.is_connected:
                self.connect(worker)
            case "leave":
                live = [name for name, client in self.clients.items() if client.last_word is None]
                if live:
                    self.submit(ClientLeft(request_id=rng.choice(live)))
            case _:
                pass
