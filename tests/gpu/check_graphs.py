"""Decode steps that were captured as graphs sample the same tokens as uncaptured ones: every bucket, asynchronously.

    python -m tests.gpu.check_graphs [--only llama,stdlib-5m] [--from CASE] [--rehearse]

For each model and dtype, each bucket is tested full and with one row less, with greedy and with seeded rows. Both
engines decode the same prompts, and their tokens and logprobs must be equal, bit for bit. Contexts are short, except
for one model with a few long rows, whose positions are divided among many programs and merged. Each launch runs under
torch.cuda.set_sync_debug_mode("error"), which raises an error if it waits for the device. Rows with sampling options
(grammars, bans, bias, penalties, likeliest tokens) and rows with drafts are compared with the eager engine
(extra_sampling.py).
Exit code 1 if a text differs or a launch waits, 2 without a CUDA device. --rehearse uses a CPU: the captured steps run
kernel by kernel in Triton's interpreter, and are compared with the CPU engine, whose logprobs may differ in their last
bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu.failures import add_flags, cases_of, told
from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.interface import PENDING, AsyncEngine, Flight, Row

BUNDLED: Final = Path(__file__).parent.parent.parent / "pdserve/models/stdlib-5m"
FAMILIES: Final = ("llama", "qwen3", "gemma2", "mistral-window")
SAMPLINGS: Final = (
    Sampling(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0),
    Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=64, ignore_eos=True, logprobs=0),
    Sampling(temperature=1.0, min_p=0.02, seed=11, max_tokens=64, ignore_eos=True, logprobs=0),
)
CASE_S: Final = 90.0  # captures every bucket
Drawn = list[list[tuple[int, float]]]  # of each row


@dataclass(frozen=True)
class Rows:
    most: int
    num_blocks_each: int = 4
    shortest: int = 2  # length of a prompt
    spread: int = 9  # between the shortest and the longest prompt

    def prompt_of(self, vocab_size: int, row: int) -> list[int]:
        length = self.shortest + 211 * row % self.spread
        return [3 + (31 * row + 7 * at) % (vocab_size - 4) for at in range(length)]

    def table_of(self, row: int) -> list[int]:
        return list(range(row * self.num_blocks_each, (row + 1) * self.num_blocks_each))


@dataclass(frozen=True)
class GraphCase:
    """`rows` None: rows with sampling options, and rows with drafts."""

    model: str
    label: str
    dtype: str
    rows: Rows | None

    @property
    def name(self) -> str:
        return f"{self.label} {self.dtype}"


LONG: Final = Rows(most=8, num_blocks_each=128, shortest=300, spread=1500)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    add_flags(parser, "models and dtypes")
    args = parser.parse_args()
    if args.rehearse:
        from tests.gpu.interpreter import prepare

        prepare()
    elif not torch.cuda.is_available():
        print("no CUDA device: nothing was checked (--rehearse runs the script)", file=sys.stderr)
        return 2
    from tests.gpu import extra_sampling
    from tests.unit.engine.conftest import build_tiny

    num_steps = 2 if args.rehearse else 16
    print("| model | dtype | graphs | capture s | rows compared | result |\n|---|---|---|---|---|---|")
    found = graph_cases(is_rehearsal=args.rehearse)
    synchronise = None if args.rehearse else torch.cuda.synchronize
    cases = cases_of(args, [one.name for one in found], synchronise, CASE_S)
    with tempfile.TemporaryDirectory() as parent:
        for one in found:

            def say(line: str, wrong: str, one: GraphCase = one) -> None:
                print(f"| {one.label} | {one.dtype} | {line} | {f'**{wrong}**' if wrong else 'equal'} |", flush=True)

            def check(one: GraphCase = one) -> None:
                folder = BUNDLED if one.model == BUNDLED.name else Path(parent) / one.model
                if not folder.exists():
                    build_tiny(one.model, folder)
                if one.rows is None:
                    line, wrong = extra_sampling.compare(
                        folder,
                        num_steps,
                        is_rehearsal=args.rehearse,
                        quiet=lambda: no_waiting(is_cuda=not args.rehearse),
                    )
                else:
                    line, wrong = compare(folder, one.dtype, one.rows, num_steps, is_rehearsal=args.rehearse)
                cases.num_failed += bool(wrong)
                say(line, wrong)

            cases.run(
                one.name,
                check,
                lambda error, one=one: say("| | ", f"raised {told(one.name, error)}", one),  # type: ignore[misc]
            )
    return int(cases.num_failed > 0)


def graph_cases(*, is_rehearsal: bool) -> list[GraphCase]:
    found: list[GraphCase] = []
    for model in ("llama",) if is_rehearsal else (*FAMILIES, BUNDLED.name):
        is_bundled = model == BUNDLED.name
        rows = Rows(most=2 if is_rehearsal else 256 if is_bundled else 64)
        dtypes = ("float32",) if is_rehearsal else ("float32", "bfloat16")
        found += [GraphCase(model, model, dtype, rows) for dtype in dtypes]
        if is_bundled:
            found += [GraphCase(model, f"{model}, long rows", dtype, LONG) for dtype in ("bfloat16", "fp8")]
        found.append(GraphCase(model, f"{model}, sampling options", "float32", None))
    return found


def compare(folder: Path, dtype: str, rows: Rows, num_steps: int, *, is_rehearsal: bool) -> tuple[str, str]:
    """Facts for the table, and the differences that were found."""
    from decode_worker.steps_in_flight import AsyncStepper
    from pdserve.engine.gpu.engine import GraphEngine
    from pdserve.engine.gpu.graphs import EagerReplays, GraphReplays, StaticDecode
    from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for
    from pdserve.engine.load.build_engine import open_torch_engine

    device = "cpu" if is_rehearsal else "cuda"
    config = WorkerConfig(
        model=str(folder),
        worker_id="check",
        device=device,
        dtype=dtype,
        block_size=16,
        kv_blocks=rows.num_blocks_each * rows.most,
        max_context_tokens=16 * rows.num_blocks_each,
        threads=1,
    )
    engines: list[AsyncEngine] = []
    buckets = buckets_for(rows.most)
    captured_s = 0.0
    for is_captured in (False, True):
        inner = open_torch_engine(config)
        if is_rehearsal and not is_captured:
            engines.append(AsyncStepper(inner))
            continue
        decode = StaticDecode(
            inner.model,
            inner.pool,
            most_rows=rows.most,
            max_context_tokens=inner.spec.max_context_tokens,
            vocab_size=inner.spec.vocab_size,
            num_processors=4 if is_rehearsal else torch.cuda.get_device_properties(0).multi_processor_count,
        )
        began_s = time.monotonic()
        is_graph = is_captured and not is_rehearsal
        engines.append(
            GraphEngine(inner, decode, GraphReplays(decode, buckets) if is_graph else EagerReplays(decode, buckets))
        )
        captured_s = time.monotonic() - began_s
    firsts = [first_tokens(engine, rows) for engine in engines]
    num_compared, wrong = 0, "" if firsts[0] == firsts[1] else "the prompts' own draws differ"
    for bucket in buckets:
        for num_rows in sorted({bucket, max(1, bucket - 1)}):
            eager, captured = (
                texts(engine, rows, first[:num_rows], num_steps, is_cuda=not is_rehearsal)
                for engine, first in zip(engines, firsts, strict=True)
            )
            num_compared += num_rows
            wrong = wrong or differs(eager, captured, 1e-4 if is_rehearsal else 0.0, f"{num_rows} of bucket {bucket}")
    for engine in engines:
        engine.close()
    return f"{len(buckets)} | {captured_s:.1f} | {num_compared}", wrong


def first_tokens(engine: AsyncEngine, rows: Rows) -> list[int]:
    """Prefills every row's prompt. Repeated decoding writes only after it."""
    asked = []
    for row in range(rows.most):
        prompt, sampling = rows.prompt_of(engine.spec.vocab_size, row), SAMPLINGS[row % len(SAMPLINGS)]
        asked.append(
            Row(
                tokens=prompt,
                start=0,
                blocks=rows.table_of(row),
                sample=sampling,
                history=prompt,
                prompt_len=len(prompt),
            )
        )
    return [out.sampled[0].token_id for out in engine.step(asked)]


