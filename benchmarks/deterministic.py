"""Measures the cost of deterministic mode: `python -m benchmarks.deterministic [--model FOLDER] [--dtype float32]
[--wall]`.

Two engines with the same weights run in one process, one of them deterministic. Their steps alternate, and the order
changes from round to round. Decode: one step of --batches sequences after prompts of 64 tokens. Prefill: a whole prompt
of --prompts tokens in one step. The figure is the median ratio of deterministic to default, with the lowest and the
highest. It is CPU time of this process with one compute thread, so other work on the machine matters only through
caches; `--wall --threads N` measures wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.engine.child import prompts
from benchmarks.engine.peers import BLOCK_SIZE, step
from pdserve.config import WorkerConfig
from pdserve.engine.interface import Engine
from pdserve.engine.load.build_engine import open_torch_engine

MODEL: Final = Path(__file__).parents[1] / "pdserve" / "models" / "stdlib-5m"
DECODE_PROMPT_TOKENS: Final = 64
STEPS: Final = 8  # of a decode turn


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.deterministic", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=MODEL, metavar="FOLDER")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or int8")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--prompts", type=_numbers, default=[128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall time instead of CPU time")
    flags = parser.parse_args()
    clock = time.perf_counter if flags.wall else time.process_time
    each = DECODE_PROMPT_TOKENS + 2 * BLOCK_SIZE
    num_tokens = max([each * batch for batch in flags.batches] + [tokens + BLOCK_SIZE for tokens in flags.prompts])
    plain, deterministic = (
        open_torch_engine(
            WorkerConfig(
                model=str(flags.model),
                worker_id="bench",
                dtype=flags.dtype,
                deterministic=setting,
                threads=flags.threads,
                block_size=BLOCK_SIZE,
                kv_blocks=-(-num_tokens // BLOCK_SIZE),
            )
        )
        for setting in ("off", "on")
    )
    print(
        f"{flags.model.resolve().name}, {flags.dtype}, {flags.threads} threads, {'wall' if flags.wall else 'CPU'} time"
    )
    print(f"{'point':22} {'default ms':>10}  {'x deterministic':>15}  least..greatest")
    for batch in flags.batches:
        turns = [_decode(engine, batch) for engine in (plain, deterministic)]
        _compare(f"decode, batch {batch}", turns, STEPS, flags.rounds, clock)
    for tokens in flags.prompts:
        if tokens >= plain.spec.max_context_tokens:
            print(f"prefill, {tokens} tokens: left out, the model's limit is {plain.spec.max_context_tokens}")
            continue
        turns = [_prefill(engine, tokens) for engine in (plain, deterministic)]
        _compare(f"prefill, {tokens} tokens", turns, 1, flags.rounds, clock)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _decode(engine: Engine, batch: int) -> Callable[[], None]:
    """Repeats the same steps, which overwrite their own KV."""
    histories = prompts(batch, DECODE_PROMPT_TOKENS, engine.spec.vocab_size, salt=batch)
    step(engine, histories, [0] * batch, DECODE_PROMPT_TOKENS)

    def run() -> None:
        for _ in range(STEPS):
            step(engine, histories, [DECODE_PROMPT_TOKENS - 1] * batch, DECODE_PROMPT_TOKENS)

    return run


def _prefill(engine: Engine, tokens: int) -> Callable[[], None]:
    histories = prompts(1, tokens, engine.spec.vocab_size, salt=tokens)

    def run() -> None:
        step(engine, histories, [0], tokens)

    return run


def _compare(label: str, turns: list[Callable[[], None]], steps: int, rounds: int, clock: Callable[[], float]) -> None:
    took_s: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):  # the first warms up
        for index in (0, 1) if number % 2 else (1, 0):
            began_s = clock()
            turns[index]()
            if number:
                took_s[index].append(clock() - began_s)
    ratios = [with_s / without_s for without_s, with_s in zip(*took_s, strict=True)]
    print(
        f"{label:22} {1e3 * statistics.median(took_s[0]) / steps:10.1f}  {statistics.median(ratios):15.2f}"
        f"  {min(ratios):.2f}..{max(ratios):.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
