"""Measures the cost of planning a decode worker's step: `python -m benchmarks.step_plan [--sequences 64 256]`.

Measures DecodeScheduler.plan and, for a step that is launched before the last one is read, plan_after, in microseconds
of CPU time of one thread. Each sequence has a TPOT target and at least 500 tokens of context. Some of the sequences are
prompts of 500 to 4,000 tokens that wait or are being computed, and a quarter of them can no longer meet their TTFT
target. A prompt that ends is replaced, so the load stays constant. Nothing is computed: every row samples the same
token.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

from decode_worker.planning import ChunkRule
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import DecodeStep
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.cost.latency import CostModel
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.results import nearest_rank
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.interface import RowOut
from pdserve.profiles import load_profile

BLOCK_SIZE: Final = 16
MAX_BATCH_TOKENS: Final = 2048
TOKEN: Final = TokenOut(token_id=1)
OUTPUT_TOKENS: Final = 1_000_000  # no answer ends during the measurement
PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
TTFT_S, TPOT_S = 1.0, 0.05
LATE_SHARE: Final = 0.25
COLUMNS: Final = ("mean", "p50", "p95", "p99")


class Bench:
    def __init__(self, num_sequences: int, num_prompts: int) -> None:
        self.rng = random.Random(0)
        self.now_s = 0.0
        self.num_prompts = num_prompts
        self.num_offered = 0
        cost = CostModel(load_profile(PROFILE).cost)
        self.cost = cost
        self.scheduler = DecodeScheduler(
            kv=KvCache(BlockAllocator(num_sequences * 1000), BLOCK_SIZE),
            max_batch=num_sequences,
            chunks=ChunkRule(cost, most=MAX_BATCH_TOKENS),
            inbox_depth=num_sequences,
            end_rule=EndRule(eos_token_ids=frozenset(), max_context_tokens=1 << 30),
        )
        for _ in range(num_sequences - num_prompts):
            self.offer(OUTPUT_TOKENS)
        while self.scheduler.load().pending_prefill_tokens:
            self.run(self.plan()[0])
        self.refill()

    def offer(self, max_tokens: int) -> None:
        self.num_offered += 1
        waited_s = 2 * TTFT_S if self.num_prompts and self.rng.random() < LATE_SHARE else 0.0
        attempt = Attempt(
            key=AttemptKey(1, f"r{self.num_offered}", 1),
            prompt_ids=tuple(self.rng.randrange(1 << 17) for _ in range(self.rng.randint(500, 4000))),
            sampling=Sampling(max_tokens=max_tokens),
            arrived_s=self.now_s,
            begun_at_s=self.now_s - waited_s,
            ttft_s=TTFT_S,
            tpot_s=TPOT_S,
        )
        self.scheduler.offer(attempt, is_local=True, now_s=self.now_s)

    def refill(self) -> None:
        """Replaces the prompts that have ended. Their answers are one token long."""
        load = self.scheduler.load()
        sequences = self.scheduler.sequences
        pending = load.waiting + sum(each.remaining > 1 for each in sequences.running)
        for _ in range(self.num_prompts - pending):
            self.offer(1)

    def plan(self) -> tuple[DecodeStep, float]:
        """A step, and the seconds that its planning took."""
        began_s = time.thread_time()
        step, _ = self.scheduler.plan(self.now_s)
        return step, time.thread_time() - began_s

    def run(self, step: DecodeStep) -> None:
        self.now_s += step.account.predicted_s(self.cost)
        outs: Sequence[RowOut] = [RowOut((TOKEN,) if row.sample is not None else ()) for row in step.rows]
        self.scheduler.apply(step, outs, self.now_s)

    def times(self, num_steps: int) -> Iterator[float]:
        for _ in range(num_steps):
            step, took_s = self.plan()
            yield took_s
            self.run(step)
            self.refill()

    def times_after(self, num_steps: int) -> Iterator[float]:
        """Of plan_after: the next step is planned while one runs."""
        step, _ = self.plan()
        for _ in range(num_steps):
            self.scheduler.launched(step)
            began_s = time.thread_time()
            following = self.scheduler.plan_after(step)
            yield time.thread_time() - began_s
            self.run(step)
            step = self.plan()[0] if following is None else following


def measure(name: str, times: Iterator[float]) -> None:
    gc.collect()
    gc.disable()
    took_s = sorted(times)
    gc.enable()
    shown = [statistics.fmean(took_s), *(nearest_rank(took_s, share) for share in (0.5, 0.95, 0.99))]
    print(f"{name:<52}" + "".join(f"{1e6 * one:>8.0f}" for one in shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8, 32], help="of the sequences")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; microseconds")
    print(f"{'step':<52}" + "".join(f"{one:>8}" for one in COLUMNS))
    for sequences in options.sequences:
        measure(f"{sequences} sequences, planned while a step runs", Bench(sequences, 0).times_after(options.steps))
        measure(f"{sequences} sequences", Bench(sequences, 0).times(options.steps))
        for prompts in options.prompts:
            bench = Bench(sequences, prompts)
            measure(f"{sequences} sequences, prompts among them: {prompts}", bench.times(options.steps))


if __name__ == "__main__":
    main()
