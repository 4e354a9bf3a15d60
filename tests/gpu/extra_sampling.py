"""Rows with sampling options, and rows with drafts: compares the graphs with the eager engine, in float32.

Two engines over the same weights: one captures (in a rehearsal it runs the same step kernel by kernel), one computes
every step eagerly. Call interpreter.prepare before this import.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pdserve.config import WorkerConfig
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.gpu.engine import GraphEngine, GraphFlight
from pdserve.engine.gpu.graphs import EagerReplays, GraphReplays, StaticDecode
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for, verified_tokens
from pdserve.engine.interface import PENDING, Engine, Flight, Row
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.sampling.grammars import Filled, RowMasks

BLOCK_SIZE: Final = 16
NUM_BLOCKS_EACH: Final = 4
MOST_QUERIES: Final = 4
NEAR: Final = 1e-3  # of logprobs: rounding depends on the size of the batch
#: Tokens with nearly equal logits, so that each sampled and counted token decides which one is next.
RIVALS: Final = {"logit_bias": ((5, 60.0), (9, 59.5), (12, 59.0), (14, 58.5))}
SEEDED: Final = {"temperature": 0.9, "seed": 5}
AHEAD: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"logprobs": 5},
    {"logit_bias": ((5, 9.0), (9, 8.5)), "logprobs": 0, **SEEDED},
    {"min_tokens": 9, "stop_token_ids": tuple(range(3, 67)), **SEEDED},
    {"allowed_token_ids": tuple(range(40, 60)), "top_k": 5, "logprobs": 64, **SEEDED},
    {"repetition_penalty": 1.4, "logprobs": 1, **RIVALS},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6, **RIVALS, **SEEDED},
)
BOUND: Final[tuple[dict[str, Any], ...]] = (
    {"grammar": Grammar(GrammarKind.REGEX, "any"), **SEEDED},
    {"grammar": Grammar(GrammarKind.REGEX, "any"), "frequency_penalty": 0.3, "logprobs": 2, **RIVALS},
    {"bad_token_ids": (*((token,) for token in range(3, 100)), (120, 121)), **SEEDED},
)


class EveryThird:
    """Replaces Grammars, which need a model's tokenizer: the last token decides which two of three are allowed."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)

    def fill(self, row_at: Callable[[int], Row], words_RW: Any, moves: Any = None) -> Filled:
        for index, masks in self.masks_of([row_at(index) for index in range(len(words_RW))]).items():
            words_RW[index].view(np.uint8)[:] = np.frombuffer(masks.masks[0].ljust(4 * self.num_words, b"\0"), np.uint8)
        return Filled([None] * len(words_RW), {})

    def masks_of(self, rows: Sequence[Row]) -> dict[int, RowMasks]:
        bound = {index: row for index, row in enumerate(rows) if row.sample is not None and row.sample.grammar}
        return {index: RowMasks(tuple(self._masks(row))) for index, row in bound.items()}

    def _masks(self, row: Row) -> Iterator[bytes]:
        last = row.history[-1]
        for draft in (*row.drafts, None):
            is_allowed = (np.arange(self._vocab_size) + last) % 3 > 0
            yield np.packbits(is_allowed, bitorder="little").tobytes()
            if draft is None or not is_allowed[draft]:
                return
            last = draft


@dataclass
class Text:
    """One sequence on one engine."""

    number: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)  # engines identify a sequence by this list object and by `blocks`
    blocks: list[int] = field(default_factory=list)
    outs: list[TokenOut] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = 3 + 2 * self.number
        self.tokens += [3 + (31 * self.number + 7 * at) % 380 for at in range(self.num_prompt)]
        self.blocks += range(self.number * NUM_BLOCKS_EACH, (self.number + 1) * NUM_BLOCKS_EACH)

    def row(self, drafts: Sequence[int] = (), follows: int | None = None) -> Row:
        """The sequence's next row. If a running step already has a row of it, the new one follows that row."""
        is_prompt = not self.outs
        return Row(
            tokens=self.tokens if is_prompt else self.tokens[-1:] if follows is None else (PENDING,),
            start=0 if is_prompt else len(self.tokens) - (follows is None),
            blocks=self.blocks,
            sample=self.sampling,
            history=self.tokens,
            prompt_len=self.num_prompt,
            drafts=list(drafts),
            follows=follows,
        )

    def take(self, sampled: Sequence[TokenOut]) -> None:
        self.outs += sampled
        self.tokens += [one.token_id for one in sampled]


def compare(folder: Path, num_steps: int, *, is_rehearsal: bool, quiet: Any) -> tuple[str, str]:
    """Facts (graphs, seconds of capture, rows compared), and the differences that were found. No wait is allowed
    within `quiet()`."""
    plain, bound = (AHEAD[-3:], BOUND[:1]) if is_rehearsal else (AHEAD, BOUND)
    kinds = (*plain, *bound)
    eager = open_engine(folder, len(kinds), is_rehearsal=is_rehearsal)
    inner = open_engine(folder, len(kinds), is_rehearsal=is_rehearsal)
    began_s = time.monotonic()
    graph = with_graphs(inner, len(kinds), is_rehearsal=is_rehearsal)
    captured_s = time.monotonic() - began_s
    # Drafts are taken from the correct texts, so those must be longer.
    truth = texts_of(eager, kinds)
    for _ in range(2 * num_steps):
        take(truth, eager.step([text.row() for text in truth]))
    wrong = differs(truth, asynchronous(graph, kinds, num_steps, quiet), "asynchronous")
    wrong = wrong or differs(truth, drafted(graph, kinds, truth, num_steps, quiet), "with drafts")
    num_graphs = sum(len(buckets_for(most)) for most in (len(kinds), verified_tokens(len(kinds), MOST_QUERIES)))
    return f"{num_graphs} | {captured_s:.1f} | {2 * len(kinds)}", wrong


