"""Measures the benefit and cost of speculative decoding: `python -m benchmarks.speculation [--repeats 5] [--model
FOLDER]`.

Two decode batchings run in one process over the same torch engine, one with speculation and one without; they are built
as in the decode program, and their turns alternate. The measured time starts with a sequence's first token and includes
planning, but not the prompt's steps. It is CPU time of this process with one compute thread, so other work on the
machine matters only through shared caches and cores; `--wall` measures wall time.

- editing: one sequence, a file and then the same file with a rename and a new method. The bundled model is too small to
  follow such an instruction. So the engine computes and samples as usual, but each sampled token is replaced by the
  next token of a recorded edit: the time is the engine's, and the text that of a model that can edit.
- own: one sequence, greedy, the same prompt and the bundled model's own text, which soon repeats itself.
- random: temperature 1, random token ids as the prompt, batches of 1 and 16: nothing repeats, so nothing can be gained.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from decode_worker.batching import DecodeBatching
from decode_worker.planning import ChunkRule
from decode_worker.speculation import DraftRule
from pdserve.config import WorkerConfig
from pdserve.core.attempt import Attempt, AttemptKey, EndRule
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.protocol import TokenRow
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.interface import Engine, OnLayer, Row, RowOut, kept
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory.plan import with_device_defaults
from pdserve.worker.calibrate import measure_cost

MODEL = Path(__file__).parents[1] / "pdserve" / "models" / "stdlib-5m"
BARS = {"editing": 1.5, "own": 1.0, "random": 0.97}
FILE = '''
def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def merge_sort(items):
    """Return a new sorted list with the given items."""
    if len(items) <= 1:
        return list(items)
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    return merge(left, right)


class Counter:
    def __init__(self, name, start=0):
        self.name = name
        self.value = start

    def increment(self, amount=1):
        self.value += amount
        return self.value

    def reset(self):
        self.value = 0
'''
EDIT = (
    FILE.replace("result", "merged").replace("Counter", "Tally")
    + """
    def decrement(self, amount=1):
        self.value -= amount
        return self.value
