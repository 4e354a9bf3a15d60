"""Applying many equal steps at once leaves a worker in the same state as applying them one by one."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.cost.latency import CostModel
from pdserve.core.effects import BlocksReserved
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.protocol import TokenRow
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.interface import RowOut
from tests.support.slow import slow_except
from tests.unit.decode_worker.conftest import spread

TOKEN = TokenOut(token_id=7)
BLOCK_SIZE = 4


def make(num_blocks: int, max_batch: int) -> DecodeScheduler:
    return DecodeScheduler(
        kv=KvCache(BlockAllocator(num_blocks), BLOCK_SIZE),
        max_batch=max_batch,
        chunks=ChunkRule(CostModel(), least=4, most=16),
        inbox_depth=6,
        end_rule=EndRule(eos_token_ids=frozenset(), max_context_tokens=num_blocks * BLOCK_SIZE),
    )


def state(scheduler: DecodeScheduler) -> Any:
    """Everything on which a worker's later decisions, messages and cache depend."""
    scheduler.check()
    return (
        asdict(scheduler.load()),
        [(each.key, asdict(replace(each, attempt=None))) for each in scheduler.sequences.by_key.values()],  # type: ignore[arg-type]
        [each.key for each in scheduler.sequences.running],
        [each.key for each in scheduler.sequences.waiting],
        scheduler.blocks.snapshot(),
        scheduler.blocks.take_changes(),
        list(scheduler.blocks._retention.pool),
        scheduler.num_preemptions,
        scheduler.num_changes,
    )


def step_by_step(scheduler: DecodeScheduler, count: int, now_s: float) -> list[Any]:
    effects: list[Any] = []
    for _ in range(count):
        step, before = scheduler.plan(now_s)
        outs = [RowOut(sampled=(TOKEN,)) if each.remaining == share else RowOut() for each, share in step.shares()]
        effects += [*before, *spread(scheduler.apply(step, outs, now_s))]
    return effects


def at_once(scheduler: DecodeScheduler, now_s: float, rng: random.Random) -> tuple[list[Any], int]:
    """One run of a random allowed length, or one step if prompts are prefilled."""
    step, before = scheduler.plan(now_s)
    effects: list[Any] = [*before]
    longest = scheduler.run_length(step)
    count = rng.choice((longest, longest, rng.randint(1, longest))) if longest else 1
    first = {each.key: each.num_output for each in step.decoding}
    outs = [RowOut(sampled=(TOKEN,)) if each.remaining == share else RowOut() for each, share in step.prefilling]
    applied = spread(scheduler.apply_run(step, count, TOKEN, now_s, outs))
    reported = {(one.key, one.output_index) for one in applied if isinstance(one, TokenRow)}
    for key, index in first.items():
        sampled = [TokenRow(key=key, output_index=index + at, tokens=(TOKEN,)) for at in range(count)]
        effects += [one for one in sampled if (key, one.output_index) not in reported]
    effects += applied
    return effects, count


@pytest.mark.parametrize("seed", slow_except(range(60), *range(15)))
def test_a_run_equals_its_steps(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, max_batch = rng.choice(((12, 3), (24, 4), (64, 8)))
    one, other = make(num_blocks, max_batch), make(num_blocks, max_batch)
    now_s, number, num_runs = 0.0, 0, 0
    names: list[AttemptKey] = []
    for _ in range(80):
        for _ in range(rng.choice((0, 0, 1, 2))):  # Both get the same events.
            number += 1
            key = AttemptKey(rng.randint(0, 1), f"r{number}", 1)
            attempt = Attempt(
                key=key,
                prompt_ids=tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 14))),
                output_ids=(7,) * rng.choice((0, 0, 0, 3)),
                sampling=Sampling(max_tokens=rng.randint(4, 20)),
                arrived_s=now_s,
                deadline_at_s=rng.choice((None, None, now_s + 40.0)),
                tpot_s=rng.choice((None, 0.02)),
            )
            is_local = rng.random() < 0.4
            took = [scheduler.offer(attempt, is_local=is_local, now_s=now_s) for scheduler in (one, other)]
            assert took[0] == took[1]
            if isinstance(took[0][0], BlocksReserved):
                names.append(key)
        for key in [name for name in names if rng.random() < 0.5]:
            names.remove(key)
            for scheduler in (one, other):
                scheduler.admit(key, 7, now_s)
                scheduler.received(key, transfer_s=0.1, busy_s=0.1, num_bytes=1, now_s=now_s)
        if other.live() and rng.random() < 0.1:
            gone = rng.choice(other.live())
            assert one.cancel(gone) == other.cancel(gone)
            for scheduler in (one, other):
                scheduler.lost(gone, "cancelled")
        now_s += 1.0
        effects, count = at_once(other, now_s, rng)
        num_runs += count > 1
        # In a run, tokens are ordered by row, and the end of a row comes last. In steps, they are ordered by step.
        assert sorted(map(repr, step_by_step(one, count, now_s))) == sorted(map(repr, effects))
        assert state(one) == state(other)
    assert num_runs > 0
