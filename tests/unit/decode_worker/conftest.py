"""A decode scheduler over the toy engine, driven by hand. Blocks are checked after each step and each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence_table import KvCheck
from decode_worker.speculation import DraftRule
from decode_worker.step import DecodeStep
from decode_worker.steps_in_flight import AsyncStepper
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.effects import BlocksReserved, DecodeEffect, PlainTokens, StepAccount, TokensSampled
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.protocol import TokenRow
from pdserve.core.types import Sampling
from pdserve.engine.interface import Flight, OnLayer, Row, RowOut
from pdserve.engine.toy import EOS, NUM_ANSWERS, ToyEngine

BLOCK_SIZE = 4
PRIOR = CostPrior(
    prefill_base_s=0.0,
    prefill_per_token_s=0.01,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.02,
    decode_per_row_s=0.01,
    decode_per_context_token_s=0.0,
)
CHEAP_DRAFTS = replace(PRIOR, prefill_per_token_s=0.0001)


class KnownHistories:
    """The toy engine, which checks that every history is complete when it samples."""

    def __init__(self, toy: ToyEngine) -> None:
        self._toy, self.spec, self.pool = toy, toy.spec, toy.pool

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        for row in rows:
            if row.sample is not None and row.sample.needs_history:
                assert len(row.history) == row.start + len(row.tokens)
                assert list(row.history[row.start :]) == list(row.tokens)
        return self._toy.step(rows, on_layer)

    def close(self) -> None:
        self._toy.close()


def spread(effects: list[DecodeEffect]) -> list[Any]:
    """The effects, with a step's token rows in place of the one effect that has them."""
    found: list[Any] = []
    for effect in effects:
        if isinstance(effect, TokensSampled):
            found += [effect.plain] if effect.plain is not None else []
            found += effect.rows
        else:
            found.append(effect)
    return found


