"""Measures the cost of structured output: valid documents, compile ms, mask us per token, share of a step.

    python -m benchmarks.structured [--schemas 200] [--rows 8] [--peer]
    python -m benchmarks.structured --every-keyword [--schemas 2000]

The schemas are random and bounded (tests/unit/structured/schemas.py). The bundled model writes the documents at
temperature 0 and 1, and each document is validated. Masks are then timed along those documents, for the bundled
vocabulary of 4,096 tokens and for one of 128,256, which adds pairs of its tokens. The share of a step compares the same
rows with and without their grammars in alternating steps, in CPU time; the larger model has the bundled one's
architecture and dummy weights. `--peer` also times xgrammar on the first 40 schemas, if it can be imported.

With `--every-keyword` the schemas use every keyword and format, and only the documents are counted: those that the
model ended (finish_reason `stop`) must be valid, as jsonschema and strict readers of each format judge them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pdserve.config import WorkerConfig
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Role, Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from pdserve.engine.sampling.grammars import Matchers
from pdserve.structured.compile import Compiler
from pdserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.structured.judge import why_invalid
from tests.unit.structured.schemas import any_schema, schema

BUNDLED = next((Path(__file__).parents[1] / "pdserve/models").glob("stdlib-*"))
LARGE = 128_256
PROMPT = "def config():\n    return "
EOS = 0
BATCH = 20
MOST_TOKENS = 300  # of a document that has no limit of its own
PEER_SCHEMAS = 40  # it takes a second to compile one of them for the larger vocabulary


@dataclass(frozen=True)
class StructuredCase:
    schema: dict[str, Any]
    grammar: Grammar
    max_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--peer", action="store_true", help="time xgrammar beside")
    parser.add_argument("--every-keyword", action="store_true", help="count valid documents alone")
    arguments = parser.parse_args()
    rng = random.Random(2026)
    asked = []
    for _ in range(arguments.schemas):
        one, num_bytes = (any_schema(rng), MOST_TOKENS) if arguments.every_keyword else schema(rng)
        asked.append(StructuredCase(one, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(one)), num_bytes + 1))
    tokenizer, engine = load_tokenizer(str(BUNDLED)), _engine(BUNDLED)
    print("| temperature | schemas | ended documents | of them valid | tokens, mean | seconds |")
    print("|---|---|---|---|---|---|")
    texts: list[str] = []
    for temperature in (0.0, 1.0):
        began_s = time.perf_counter()
        written = [
            one for at in range(0, len(asked), BATCH) for one in _write(engine, tokenizer, asked, at, temperature)
        ]
        spent_s = time.perf_counter() - began_s
        texts = [text for text, _ in written]
        reasons = [
            why_invalid(text, one.schema) for (text, is_whole), one in zip(written, asked, strict=True) if is_whole
        ]
        num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        counts = f"{len(asked)} | {len(reasons)} | {reasons.count('')}"
        print(f"| {temperature:g} | {counts} | {num_tokens / len(texts):.0f} | {spent_s:.1f} |")
        for reason in filter(None, reasons):
            print(reason, file=sys.stderr)
    if arguments.every_keyword:
        return
    print("\n| vocabulary | library | compile and first mask, ms p50 | p99 | each further mask, us p50 | mean | p99 |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        large = large_folder(Path(folder))
        for model, size in ((BUNDLED, tokenizer.vocab_size), (large, LARGE)):
            documents = [load_tokenizer(str(model)).encode(text) for text in texts]
            _print(f"{size} | llguidance", *_ours(Compiler(model, size, (EOS,)), asked, documents))
            if arguments.peer:
                _print(f"{size} | xgrammar", *_theirs(model, size, asked[:PEER_SCHEMAS], documents[:PEER_SCHEMAS]))
        print("\n| vocabulary | rows | step ms, free | with grammars | ratio |\n|---|---|---|---|---|")
        for model, stepping in ((BUNDLED, engine), (large, _engine(large, load="dummy"))):
            tokens = [load_tokenizer(str(model)).encode(text) for text in texts]
            free, bound = _steps(stepping, asked, tokens, arguments.rows)
            ratio = statistics.median(theirs / ours for ours, theirs in zip(free, bound, strict=True))
            times = f"{1e3 * statistics.median(free):.2f} | {1e3 * statistics.median(bound):.2f}"
            print(f"| {stepping.spec.vocab_size} | {arguments.rows} | {times} | {ratio:.3f} |")


def _engine(model: Path, **settings: Any) -> Engine:
    return load_engine(
        WorkerConfig(model=str(model), worker_id="w", kv_blocks=2000, threads=1, **settings), Role.DECODE
    )


def _write(
    engine: Engine, tokenizer: Tokenizer, asked: Sequence[StructuredCase], at: int, temperature: float
) -> list[tuple[str, bool]]:
    """Documents of a batch of schemas, together, and whether each was ended."""
    prompt = tokenizer.encode(PROMPT)
    batch = asked[at : at + BATCH]
    outputs: list[list[int]] = [[] for _ in batch]
    while going := [i for i, one in enumerate(batch) if outputs[i][-1:] != [EOS] and len(outputs[i]) < one.max_tokens]:
        rows = [
            _row(prompt, outputs[i], i, Sampling(temperature=temperature, seed=at + i, grammar=batch[i].grammar))
            for i in going
        ]
        for i, out in zip(going, engine.step(rows), strict=True):
            outputs[i] += [token.token_id for token in out.sampled]
    return [(tokenizer.decode(output), output[-1:] == [EOS]) for output in outputs]


def _row(prompt: Sequence[int], output: Sequence[int], place: int, sampling: Sampling) -> Row:
    history = [*prompt, *output]
    start = len(history) - 1 if output else 0
    blocks = range(64 * place, 64 * place + 64)
    return Row(
        tokens=history[start:], start=start, blocks=blocks, sample=sampling, history=history, prompt_len=len(prompt)
    )


def _ours(
    compiler: Compiler, asked: Sequence[StructuredCase], documents: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Seconds to compile and for the first mask; seconds of each mask after it."""
    compiled, masked = [], []
    for one, document in zip(asked, documents, strict=True):
        matchers = Matchers(compiler)
        compiled.append(_timed(matchers.masks, one.grammar, (), ()))
        for count in range(1, len(document) + 1):
            masked.append(_timed(matchers.masks, one.grammar, tuple(document[:count]), ()))
    return compiled, masked


