"""The longest time between two tokens of an answer, while prompts arrive."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.cost.latency import CostModel
from pdserve.core.cost.step_rule import LONGEST_GAP
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.interface import RowOut
from pdserve.profiles import load_profile

COST = load_profile("epyc-2-cores.llama-125m.bfloat16").cost
TPOT_S, NOISE = 0.05, 0.1  # a step uses 0.9 of the allowed time, so it may take 1 / 0.9 of what was predicted
REQUESTS = 40


@dataclass
class Answer:
    limit_s: float  # longest allowed gap
    missing: int  # tokens that are not yet sampled
    last_s: float | None = None
    gaps: list[float] = field(default_factory=list)  # as shares of the limit


def run(seed: int, rate_rps: float) -> list[Answer]:
    """Answers to random requests."""
    rng, now_s = random.Random(seed), 0.0
    cost = CostModel(COST)
    scheduler = DecodeScheduler(
        kv=KvCache(BlockAllocator(10_000), 16),
        max_batch=32,
        chunks=ChunkRule(cost, most=512),
        inbox_depth=REQUESTS,
        end_rule=EndRule(eos_token_ids=frozenset(), max_context_tokens=4096),
    )
    arrivals: list[float] = []
    for _ in range(REQUESTS):
        arrivals.append((arrivals[-1] if arrivals else 0.0) + rng.expovariate(rate_rps))
    answers: dict[AttemptKey, Answer] = {}
    while scheduler.has_work or len(answers) < REQUESTS:
        if not scheduler.has_work:
            now_s = max(now_s, arrivals[len(answers)])
        while len(answers) < REQUESTS and arrivals[len(answers)] <= now_s:
            number = len(answers)
            itl_s, max_tokens = rng.choice((None, 0.1, 0.3)), rng.randint(2, 40)
            attempt = Attempt(
                key=AttemptKey(1, f"r{number}", 1),
                prompt_ids=tuple(rng.randrange(1000) for _ in range(rng.randint(1, 900))),
                sampling=Sampling(max_tokens=max_tokens),
                begun_at_s=arrivals[number],
                ttft_s=0.5,
                tpot_s=TPOT_S,
                itl_s=itl_s,
            )
            answers[attempt.key] = Answer(LONGEST_GAP * TPOT_S if itl_s is None else itl_s, max_tokens)
            scheduler.offer(attempt, is_local=True, now_s=now_s)
        step, _ = scheduler.plan(now_s)
        now_s += step.account.predicted_s(cost) * rng.uniform(1.0 - NOISE, 1.0 + NOISE)
        for row, key in zip(step.rows, step.keys, strict=True):
            answer = answers[key]
            if row.sample is not None:
                if answer.last_s is not None:
                    answer.gaps.append((now_s - answer.last_s) / answer.limit_s)
                answer.last_s = now_s
                answer.missing -= 1
        outs = [RowOut(() if row.sample is None else (TokenOut(token_id=1),)) for row in step.rows]
        scheduler.apply(step, outs, now_s)
    return list(answers.values())


@pytest.mark.parametrize("rate_rps", [1.0, 3.0, 6.0])
def test_gaps_stay_within_their_limits(rate_rps: float) -> None:
    answers = [one for seed in range(20) for one in run(seed, rate_rps)]
    assert [one for one in answers if one.missing] == []
    assert max(gap for one in answers for gap in one.gaps) <= 1.0
