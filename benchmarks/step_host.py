"""Measures the host's time of a decode step on a GPU worker, without a GPU: everything except the launches.

    python -m benchmarks.step_host [--rows 128 256] [--context 1024] [--steps 200] [--grammars all]

A decode program and its graph engine run as in a worker, asynchronously where rows allow it: planning, block tables,
inputs, grammar masks, reading sampled tokens, messages to the router. The vocabulary has 128,256 tokens.

Stubs replace the graph's replay, which only returns tokens; prompts, which no model reads; and for rows with grammars,
the copy of their logits, the mask kernel and the sampler. The time to choose a token for those rows is subtracted.
Device memory is host memory, so a copy to the device is a plain copy, and no event is recorded.

gRPC's thread, which sends the messages, is not part of a step; `bytes` is its time to serialise them. A step's time is
wall time, because several threads compute masks; `cpu` is the CPU time of all threads. On a busy machine, the minimum
is the most meaningful figure. `llguidance` is the time inside that library, which advances matchers and writes masks in
several threads; the rest of a step with grammars is our own code.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch

from decode_worker.program import DecodeProgram
from pdserve.config import WorkerConfig
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.gpu import resample
from pdserve.engine.gpu.engine import GraphEngine
from pdserve.engine.gpu.graphs import StaticDecode
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for
from pdserve.engine.interface import Row, RowOut
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.sampling import grammars
from pdserve.text.tokenizer import load_tokenizer
from pdserve.v1 import worker_pb2
from pdserve.wire.convert import sampling_to_proto
from pdserve.worker.context import ProgramContext, parts_of, with_defaults

BUNDLED: Final = next((Path(__file__).parents[1] / "pdserve/models").glob("stdlib-*"))
LARGE: Final = 128_256  # tokens of the vocabulary
EOS: Final = 0
SESSION: Final = 1
SECRET: Final = "0" * 64
BLOCK_SIZE: Final = 16
CONTEXT_LIMIT: Final = 2048  # of the bundled model
TRIED: Final = 64  # random tokens, before all tokens are checked
SCHEMA: Final = (
    '{"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}}, "required": ["words"]}'
)


class Spent(NamedTuple):
    """Elapsed seconds, and CPU seconds of all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @classmethod
    def begin(cls) -> Spent:
        """Reads the clock last, and `end` reads it first, because reading CPU time takes up to 0.25 ms while threads
        run."""
        cpu_s = time.process_time()
        return cls(time.perf_counter(), cpu_s)

    @classmethod
    def end(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


class TimedThreads:
    """llguidance's threads, and the seconds that were spent in them."""

    def __init__(self, threads: Any) -> None:
        self._threads = threads
        self.spent_s = 0.0

    def consume_token_par(self, steps: Any) -> list[bool]:
        began_s = time.perf_counter()
        allowed: list[bool] = self._threads.consume_token_par(steps)
        self.spent_s += time.perf_counter() - began_s
        return allowed

    def unsafe_compute_mask_ptr(self, *given: Any) -> None:
        began_s = time.perf_counter()
        self._threads.unsafe_compute_mask_ptr(*given)
        self.spent_s += time.perf_counter() - began_s


class Stubs:
    """Replaces the device: draws an allowed token for each row. `spent_s` is the time that this takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.spent = Spent()
        self.words_RW: Any = None
        rng = random.Random(3)
        closes = (token for token in range(LARGE) if "]" in tokenizer.decode([token]) or token == EOS)
        self._goes_on = np.ones(LARGE, bool)
        self._goes_on[list(closes)] = False
        order = list(range(LARGE))
        rng.shuffle(order)
        self._order = np.array(order)
        self._turn = 0

    shape = (0, LARGE)  # of the logits
    most_parts = 1  # of the sampler

    def index_select(self, *_: Any) -> Stubs:
        return self

    def float(self) -> Stubs:
        return self

    def forbid(self, logits: Any, words_RW: torch.Tensor, row_R: torch.Tensor) -> None:
        self.words_RW = words_RW.numpy().view(np.uint8)

    def draw(self, logits: Any, draws: Any, **_: Any) -> tuple[torch.Tensor, None]:
        began = Spent.end()  # here, unlike in a step, the time to read the clocks is included
        sampled = []
        for words in self.words_RW:
            self._turn += 1
            first = self._turn * TRIED % (LARGE - TRIED)
            tried = self._order[first : first + TRIED]  # few, so that the step's data stays in the CPU caches
            those = tried[(words[tried >> 3] >> (tried & 7) & 1).astype(bool) & self._goes_on[tried]]
            if not len(those):
                allowed = np.unpackbits(words, bitorder="little")[:LARGE].astype(bool)
                those = np.flatnonzero(allowed & self._goes_on)
            sampled.append(int(those[self._turn % len(those)]) if len(those) else EOS)
        self.spent = Spent.begin() - began
        return torch.tensor(sampled), None


class NoLaunch:
    """Replays that draw tokens with the frequencies of real text: few tokens often, many rarely. None ends the text."""

    def __init__(self, decode: StaticDecode, most_rows: int) -> None:
        self.buckets = buckets_for(most_rows)
        self._decode = decode
        self._turn = 0
        share_N = 1.0 / torch.arange(1.0, 20_001.0)
        self._tokens = 7 + torch.multinomial(
            share_N, 1 << 16, replacement=True, generator=torch.Generator().manual_seed(1)
        )

    def replay(self, bucket: int) -> None:
        self._turn = (self._turn + bucket) % (len(self._tokens) - bucket)
        self._decode.sampled_B[:bucket] = self._tokens[self._turn : self._turn + bucket]


class NoPrompts:
    """Replaces the eager engine's step."""

    def __init__(self, tokenizer: Any) -> None:
        self._opening = tokenizer.encode('{"')[0]  # a document begins with it

    def __call__(self, rows: Sequence[Row], on_layer: Any = None) -> list[RowOut]:
        return [self._out(row) for row in rows]

    def _out(self, row: Row) -> RowOut:
        if row.sample is None:
            return RowOut()
        token = 7 if row.sample.grammar is None else self._opening
        return RowOut((TokenOut(token_id=token, logprob=None),))


@contextmanager
def opened(folder: Path, most_rows: int, num_blocks: int) -> Iterator[tuple[DecodeProgram, Stubs]]:
    config = WorkerConfig(
        model=str(folder),
        worker_id="w",
        cluster_secret=SECRET,
        load="dummy",
        threads=1,
        block_size=BLOCK_SIZE,
        kv_dtype="int8",
        kv_blocks=num_blocks,
        max_batch=most_rows,
        max_batch_tokens=2048,
        inbox_depth=most_rows,
        speculation="off",
        profile="h100-sxm.llama-3.1-8b.bf16",
    )
    tokenizer = load_tokenizer(str(folder))
    stubs = Stubs(tokenizer)
    with mock.patch.object(resample.Resampler, "warm"), mock.patch.object(resample, "forbid_tokens", stubs.forbid):
        eager = open_torch_engine(config)
        eager.step = NoPrompts(tokenizer)  # type: ignore[method-assign]
        decode = StaticDecode(
            eager.model,
            eager.pool,
            most_rows=most_rows,
            max_context_tokens=eager.spec.max_context_tokens,
            vocab_size=LARGE,
            num_processors=132,
        )
        engine = GraphEngine(eager, decode, NoLaunch(decode, most_rows))
        engine._resampler._decode = SimpleNamespace(  # type: ignore[assignment]
            logits_BV=stubs, inputs=decode.inputs, sampler=stubs, sampled_B=decode.sampled_B, logprob_B=decode.logprob_B
        )
        context = ProgramContext(
            config=config,
            role=Role.DECODE,
            incarnation="i",
            endpoint="here",
            post=lambda call: None,
        )
        receiver: Any = SimpleNamespace(is_healthy=True, close=lambda: None)
        context = with_defaults(context, engine)
        program = DecodeProgram(context, parts_of(context, engine, None, ExitStack()), receiver, lambda server: None)
        program.attached(SESSION, worker_pb2.RouterHello())
        yield program, stubs


def large_folder(folder: Path) -> Path:
    """The bundled model's folder, without weights, with LARGE tokens: pairs of its own added."""
    config = json.loads((BUNDLED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": LARGE}))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED / name, folder)
    text = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocab, merges = text["model"]["vocab"], text["model"]["merges"]
    first = [token for token, token_id in sorted(vocab.items(), key=lambda item: item[1]) if token_id > 0][-380:]
    pairs = ((left, right) for left in first for right in first if left + right not in vocab)
    while len(vocab) < LARGE:
        left, right = next(pairs)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


def reserve(number: int, context: int, max_tokens: int, grammar: Grammar | None) -> worker_pb2.AttachRequest:
    # Prompts differ from their first token on, so that no prefix is cached.
    prompt = [1000 + number, *(2 + at % 900 for at in range(context - 1))]
    sampling = Sampling(
        temperature=0.8, top_p=0.95, seed=number, max_tokens=max_tokens, ignore_eos=True, grammar=grammar
    )
    sequence = worker_pb2.Sequence(
        request_id=f"request-{number}", attempt=1, prompt_token_ids=prompt, sampling=sampling_to_proto(sampling)
    )
    return worker_pb2.AttachRequest(reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))


@contextmanager
def running(folder: Path, rows: int, context: int, with_grammar: int) -> Iterator[tuple[Any, Stubs]]:
    """A program in which all rows decode."""
    num_blocks = rows * (CONTEXT_LIMIT // BLOCK_SIZE)
    with opened(folder, rows, num_blocks) as (program, stubs):
        for number in range(rows):
            grammar = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA) if number < with_grammar else None
            program.handle(SESSION, reserve(number, context, CONTEXT_LIMIT - context, grammar))
        while (
            any(each.remaining > 1 for each in program.scheduler.sequences.running)
            or program.scheduler.sequences.waiting
        ):
            assert program.step()
        yield program, stubs


class Measured(NamedTuple):
    """Measurements of each step."""

    took: list[Spent]
    library_s: list[float]
    bytes_s: list[float]  # time to serialise its messages


def measure(folder: Path, rows: int, context: int, steps: int, with_grammar: int) -> Measured:
    with running(folder, rows, context, with_grammar) as (program, stubs):
        program.take_messages()
        gc.collect()
        gc.freeze()  # like a worker after its start
        threads = program.engine._eager.grammars._executor = TimedThreads(grammars.make_threads())
        measured = Measured([], [], [])
        for number in range(20 + steps):
            stubs.spent, library_s, began = Spent(), threads.spent_s, Spent.begin()
            program.is_between_steps = True
            assert program.step()
            program.tick()
            program.take_changes()
            sent = program.take_messages()
            ended = Spent.end()
            for _, message in sent:
                message.SerializeToString()
            if number >= 20:
                measured.took.append(ended - began - stubs.spent)
                measured.library_s.append(threads.spent_s - library_s)
                measured.bytes_s.append(time.perf_counter() - ended.wall_s)
        assert len(program.scheduler.sequences.running) == rows, "a text has ended"
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--grammars", type=int, nargs="+", default=[0, 16, 10_000], help="rows that have one, at most")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows | with grammars | ms a step, least | median | 90 % | llguidance, least | cpu, least | bytes ms |")
    print("|---" * 8 + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = large_folder(Path(name))
        for rows in arguments.rows:
            for with_grammar in sorted({min(rows, one) for one in arguments.grammars}):
                measured = measure(folder, rows, arguments.context, arguments.steps, with_grammar)
                took_s = [each.wall_s for each in measured.took]
                shown_s = (
                    min(took_s),
                    statistics.median(took_s),
                    statistics.quantiles(took_s, n=10)[-1],
                    min(measured.library_s),
                    min(each.cpu_s for each in measured.took),
                    min(measured.bytes_s),
                )
                times = " | ".join(f"{each * 1e3:.2f}" for each in shown_s)
                print(f"| {rows} | {with_grammar} | {times} |", flush=True)


if __name__ == "__main__":
    main()