class Bench:
    """A scheduler, its engine, a clock that each step advances by a second, and the sampled tokens of each attempt."""

    def __init__(
        self,
        num_blocks: int = 32,
        max_batch: int = 4,
        max_batch_tokens: int = 8,
        inbox_depth: int = 4,
        num_answers: int = NUM_ANSWERS,
        max_drafts: int = 0,
        is_async: bool = False,
        is_checked: bool = False,
        prior: CostPrior = PRIOR,
    ) -> None:
        self.is_async = is_async
        self.num_async = 0  # Number of steps that were launched before the previous step was read.
        self.num_sampled_late = 0  # Number of rows whose sampling waited for the previous step.
        self.flight: tuple[DecodeStep, Flight] | None = None
        self.num_answers = num_answers
        self.engine = ToyEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_answers=num_answers)
        self.accounts: list[StepAccount] = []
        blocks = BlockAllocator(num_blocks)
        self.scheduler = DecodeScheduler(
            kv=KvCache(blocks, BLOCK_SIZE),
            check=KvCheck(blocks.stamps) if is_checked else None,
            max_batch=max_batch,
            chunks=ChunkRule(CostModel(prior), least=4, most=max_batch_tokens),
            inbox_depth=inbox_depth,
            drafting=DraftRule(CHEAP_DRAFTS, most=max_drafts, most_together=64) if max_drafts else None,
            end_rule=EndRule(eos_token_ids=frozenset({EOS}), max_context_tokens=num_blocks * BLOCK_SIZE),
        )
        self.now_s = 0.0
        self.sampled: dict[str, list[int]] = {}
        self.prompts: dict[AttemptKey, list[int]] = {}
        self.grants: dict[AttemptKey, BlocksReserved] = {}

    @staticmethod
    def key(name: str, attempt: int = 1) -> AttemptKey:
        return AttemptKey(1, name, attempt)

    def offer(
        self,
        name: str,
        prompt: list[int],
        *,
        is_local: bool = True,
        output: tuple[int, ...] = (),
        attempt: int = 1,
        deadline_at_s: float | None = None,
        tpot_s: float | None = None,
        ttft_s: float | None = None,
        adapter: str = "",
        **sampling: Any,
    ) -> list[DecodeEffect]:
        key = self.key(name, attempt)
        one = Attempt(
            key=key,
            prompt_ids=tuple(prompt),
            output_ids=output,
            sampling=Sampling(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            arrived_s=self.now_s,
            adapter=adapter,
            deadline_at_s=deadline_at_s,
            tpot_s=tpot_s,
            ttft_s=ttft_s,
        )
        effects = self.scheduler.offer(one, is_local=is_local, now_s=self.now_s)
        self.prompts[key] = [*prompt, *output]
        self.grants.update({effect.key: effect for effect in effects if isinstance(effect, BlocksReserved)})
        return effects

    def write(self, name: str, attempt: int = 1) -> int:
        """Acts as the prefill worker: writes the prompt's KV into the granted blocks, and samples the first token."""
        key = self.key(name, attempt)
        tokens, grant = self.prompts[key], self.grants[key]
        source = ToyEngine(
            num_blocks=len(tokens) // BLOCK_SIZE + 1, block_size=BLOCK_SIZE, num_answers=self.num_answers
        )
        blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
        greedy = Sampling(temperature=0.0)
        row = Row(tokens=tokens, start=0, blocks=blocks, sample=greedy, history=tokens, prompt_len=len(tokens))
        [first] = source.step([row])[0].sampled
        size = source.pool.block_bytes
        for received, block in zip(grant.blocks, blocks[grant.num_cached_blocks :], strict=True):
            self.engine.pool.buffer[received * size : (received + 1) * size] = source.pool.buffer[
                block * size : (block + 1) * size
            ]
        return first.token_id

    def reserve_and_write(self, name: str, prompt: list[int], **settings: Any) -> int:
        """Reserves blocks and writes their KV, without reporting it. Returns the first token."""
        [effect] = self.offer(name, prompt, is_local=False, **settings)
        assert isinstance(effect, BlocksReserved)
        return self.write(name)

    def send(
        self,
        name: str,
        prompt: list[int],
        attempt: int = 2,
        *,
        cached_blocks: int = 0,
        num_granted: int | None = None,
        **settings: Any,
    ) -> list[DecodeEffect]:
        """Orders the worker to send the KV of an answer that it has computed and cancelled."""
        output = tuple(self.sampled.get(name, ()))
        one = Attempt(
            key=self.key(name, attempt),
            prompt_ids=tuple(prompt),
            output_ids=output,
            sampling=Sampling(**{"temperature": 0.0, "max_tokens": 100, **settings}),
            arrived_s=self.now_s,
        )
        if num_granted is None:
            num_granted = -(-one.num_tokens // BLOCK_SIZE) - cached_blocks
        return self.scheduler.offer_send(
            one,
            receiver_cached_blocks=cached_blocks,
            num_granted=num_granted,
            granted_size=BLOCK_SIZE,
            now_s=self.now_s,
        )

    def assert_right_kv(self, tokens: list[int], blocks: dict[int, int]) -> None:
        """The worker's `blocks`, by their number in the text, have the KV of `tokens`, as they are sent."""
        count = -(-len(tokens) // BLOCK_SIZE)
        fresh = ToyEngine(num_blocks=count, block_size=BLOCK_SIZE, num_answers=self.num_answers)
        fresh.step([Row(tokens=tokens, start=0, blocks=list(range(count)), history=(), prompt_len=0)])
        size = fresh.pool.block_bytes
        for index, block in blocks.items():
            used = size * min(len(tokens) - index * BLOCK_SIZE, BLOCK_SIZE) // BLOCK_SIZE
            mine = self.engine.pool.buffer[block * size : block * size + used]
            assert bytes(mine) == bytes(fresh.pool.buffer[index * size : index * size + used]), f"block {index}"

    def receive(self, name: str, attempt: int = 1) -> list[DecodeEffect]:
        key = self.key(name, attempt)
        return self.scheduler.received(key, transfer_s=0.5, busy_s=0.25, num_bytes=64, now_s=self.now_s)

    def admit(self, name: str, first_token: int, attempt: int = 1) -> list[DecodeEffect] | None:
        effects = self.scheduler.admit(self.key(name, attempt), first_token, self.now_s)
        if effects is not None:
            self.sampled[name] = [first_token]
        return effects

    def step(self) -> list[Any]:
        """The effects before and after one step."""
        return self._async_step() if self.is_async else self._step()

    def _async_step(self) -> list[Any]:
        """Reads one step. The next one may have been launched before."""
        engine, before = AsyncStepper(KnownHistories(self.engine)), list[DecodeEffect]()
        if self.flight is None:
            plan, before = self.scheduler.plan(self.now_s)
            if not plan.rows:
                return before
            self.flight = plan, engine.launch(plan.rows, None)
            self.scheduler.launched(plan)
        (plan, flight), self.flight = self.flight, None
        if flight.unsampled:
            self.num_sampled_late += len(flight.unsampled)
            flight.sample(plan.known_rows(flight.unsampled))
        following = self.scheduler.plan_after(plan)
        if following is not None:
            self.num_async += 1
            self.flight = following, engine.launch(following.rows, flight)
            self.scheduler.launched(following)
        self.scheduler.check()
        self.now_s += 1.0
        self.accounts.append(plan.account)
        return [*before, *self._read(self.scheduler.apply(plan, flight.wait(), self.now_s))]

    def _step(self) -> list[Any]:
        plan, before = self.scheduler.plan(self.now_s)
        self.scheduler.check()
        self.now_s += 1.0
        if not plan.rows:
            return before
        self.accounts.append(plan.account)
        return [*before, *self._read(self.scheduler.apply(plan, self.engine.step(plan.rows), self.now_s))]

    def _read(self, after: list[DecodeEffect]) -> list[Any]:
        self.scheduler.check()
        one_by_one = spread(after)
        for one in one_by_one:
            if isinstance(one, TokenRow):
                self.sampled.setdefault(one.key.request_id, []).append(one.tokens[0].token_id)
            if isinstance(one, PlainTokens):
                for key, token_id in zip(one.keys, one.token_ids, strict=True):
                    self.sampled[key.request_id].append(token_id)
        return one_by_one

    def end(self) -> None:
        """Ends every request. Raises AssertionError unless all blocks are free or in the prefix cache then."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        scheduler.check()
        for key in scheduler.live():
            scheduler.cancel(key)
            scheduler.lost(key, "the test ends")
            scheduler.sent(key, is_whole=False)
        if self.flight is not None:
            scheduler.dropped(self.flight[0])
        scheduler.check()
        assert scheduler.live() == []
        assert blocks.num_free + blocks.num_evictable == blocks.num_blocks, "a block is used after the last request"

    def run(self, limit: int = 1000) -> list[Any]:
        effects: list[Any] = []
        while self.scheduler.has_work or self.flight is not None:
            assert limit, "the scheduler makes no progress"
            limit -= 1
            effects += self.step()
        return effects


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**settings: int) -> Bench:
        benches.append(Bench(**settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.end()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
