"""Divides the time of a recorded decode step among its kernels and the host's work.

    python -m benchmarks.step_parts --model FOLDER [--dtypes float32,bfloat16,int8,int4] [--batches 1,32]
        [--threads 2] [--rounds 40] [--load dummy]

Each round measures one whole step, then its kernels one by one, in their order and with the step's own data, on as
many threads. A kernel alone includes starting its parallel region, which a step does once, so the kernels' sum may
exceed the step. The host's work is the step without the recorded calls: checking, packing, planning, embedding, the
output head and sampling. Every figure is the median over the rounds.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.engine.decode_steps import WARM, DecodeSteps, engines, parse_flags
from benchmarks.engine.report import table
from pdserve.engine.cpu.kernels import task
from pdserve.engine.cpu.kernels.task import KernelProgram, name_of
from pdserve.engine.torch_engine import TorchEngine


def main() -> None:
    flags = parse_flags(__doc__, batches="1,32", rounds=40)
    rows = [["dtype", "rows", "part", "calls", "ms", "share of the step"]]
    for dtype, engine in engines(flags):
        for batch in flags.batches:
            rows += [[dtype, str(batch), *row] for row in measure(engine, batch, flags.rounds)]
    print(table(rows))


def measure(engine: TorchEngine, batch: int, rounds: int) -> list[list[str]]:
    """Rows of a part, its calls in a step, its ms, and its share."""
    rows = DecodeSteps(engine, batch)
    steps: list[float] = []
    recorded: list[float] = []
    parts: defaultdict[str, list[float]] = defaultdict(list)
    counts: dict[str, int] = {}
    with watching() as watched:
        for _ in range(WARM + rounds):
            watched.calls.clear()
            began_s = time.perf_counter()
            rows.step()
            steps.append(time.perf_counter() - began_s - watched.repeated_s)
            if not watched.calls:
                raise SystemExit("this step is not recorded: it also uses operations of torch")
            recorded.append(watched.run_s)
            counts = dict.fromkeys(counts, 0)
            sums: defaultdict[str, float] = defaultdict(float)
            for name, taken_s in watched.calls:
                sums[name] += taken_s
                counts[name] = counts.get(name, 0) + 1
            for name, taken_s in sums.items():
                parts[name].append(taken_s)
    whole_s = statistics.median(steps[WARM:])
    host_s = statistics.median(a - b for a, b in zip(steps[WARM:], recorded[WARM:], strict=True))
    found = {name: (counts[name], statistics.median(taken[WARM:])) for name, taken in parts.items()}
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    named = [("step", "", whole_s), *((name, str(count), s) for name, (count, s) in ordered), ("host", "", host_s)]
    return [[name, count, f"{1e3 * s:.3f}", f"{s / whole_s:.0%}"] for name, count, s in named]


def one_by_one(program: KernelProgram) -> list[tuple[str, float]]:
    """The name of each call's kernel, and its seconds."""
    found = []
    for call in program.calls():
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.address)
        began_s = time.perf_counter()
        if call.is_shared:
            task.run(kernel, call.task)
        else:
            kernel(call.task)
        found.append((name_of(call.address), time.perf_counter() - began_s))
    return found


class Watched:
    """The last step's program: its seconds, those of its repetition, and each call's name and seconds."""

    def __init__(self) -> None:
        self.run_s = self.repeated_s = 0.0
        self.calls: list[tuple[str, float]] = []


@contextmanager
def watching() -> Iterator[Watched]:
    """Repeats every program's calls one by one while its inputs are in memory. The step then samples other tokens."""
    original, watched = KernelProgram.run, Watched()

    def run(program: KernelProgram, *args: Any) -> None:
        began_s = time.perf_counter()
        original(program, *args)
        ended_s = time.perf_counter()
        watched.run_s = ended_s - began_s
        watched.calls = one_by_one(program)
        watched.repeated_s = time.perf_counter() - ended_s

    with mock.patch.object(KernelProgram, "run", run):
        yield watched


if __name__ == "__main__":
    main()