def _theirs(
    model: Path, size: int, asked: Sequence[StructuredCase], documents: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    import xgrammar  # type: ignore[import-not-found]
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = PreTrainedTokenizerFast(tokenizer_object=Backend.from_file(str(model / "tokenizer.json")))
    info = xgrammar.TokenizerInfo.from_huggingface(backend, vocab_size=size, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, size)
    compiled, masked = [], []
    for one, document in zip(asked, documents, strict=True):
        began_s = time.thread_time()
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(one.grammar.text, any_whitespace=True))
        matcher.fill_next_token_bitmask(mask)
        compiled.append(time.thread_time() - began_s)
        for token in document:
            if not matcher.accept_token(token):
                break
            masked.append(_timed(matcher.fill_next_token_bitmask, mask))
    return compiled, masked


def _timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds of CPU: neighbours on the machine move the clock of short work by a thousandfold."""
    began_s = time.thread_time()
    work(*arguments)
    return time.thread_time() - began_s


def _print(name: str, compiled: list[float], masked: list[float]) -> None:
    compiled, masked = sorted(compiled), sorted(masked)
    p99 = masked[len(masked) * 99 // 100]
    print(
        f"| {name} | {1e3 * statistics.median(compiled):.2f} | {1e3 * compiled[len(compiled) * 99 // 100]:.2f} "
        f"| {1e6 * statistics.median(masked):.0f} | {1e6 * statistics.fmean(masked):.0f} | {1e6 * p99:.0f} |"
    )


def _steps(
    engine: Engine, asked: Sequence[StructuredCase], documents: Sequence[list[int]], num_rows: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps along the longest documents, without and with their grammars; a step can be repeated."""
    longest = sorted(range(len(asked)), key=lambda i: -len(documents[i]))[:num_rows]
    num_steps = min(len(documents[i]) for i in longest)
    free, bound = [], []
    for count in range(num_steps):
        rows = [
            _row(documents[i][:1], documents[i][1:count], place, Sampling(temperature=0.0))
            for place, i in enumerate(longest)
        ]
        # The grammar matches the whole document; its first token replaces the prompt only for the engine.
        constrained = [
            replace(row, sample=Sampling(temperature=0.0, grammar=asked[i].grammar), prompt_len=0)
            for row, i in zip(rows, longest, strict=True)
        ]
        free.append(_timed(engine.step, rows))
        bound.append(_timed(engine.step, constrained))
    return free[2:], bound[2:]


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
