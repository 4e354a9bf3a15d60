"""A cluster in which everything takes exactly as long as the cost model predicts, for tests of order and admission.

Prefill workers compute prompts one after the other, and decode workers compute one step at a time. Any number of
routers share the workers. Each worker grants from its own blocks, and never more than it has.

The simulator cannot replace it. Its workers run the real schedulers, so a prompt's time depends on other prompts in the
step, and a test could not state when a request starts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.core.attempt import AttemptKey, RefusalReason
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.protocol import (
    Admit,
    BatchTimed,
    Cancel,
    FirstToken,
    Granted,
    Load,
    Prefill,
    Refused,
    Released,
    Reserve,
    TokenRow,
    TokensArrived,
    TransferEnded,
)
from pdserve.core.types import FinishReason, Role, TokenOut
from router.state.interface import (
    Command,
    EmitTokens,
    Event,
    FailRequest,
    FinishRequest,
    RequestArrived,
    RouterSettings,
    TimePassed,
    WakeAt,
)
from router.state.state import RouterState
from tests.unit.router.router_events import BLOCK, hello

#: 1 ms per prompt token and nothing else; steps of 10 ms.
COST = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=1e-3,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.01,
    decode_per_row_s=0.0,
    decode_per_context_token_s=0.0,
)
SAMPLES = 32  # Batches that each worker reports before the first request.
Key = tuple[int, str, int]  # router, request, attempt


@dataclass(slots=True)
class ReceivedMessages:
    """The messages that a client received."""

    arrived_s: float
    first_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    word: FinishRequest | FailRequest | None = None

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_s is None else self.first_s - self.arrived_s


@dataclass(slots=True)
class Machine:
    worker_id: str
    role: Role
    num_blocks: int
    held: dict[Key, int] = field(default_factory=dict)  # blocks
    waiting: deque[tuple[Key, int]] = field(default_factory=deque)  # prompts to compute, with their tokens
    is_busy: bool = False
    most_held: int = 0


class Clocked:
    def __init__(
        self,
        settings: RouterSettings,
        prefills: int = 1,
        decodes: int = 1,
        routers: int = 1,
        num_blocks: int = 100_000,
        trust: bool = True,
        spread: float = 0.0,
    ) -> None:
        """`spread`: single batches are reported alternately longer and shorter than the mean by this share,
        so that the cost model's error is large though its mean is right."""
        self.now_s = 0.0
        self.routers = [RouterState(settings) for _ in range(routers)]
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.told: dict[str, ReceivedMessages] = {}
        self.asked: dict[str, RequestArrived] = {}
        self.commands: list[tuple[float, int, Command]] = []
        self.placed: list[str] = []
        self.cost = CostModel(COST)
        self.machines: dict[str, Machine] = {}
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for index in range(count):
                self._start(f"{role.value[0]}{index}", role, num_blocks, trust=trust, spread=spread)

    def _start(self, worker_id: str, role: Role, num_blocks: int, *, trust: bool, spread: float) -> None:
        self.machines[worker_id] = Machine(worker_id, role, num_blocks)
        facts = {"num_blocks": num_blocks, "max_context_tokens": 1_000_000, "max_batch_tokens": 100, "max_batch": 512}
        for router in range(len(self.routers)):
            self.submit(router, hello(worker_id, role, cost=COST, inbox_depth=64, **facts))
            for sample in range(SAMPLES if trust else 0):
                factor = 1.0 + spread if sample % 2 else 1.0 - spread
                for rows, tokens in ((0, 100), (8, 0)):
                    self.submit(
                        router,
                        BatchTimed(
                            worker_id=worker_id,
                            rows=rows,
                            prefill_tokens=tokens,
                            prefill_token_context=tokens * tokens / 2,
                            context_tokens=rows * 100,
                            step_s=factor * self.cost.step_s(rows, rows * 100, tokens, tokens * tokens / 2),
                        ),
                    )
        self._beat(worker_id)

    def _beat(self, worker_id: str) -> None:
        machine = self.machines[worker_id]
        for router in range(len(self.routers)):
            waiting = sum(tokens for _, tokens in machine.waiting)
            free = machine.num_blocks - sum(machine.held.values())
            report = Load(
                worker_id=worker_id,
                steps=1,
                free_blocks=free,
                running=len(machine.held) if machine.role is Role.DECODE else 0,
                pending_prefill_tokens=waiting,
            )
            self.submit(router, report)
        self.later(1.0, lambda: self._beat(worker_id))

    # -- time ----------------------------------------------------------------------------------------------------

    def later(self, in_s: float, act: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.agenda, (self.now_s + in_s, self.serial, act))

    def run(self, arrivals: Iterable[tuple[float, RequestArrived]], until_s: float) -> None:
        """Arrivals go to the routers in turn. Ends early when every client has its last message."""
        coming = sorted(arrivals, key=lambda one: one[0])
        for index, (at_s, request) in enumerate(coming):
            router = index % len(self.routers)
            self.later(at_s - self.now_s, lambda request=request, router=router: self._arrive(router, request))  # type: ignore[misc]
        while self.agenda and self.agenda[0][0] <= until_s:
            at_s, _, act = heapq.heappop(self.agenda)
            self.now_s = max(self.now_s, at_s)
            act()
            if len(self.told) == len(coming) and all(one.word is not None for one in self.told.values()):
                return

    def _arrive(self, router: int, request: RequestArrived) -> None:
        self.told[request.request_id] = ReceivedMessages(self.now_s)
        self.asked[request.request_id] = request
        self.submit(router, request)

    # -- routers -------------------------------------------------------------------------------------------------

    def submit(self, router: int, event: Event) -> None:
        for command in self.routers[router].handle(event, self.now_s):
            self.commands.append((self.now_s, router, command))
            self._execute(router, command)

    def _execute(self, router: int, command: Command) -> None:
        match command:
            case WakeAt():
                self.later(max(command.at_s - self.now_s, 0.0), lambda: self.submit(router, TimePassed()))
            case EmitTokens():
                told = self.told[command.request_id]
                assert told.word is None, "tokens after the last word"
                assert command.first_index == told.tokens, "tokens are not contiguous"
                told.tokens += len(command.tokens)
                told.first_s = self.now_s if told.first_s is None else told.first_s
            case FinishRequest() | FailRequest():
                told = self.told[command.request_id]
                assert told.word is None, "two last words"
                told.word, told.ended_s = command, self.now_s
            case Reserve():
                self.placed.append(command.request_id)
                self.later(0.0, lambda: self._reserve(router, command))
            case Prefill():
                key = (router, command.request_id, command.attempt)
                self.later(0.0, lambda: self._queue(command.worker_id, key))
            case Admit():
                key = (router, command.request_id, command.attempt)
                self.later(0.0, lambda: self._answer(command.worker_id, key, 1))
            case Cancel():
                key = (router, command.request_id, command.attempt)
                self.later(0.0, lambda: self._release(command.worker_id, key))
            case _:
                raise AssertionError(command)

    # -- workers -------------------------------------------------------------------------------------------------

    def _reserve(self, router: int, command: Reserve) -> None:
        machine, key = self.machines[command.worker_id], (router, command.request_id, command.attempt)
        request = self.asked[command.request_id]
        blocks = -(-(request.num_prompt_tokens + request.sampling.max_tokens) // BLOCK)
        if sum(machine.held.values()) + blocks > machine.num_blocks:
            self.submit(router, Refused(key=command.key, reason=RefusalReason.NO_BLOCKS))
            return
        machine.held[key] = blocks
        machine.most_held = max(machine.most_held, sum(machine.held.values()))
        if command.is_local:
            self._queue(command.worker_id, key)
        self.submit(router, Granted(key=command.key, grant=None if command.is_local else b"grant"))

    def _queue(self, worker_id: str, key: Key) -> None:
        machine = self.machines[worker_id]
        machine.waiting.append((key, self.asked[key[1]].num_prompt_tokens))
        if not machine.is_busy:
            self._compute(worker_id)

    def _compute(self, worker_id: str) -> None:
        machine = self.machines[worker_id]
        machine.is_busy = bool(machine.waiting)
        if machine.waiting:
            key, tokens = machine.waiting.popleft()
            self.later(self.cost.prefill_s(tokens, 0, 100), lambda: self._computed(worker_id, key))

    def _computed(self, worker_id: str, key: Key) -> None:
        router, request_id, attempt = key
        if self.machines[worker_id].role is Role.DECODE:
            self._answer(worker_id, key, 0)
        else:
            is_last = self.asked[request_id].sampling.max_tokens == 1
            self.submit(
                router,
                FirstToken(
                    key=AttemptKey(worker_id, request_id, attempt),
                    token=TokenOut(token_id=0),
                    finish=FinishReason.LENGTH if is_last else None,
                ),
            )
            landed = next(
                (one.worker_id for one in self.machines.values() if one.role is Role.DECODE and key in one.held), None
            )
            if landed is not None and not is_last:
                ended = TransferEnded(
                    key=AttemptKey(landed, request_id, attempt),
                    is_committed=True,
                    transfer_s=1e-4,
                    busy_s=1e-4,
                    num_bytes=1_000_000,
                )
                self.submit(router, ended)
            self._release(worker_id, key)
        self._compute(worker_id)

    def _answer(self, worker_id: str, key: Key, answered: int) -> None:
        """Sends the rest of the answer in one message when it is complete; for a local attempt, the first token before
        it."""
        router, request_id, attempt = key
        left = self.asked[request_id].sampling.max_tokens - answered
        if key not in self.machines[worker_id].held:
            return
        count = 1 if answered == 0 else left
        is_last = count == left

        def say() -> None:
            if key not in self.machines[worker_id].held:
                return
            tokens = tuple(TokenOut(token_id=0) for _ in range(count))
            finish = FinishReason.LENGTH if is_last else None
            row = TokenRow(
                key=AttemptKey(worker_id, request_id, attempt), output_index=answered, tokens=tokens, finish=finish
            )
            self.submit(router, TokensArrived(worker_id=worker_id, rows=(row,)))
            if is_last:
                self._release(worker_id, key)
            else:
                self._answer(worker_id, key, answered + count)

        if answered == 0:
            say()
        else:
            self.later(0.01 * count, say)

    def _release(self, worker_id: str, key: Key) -> None:
        self.machines[worker_id].held.pop(key, None)
        self.submit(key[0], Released(key=AttemptKey(worker_id, key[1], key[2])))
