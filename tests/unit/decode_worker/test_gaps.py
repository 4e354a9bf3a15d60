"""The longest time between two tokens of an answer, while prompts arrive."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.batching import DecodeBatching
from decode_worker.chunking import ChunkRule
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.blocks import BlockAllocator
from pdserve.core.latency import CostModel
from pdserve.core.step_rule import LONGEST_GAP
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.interface import RowOut
from pdserve.profiles import load_profile

COST = load_profile("epyc-2-cores.llama-125m.bfloat16").cost
TPOT_S, NOISE = 0.05, 0.1  # a step uses 0.9 of the allowed time, so it may take 1 / 0.9 of what was predicted
REQUESTS = 40


@dataclass
class Answer:
    limit_s: float  # longest allowed gap
    last_s: float | None = None
    longest_s: float = 0.0


def run(seed: int, rate_rps: float) -> tuple[list[Answer], int]:
    """Answers to random requests, and how many of them ended."""
    rng, now_s = random.Random(seed), 0.0
    cost = CostModel(COST)
    batching = DecodeBatching(
        blocks=BlockAllocator(10_000),
        block_size=16,
        max_batch=32,
        chunks=ChunkRule(cost, most=512),
        inbox_depth=REQUESTS,
        end_rule=EndRule(eos_token_ids=frozenset(), max_context_tokens=4096),
    )
    arrivals: list[float] = []
    for _ in range(REQUESTS):
        arrivals.append((arrivals[-1] if arrivals else 0.0) + rng.expovariate(rate_rps))
    answers: dict[AttemptKey, Answer] = {}
    while batching.has_work or len(answers) < REQUESTS:
        if not batching.has_work:
            now_s = max(now_s, arrivals[len(answers)])
        while len(answers) < REQUESTS and arrivals[len(answers)] <= now_s:
            number = len(answers)
            itl_s = rng.choice((None, 0.1, 0.3))
            attempt = Attempt(
                key=AttemptKey(1, f"r{number}", 1),
                prompt_ids=tuple(rng.randrange(1000) for _ in range(rng.randint(1, 900))),
                sampling=Sampling(max_tokens=rng.randint(2, 40)),
                begun_at_s=arrivals[number],
                ttft_s=0.5,
                tpot_s=TPOT_S,
                itl_s=itl_s,
            )
            answers[attempt.key] = Answer(LONGEST_GAP * TPOT_S if itl_s is None else itl_s)
            batching.offer(attempt, is_local=True, now_s=now_s)
        step, _ = batching.plan(now_s)
        account = step.account
        step_s = cost.step_s(
            account.decode_rows, account.context_tokens, account.prefill_tokens, account.prefill_token_context
        )
        now_s += step_s * rng.uniform(1.0 - NOISE, 1.0 + NOISE)
        for row, key in zip(step.rows, step.keys, strict=True):
            answer = answers[key]
            if row.sample is not None:
                if answer.last_s is not None:
                    answer.longest_s = max(answer.longest_s, now_s - answer.last_s)
                answer.last_s = now_s
        outs = [RowOut(() if row.sample is None else (TokenOut(token_id=1),)) for row in step.rows]
        batching.apply(step, outs, now_s)
    return list(answers.values()), sum(one.last_s is not None for one in answers.values())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from((1.0, 3.0, 6.0)))
def test_no_gap_exceeds_its_limit_and_no_prompt_starves(seed: int, rate_rps: float) -> None:
    answers, num_ended = run(seed, rate_rps)
    assert num_ended == REQUESTS
    assert [one for one in answers if one.longest_s > one.limit_s] == []