def texts(engine: AsyncEngine, kind: Rows, firsts: list[int], num_steps: int, *, is_cuda: bool) -> Drawn:
    """What each row samples after its first token, with asynchronous steps."""
    num_rows = len(firsts)
    prompts = [kind.prompt_of(engine.spec.vocab_size, row) for row in range(num_rows)]
    tables = [kind.table_of(row) for row in range(num_rows)]
    samplings = [SAMPLINGS[row % len(SAMPLINGS)] for row in range(num_rows)]
    sampled: Drawn = [[(first, 0.0)] for first in firsts]  # the first token's logprob is not compared
    flight: Flight | None = None
    for step in range(num_steps):
        rows = [
            Row(
                tokens=(sampled[index][0][0],) if flight is None else (PENDING,),
                start=len(prompt) + step,
                blocks=tables[index],
                sample=samplings[index],
                history=[*prompt, *(token for token, _ in sampled[index])],
                prompt_len=len(prompt),
                follows=None if flight is None else index,
            )
            for index, prompt in enumerate(prompts)
        ]
        before = flight
        with no_waiting(is_cuda=is_cuda):
            flight = engine.launch(rows, before)
        if before is not None:
            read(before, sampled)
    if flight is not None:
        read(flight, sampled)
    return sampled


def read(flight: Flight, sampled: Drawn) -> None:
    for index, out in enumerate(flight.wait()):
        logprob = out.sampled[0].logprob
        assert logprob is not None, "every row asks for its logprob"
        sampled[index].append((out.sampled[0].token_id, logprob))


@contextmanager
def no_waiting(*, is_cuda: bool) -> Iterator[None]:
    if is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def differs(eager: Drawn, captured: Drawn, tolerance: float, where: str) -> str:
    for row, (ours, theirs) in enumerate(zip(eager, captured, strict=True)):
        for at, ((token, logprob), (other, other_logprob)) in enumerate(zip(ours, theirs, strict=True)):
            if token != other:
                return f"{where}: row {row} draws {other} for {token} at token {at}"
            if not abs(logprob - other_logprob) <= tolerance:
                return f"{where}: row {row} has logprob {other_logprob} for {logprob} at token {at}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