"""
)


@dataclass(slots=True)
class Run:
    tokens: list[list[int]]
    seconds: float
    steps: int
    drafts: int
    accepted: int


class Replay:
    """An engine that computes and draws, and then says what is written down. For one sequence at a time."""

    def __init__(self, engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> None:
        self.spec, self.pool, self.close = engine.spec, engine.pool, engine.close
        self._engine = engine
        self._whole = [*prompt, *text]

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        self._engine.step(rows, on_layer)
        outs = []
        for row in rows:
            first = row.start + len(row.tokens)
            said = [TokenOut(token_id=token) for token in self._whole[first : first + row.num_samples]]
            outs.append(RowOut(kept(said, row.drafts)))
        return outs


class SpeculatingWorker:
    def __init__(self, engine: Engine, prior: CostPrior, *, is_speculating: bool) -> None:
        config = with_device_defaults(WorkerConfig(model="-", worker_id="-"), Role.DECODE, is_gpu=False)
        self.chunks = ChunkRule(CostModel(prior), most=config.max_batch_tokens)
        self.drafting = DraftRule(prior, most=config.max_drafts, most_together=config.max_batch_tokens)
        self.num_requests = 0
        self.batching = DecodeBatching(
            kv=KvCache(BlockAllocator(engine.spec.num_blocks), engine.spec.block_size),
            max_batch=config.max_batch,
            chunks=self.chunks,
            inbox_depth=1000,
            end_rule=EndRule(
                eos_token_ids=frozenset(engine.spec.eos_token_ids), max_context_tokens=engine.spec.max_context_tokens
            ),
            drafting=self.drafting if is_speculating else None,
        )

    def serve(
        self, engine: Engine, now_s: Callable[[], float], prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
    ) -> Run:
        batching = self.batching
        run = Run([[] for _ in prompts], 0.0, 0, 0, 0)
        for index, (prompt, asked) in enumerate(zip(prompts, sampling, strict=True)):
            key = AttemptKey(0, str(index), self.num_requests)
            batching.offer(Attempt(key=key, prompt_ids=tuple(prompt), sampling=asked), is_local=True, now_s=0.0)
        self.num_requests += 1
        while batching.has_work:
            began_s = now_s()
            step, _ = batching.plan(0.0)
            planned_s = now_s()
            outs = engine.step(step.rows)
            stepped_s = now_s()
            effects = batching.apply(step, outs, 0.0)
            if step.account.draft_tokens == 0:
                self.chunks.observe(step.account, stepped_s - planned_s)
            if step.account.prefill_tokens == 0:
                self.drafting.observe(step.account, stepped_s - planned_s)
            ended_s = now_s()
            sampled = [one for one in effects if isinstance(one, TokenRow)]
            for one in sampled:
                run.tokens[int(one.key.request_id)].append(one.tokens[0].token_id)
            if step.account.prefill_tokens == 0:
                run.seconds += ended_s - began_s
                run.steps += 1
                run.drafts += step.account.draft_tokens
                run.accepted += sum(map(len, (out.sampled for out in outs))) - len(outs)
        return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--wall", action="store_true", help="wall clock, for a machine that does nothing else")
    arguments = parser.parse_args()
    asked = WorkerConfig(
        model=arguments.model,
        worker_id="bench",
        threads=arguments.threads,
        dtype=arguments.dtype,
        kv_memory_bytes=1 << 28,
    )
    config = with_device_defaults(asked, Role.DECODE, is_gpu=False)
    now_s = time.perf_counter if arguments.wall else time.process_time
    engine = load_engine(config, Role.DECODE)
    prior = measure_cost(engine, Role.DECODE, max_batch=config.max_batch, max_batch_tokens=config.max_batch_tokens)
    workers = [SpeculatingWorker(engine, prior, is_speculating=flag) for flag in (False, True)]
    tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} threads")
    print(
        f"{engine.spec.model} {engine.spec.dtype}, {arguments.tokens} tokens each, {arguments.repeats} turns each, "
        f"{'wall' if arguments.wall else 'CPU'} time\n"
    )
    print("| text | batch | off, tok/s | on, tok/s | ratio (median; least, most) | bar | accepted |")
    print("|---|---:|---:|---:|---|---|---:|")
    prompt = tokenizer.encode(f"# before\n{FILE}\n# after\n").ids
    text = tokenizer.encode(EDIT).ids
    greedy = Sampling(temperature=0.0, max_tokens=len(text), ignore_eos=True)
    report("editing", workers, Replay(engine, prompt, text), [[prompt]], greedy, arguments.repeats, now_s)
    report("own", workers, engine, [[prompt]], replace(greedy, max_tokens=arguments.tokens), arguments.repeats, now_s)
    hot = Sampling(temperature=1.0, max_tokens=arguments.tokens, ignore_eos=True)
    rng = random.Random(0)
    for batch in (1, 16):
        rounds = [[rng.choices(range(3, engine.spec.vocab_size), k=64) for _ in range(batch)] for _ in range(99)]
        report("random", workers, engine, rounds, hot, arguments.repeats, now_s)


def report(
    name: str,
    workers: Sequence[SpeculatingWorker],
    engine: Engine,
    rounds: Sequence[Sequence[Sequence[int]]],
    asked: Sampling,
    repeats: int,
    now_s: Callable[[], float],
) -> None:
    """Turns of both workers over the same prompts and seeds: off, on, on, off. The first turn only warms them."""
    rates: list[tuple[float, float]] = []
    accepted = drafts = 0
    for turn in range(repeats + 1):
        prompts = rounds[turn % len(rounds)]
        seeded = [replace(asked, seed=1000 * turn + index) for index in range(len(prompts))]
        off, on = (worker.serve(engine, now_s, prompts, seeded) for worker in workers)
        on_again, off_again = (worker.serve(engine, now_s, prompts, seeded) for worker in reversed(workers))
        if off.tokens != on.tokens:
            print("! the texts differ: a near tie, or a mistake")
        if turn:
            num_tokens = 2 * sum(map(len, on.tokens))
            rates.append((num_tokens / (off.seconds + off_again.seconds), num_tokens / (on.seconds + on_again.seconds)))
            drafts += on.drafts + on_again.drafts
            accepted += on.accepted + on_again.accepted
    ratios = [on / off for off, on in rates]
    ratio = statistics.median(ratios)
    off_rate, on_rate = (statistics.median(rate) for rate in zip(*rates, strict=True))
    bar = BARS[name]
    verdict = "kept" if ratio >= bar else "MISSED"
    print(
        f"| {name} | {len(rounds[0])} | {off_rate:.0f} | {on_rate:.0f} "
        f"| {ratio:.2f} ({min(ratios):.2f}, {max(ratios):.2f}) | {bar} {verdict} "
        f"| {accepted} of {drafts} |"
    )


if __name__ == "__main__":
    main()
