"""A prefill scheduler over the toy engine, driven by hand. Blocks are checked after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.core.attempt import Attempt, AttemptKey, EndRule, blocks_for
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.cost.step_rule import PromptOrder
from pdserve.core.effects import BlocksDone, PrefillEffect
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.protocol import FirstToken
from pdserve.core.types import Sampling
from pdserve.engine.toy import EOS, ToyEngine
from prefill_worker.pushing import PushRule
from prefill_worker.scheduler import PrefillScheduler

BLOCK_SIZE = 4


class Bench:
    """A scheduler, its engine, and a clock that each step advances by a second."""

    def __init__(
        self,
        num_blocks: int = 16,
        max_batch_tokens: int = 8,
        inbox_depth: int = 4,
        num_layers: int = 1,
        push: str = "chunk",
    ) -> None:
        self.engine = ToyEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.scheduler = PrefillScheduler(
            kv=KvCache(BlockAllocator(num_blocks), BLOCK_SIZE),
            prompt_order=PromptOrder(CostModel(CostPrior()), least=BLOCK_SIZE, most=max_batch_tokens),
            inbox_depth=inbox_depth,
            end_rule=EndRule(eos_token_ids=frozenset({EOS}), max_context_tokens=num_blocks * BLOCK_SIZE),
            pushing=PushRule(
                CostPrior(),
                block_size=BLOCK_SIZE,
                block_bytes=self.engine.spec.block_bytes,
                num_layers=num_layers,
                max_batch_tokens=max_batch_tokens,
                choice=push,
            ),
        )
        self.now_s = 0.0

    @staticmethod
    def key(name: str, attempt: int = 1) -> AttemptKey:
        return AttemptKey(1, name, attempt)

    def offer(
        self,
        name: str,
        prompt: list[int],
        *,
        output: tuple[int, ...] = (),
        attempt: int = 1,
        receiver_cached_blocks: int = 0,
        num_granted: int | None = None,
        granted_size: int = BLOCK_SIZE,
        deadline_at_s: float | None = None,
        ttft_s: float | None = None,
        adapter: str = "",
        **sampling: Any,
    ) -> list[PrefillEffect]:
        one = Attempt(
            key=self.key(name, attempt),
            prompt_ids=tuple(prompt),
            output_ids=output,
            sampling=Sampling(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            arrived_s=self.now_s,
            adapter=adapter,
            deadline_at_s=deadline_at_s,
            ttft_s=ttft_s,
            begun_at_s=self.now_s,
        )
        needed = blocks_for(one.num_tokens, granted_size) - receiver_cached_blocks
        num_granted = needed if num_granted is None else num_granted
        return self.scheduler.offer(
            one,
            receiver="d",
            receiver_cached_blocks=receiver_cached_blocks,
            num_granted=num_granted,
            granted_size=granted_size,
            may_divide=True,
            now_s=self.now_s,
        )

    def step(self) -> list[PrefillEffect]:
        """The effects before and after one step."""
        plan, before = self.scheduler.plan(self.now_s)
        self.now_s += 1.0
        if not plan.rows:
            return before
        after = self.scheduler.apply(plan, self.engine.step(plan.rows), self.now_s)
        self.scheduler.check()
        return [*before, *after]

    def run(self) -> list[PrefillEffect]:
        effects: list[PrefillEffect] = []
        while self.scheduler.has_work:
            effects += self.step()
        return effects

    def end(self) -> None:
        """Ends every request. Raises AssertionError unless all blocks are free or in the prefix cache then."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        scheduler.check()
        for key in scheduler.live():
            scheduler.cancel(key)
            scheduler.sent(key, is_whole=False, error="the test ends")
        scheduler.check()
        assert scheduler.live() == []
        assert blocks.num_free + blocks.num_evictable == blocks.num_blocks, "a block is used after the last request"

    def sent(self, name: str) -> list[PrefillEffect]:
        return self.scheduler.sent(self.key(name), is_whole=True)

    def contents(self, blocks: tuple[tuple[int, int], ...]) -> dict[int, list[int]]:
        """Grant index -> current cells of the source block."""
        cells = self.engine.pool.buffer.cast("Q")
        return {index: list(cells[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]) for index, block in blocks}

    @staticmethod
    def firsts(effects: list[PrefillEffect]) -> dict[str, int]:
        return {one.key.request_id: one.token.token_id for one in effects if isinstance(one, FirstToken)}

    @staticmethod
    def pushes(effects: list[PrefillEffect], name: str) -> list[BlocksDone]:
        return [one for one in effects if isinstance(one, BlocksDone) and one.key.request_id == name]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(**settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.end()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
