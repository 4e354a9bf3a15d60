"""Divides a decode step of the engine vllm into the work of the host around it and the computation itself.

    VLLM_PYTHON -m benchmarks.vllm_step --model FOLDER [--batches 1,8,32] [--context 128] [--steps 60] [--eager]
                                       [--threads N] [--dtype NAME] [--cpu]

VLLM_PYTHON is the python of `make vllm-env`; `python -m examples.make_random_model FOLDER --shape 125m` makes a model.
With asynchronous scheduling, the host's parts (rows, prepare, sample) would run while the previous step computes, so
their share is the most that it can save. On a CPU the previous step uses the same cores. On a GPU `logits` contains
the wait for all kernels.

parts: rows (our own: checks, requests, tokens), prepare (vLLM's: its batch, inputs, attention metadata), forward,
logits, sample (our sampler). Each is the median over steps, in milliseconds of wall time or, with --cpu and one
thread, of the thread's CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.engine.child import prompts
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Row
from pdserve.engine.load_engine import load_engine
from pdserve.engine.torch_engine import sample_rows

GREEDY: Final = Sampling(temperature=0.0, max_tokens=4096, ignore_eos=True)
WARM: Final = 10
ENGINE: Final = "pdserve.engine.vllm.engine"
PARTS: Final = ("rows", "prepare", "forward", "logits", "sample")


class Clock:
    """Seconds in each measured call of one step, by the clock `now_s`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.spent: dict[str, float] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began_s = self.now_s()
            try:
                return call(*args, **named)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + self.now_s() - began_s

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    if args.cpu and args.threads != 1:
        parser.error("--cpu needs --threads 1: it measures the thread that computes")
    now_s = time.thread_time if args.cpu else time.perf_counter
    batches = [int(one) for one in args.batches.split(",")]
    config = WorkerConfig(
        model=args.model,
        worker_id="bench",
        engine="vllm",
        dtype=args.dtype,
        threads=args.threads,
        cuda_graphs=not args.eager,
        kv_blocks=max(batches) * (2 + (args.context + WARM + args.steps) // 32),
        max_batch=max(batches),
        max_batch_tokens=max(batches) * args.context,
    )
    engine: Any = load_engine(config, Role.DECODE)
    try:
        print(" ".join(f"{name:>9}" for name in ("batch", *PARTS, "step", "host")))
        for batch in batches:
            report(batch, measured(engine, Clock(now_s), batch, args.context, args.steps))
    finally:
        engine.close()


def measured(engine: Any, clock: Clock, batch: int, context: int, steps: int) -> list[dict[str, float]]:
    """The parts of each step, and the whole of it."""
    runner = engine._runner
    logits = runner.model.compute_logits
    if not engine.pool.is_on_host:
        logits = waited(logits)
    histories = prompts(batch, context, engine.spec.vocab_size, 0)
    size = 1 + (context + WARM + steps) // engine.spec.block_size
    starts, found = [0] * batch, []
    with (
        mock.patch.object(engine._worker, "execute_model", clock.around("execute", engine._worker.execute_model)),
        mock.patch.object(runner, "_model_forward", clock.around("forward", runner._model_forward)),
        mock.patch.object(runner.model, "compute_logits", clock.around("logits", logits)),
        mock.patch(f"{ENGINE}.sample_rows", clock.around("sample", sample_rows)),
    ):
        for _ in range(1 + WARM + steps):
            rows = [row_of(history, starts[at], at * size, size, context) for at, history in enumerate(histories)]
            clock.spent = {}
            began_s = clock.now_s()
            outs = engine.step(rows)
            spent = clock.spent | {"step": clock.now_s() - began_s}
            starts = [len(history) for history in histories]
            for history, out in zip(histories, outs, strict=True):
                history.append(out.sampled[0].token_id)
            spent["prepare"] = spent["execute"] - spent["forward"] - spent["logits"]
            spent["rows"] = spent["step"] - spent["execute"] - spent["sample"]
            found.append(spent)
    return found[1 + WARM :]


def waited(call: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*args: Any) -> Any:
        result = call(*args)
        torch.cuda.synchronize()
        return result

    return wait


def row_of(history: Sequence[int], start: int, first: int, size: int, prompt_len: int) -> Row:
    return Row(
        tokens=history[start:],
        start=start,
        blocks=range(first, first + size),
        sample=GREEDY,
        history=history,
        prompt_len=prompt_len,
    )


def report(batch: int, steps: Sequence[dict[str, float]]) -> None:
    median = {name: statistics.median(step[name] for step in steps) for name in (*PARTS, "step")}
    share = statistics.median((step["rows"] + step["prepare"] + step["sample"]) / step["step"] for step in steps)
    print(f"{batch:9}", *(f"{1e3 * median[name]:9.2f}" for name in (*PARTS, "step")), f"{share:9.1%}")


if __name__ == "__main__":
    main()