def open_engine(folder: Path, num_rows: int, *, is_rehearsal: bool) -> Any:
    engine = open_torch_engine(
        WorkerConfig(
            model=str(folder),
            worker_id="check",
            device="cpu" if is_rehearsal else "cuda",
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_blocks=NUM_BLOCKS_EACH * num_rows,
            max_context_tokens=BLOCK_SIZE * NUM_BLOCKS_EACH,
            threads=1,
        )
    )
    engine.grammars = EveryThird(engine.spec.vocab_size)  # type: ignore[assignment]
    return engine


def with_graphs(inner: Any, most_rows: int, *, is_rehearsal: bool) -> GraphEngine:
    most_tokens = verified_tokens(most_rows, MOST_QUERIES)
    decode = StaticDecode(
        inner.model,
        inner.pool,
        most_rows=most_rows,
        max_context_tokens=inner.spec.max_context_tokens,
        vocab_size=inner.spec.vocab_size,
        num_processors=4 if is_rehearsal else torch.cuda.get_device_properties(0).multi_processor_count,
        most_tokens=most_tokens,
        most_queries=MOST_QUERIES,
    )
    make = EagerReplays if is_rehearsal else GraphReplays
    verify = make(decode, buckets_for(most_tokens), num_queries=MOST_QUERIES)
    return GraphEngine(inner, decode, make(decode, buckets_for(most_rows)), verify)


def texts_of(engine: Engine, kinds: Sequence[dict[str, Any]]) -> list[Text]:
    """The texts, each with its first token."""
    given = ({"temperature": 0.0, "max_tokens": 64, **kind} for kind in kinds)
    texts = [Text(number, Sampling(**kind)) for number, kind in enumerate(given)]
    take(texts, engine.step([text.row() for text in texts]))
    return texts


def take(texts: Sequence[Text], outs: Sequence[Any]) -> None:
    for text, out in zip(texts, outs, strict=True):
        text.take(out.sampled)


def asynchronous(graph: GraphEngine, kinds: Sequence[dict[str, Any]], num_steps: int, quiet: Any) -> list[Text]:
    texts = texts_of(graph, kinds)
    flight: Flight | None = None
    for _ in range(num_steps):
        before = flight
        rows = [text.row(follows=None if before is None else index) for index, text in enumerate(texts)]
        flight = launch(graph, rows, before, quiet())
        if before is not None:
            take(texts, before.wait())
        if flight.unsampled:
            with quiet():
                flight.sample({index: texts[index].row() for index in flight.unsampled})
    assert flight is not None
    take(texts, flight.wait())
    return texts


def drafted(
    graph: GraphEngine, kinds: Sequence[dict[str, Any]], truth: Sequence[Text], num_steps: int, quiet: Any
) -> list[Text]:
    """Correct drafts, wrong drafts and none in turn, with every kind of option, including grammars."""
    texts = texts_of(graph, kinds)
    for step in range(num_steps):
        rows = []
        for text, right in zip(texts, truth, strict=True):
            count = (text.number + step) % MOST_QUERIES
            drafts = right.tokens[len(text.tokens) : len(text.tokens) + count] if len(text.outs) <= num_steps else []
            if drafts and (text.number + step) % 3 == 0:
                drafts[-1] = 3 + (drafts[-1] + 1) % 300
            rows.append(text.row(drafts))
        take(texts, launch(graph, rows, None, quiet()).wait())
    return texts


def launch(graph: GraphEngine, rows: list[Row], after: Flight | None, within: AbstractContextManager[None]) -> Flight:
    with within:
        flight = graph.launch(rows, after)
    if not isinstance(flight, GraphFlight):
        raise RuntimeError("a step that a graph should take went the eager way")
    return flight


def differs(truth: Sequence[Text], ours: Sequence[Text], where: str) -> str:
    for right, text in zip(truth, ours, strict=False):
        for at, (mine, other) in enumerate(zip(text.outs, right.outs, strict=False)):
            if mine.token_id != other.token_id:
                return f"{where}: row {text.number} draws {mine.token_id} for {other.token_id} at token {at}"
            pairs = [(mine.logprob, other.logprob)]
            pairs += zip((one for _, one in mine.top), (one for _, one in other.top), strict=False)
            near = (a is b is None or (a is not None and b is not None and abs(a - b) <= NEAR) for a, b in pairs)
            if len(mine.top) != len(other.top) or not all(near):
                return f"{where}: row {text.number} has other logprobs at token {at}"
    return ""
