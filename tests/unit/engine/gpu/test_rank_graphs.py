"""Two ranks replay the same asynchronous decode steps: real processes over gloo, kernels interpreted."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.plain_rows import (
    LastBlocks,
    PlainRows,
    Update,
    drafted_words,
    from_words,
    plain_words,
    row_words,
)
from pdserve.engine.interface import NEW_ROW, PENDING, ContinuedRows, Flight, Row
from pdserve.engine.model.collectives import make_store
from pdserve.engine.ranks.leader import ParallelFlight, ParallelGraphEngine
from tests.oracle import Oracle
from tests.unit.engine.conftest import GREEDY
from tests.unit.engine.gpu.graph_rank import MAX_ROWS, SIZE, TIMEOUT_S, open_graph_rank
from tests.unit.engine.gpu.test_graph_engine import requests

pytestmark = pytest.mark.gpu_checks

SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=5, max_tokens=16)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.4, max_tokens=16)
BAD_WORDS = Sampling(temperature=0.0, bad_token_ids=tuple((token,) for token in range(0, 384, 2)), max_tokens=16)
STEPS = 5


class Process:
    """The other rank."""

    rank = 1

    def __init__(self, port: int, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.unit.engine.gpu.graph_rank", "1", str(port), str(folder)]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[4])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None: ...

    def silence(self, timeout_s: float) -> ConfigError:
        raise NotImplementedError

    def end(self) -> None:
        assert self._process.wait(60.0) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.engine.conftest import build_tiny

    return build_tiny("llama", tmp_path_factory.mktemp("ranks") / "llama", num_hidden_layers=2)


@pytest.fixture
def engine(folder: Path) -> Iterator[ParallelGraphEngine]:
    store = make_store(0, SIZE, is_leader=True, timeout_s=TIMEOUT_S)
    other = Process(store.port, folder)
    try:
        ranks, _, graphs = open_graph_rank(folder, 0, store)
        together = ParallelGraphEngine(graphs, ranks, [other])
        yield together
        together.close()
    finally:
        other.kill()


def test_two_ranks_sample_the_same_tokens_as_one(
    engine: ParallelGraphEngine, folder: Path, serve: Callable[..., list[list[int]]]
) -> None:
    """Rows leave and change positions between steps. Rows also follow tokens that were resampled after a step, even if
    the resampling had to wait for the previous token."""
    oracle = Oracle(folder)
    made = [dataclasses.replace(one, sampling=short(one.sampling)) for one in requests()[1:3]]
    tokens = serve(engine, made, chunk=8)  # Prompts together with decode rows.
    oracle.assert_exact([one.prompt for one in made], tokens, sampling=[one.sampling for one in made])

    rng, samplings = random.Random(1), [BAD_WORDS, SEEDED, PENALISED]
    prompts = [[3 + (7 * index + at) % 380 for at in range(4 + 3 * index)] for index in range(MAX_ROWS)]
    blocks = [[4 * index + 20 + at for at in range(4)] for index in range(MAX_ROWS)]
    texts = []
    for prompt, table, sampling in zip(prompts, blocks, samplings, strict=True):
        row = Row(tokens=prompt, start=0, blocks=table, sample=sampling, history=prompt, prompt_len=len(prompt))
        texts.append([*prompt, engine.step([row])[0].sampled[0].token_id])
    flight: Flight | None = None
    flights: list[tuple[Flight, list[int]]] = []
    order = list(range(MAX_ROWS))
    num_late = 0
    for step in range(STEPS):
        chosen = rng.sample(order, MAX_ROWS if step < STEPS - 2 else 2)
        rows = [
            Row(
                tokens=(PENDING,) if flight is not None else texts[which][-1:],
                start=len(prompts[which]) + step,
                blocks=blocks[which],
                sample=samplings[which],
                history=texts[which],
                prompt_len=len(prompts[which]),
                follows=order.index(which) if flight is not None else None,
            )
            for which in chosen
        ]
        places = [order.index(which) if flight is not None else NEW_ROW for which in chosen]
        is_async = flight is not None
        chained = ContinuedRows(rows.__getitem__, places, number=step + 1, before=step, is_async=is_async)
        flight = engine.launch(chained, flight)
        assert isinstance(flight, ParallelFlight)
        flights.append((flight, chosen))
        if len(flights) == 2:
            read(flights.pop(0), texts)
        num_late += len(flight.unsampled)
        if flight.unsampled:
            flight.sample({index: known(rows[index], texts[chosen[index]]) for index in flight.unsampled})
        order = chosen
    read(flights.pop(), texts)
    answers = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert sorted(map(len, answers))[-2:] == [STEPS + 1] * 2
    assert num_late >= STEPS - 1
    oracle.assert_exact(prompts, answers, sampling=samplings)
    with pytest.raises(InternalError, match="follows a step that does not run"):
        engine.launch([Row(tokens=(PENDING,), start=1, blocks=[0], sample=GREEDY, follows=0)], None)
    assert engine.is_healthy, "a row that is refused reaches no rank"


def known(row: Row, text: list[int]) -> Row:
    return dataclasses.replace(row, tokens=text[-1:], follows=None)


def short(sampling: Sampling) -> Sampling:
    return dataclasses.replace(sampling, max_tokens=3)


def read(flight: tuple[Flight, list[int]], texts: list[list[int]]) -> None:
    for which, out in zip(flight[1], flight[0].wait(), strict=True):
        texts[which].append(out.sampled[0].token_id)


def test_parts_of_a_step_survive_encoding() -> None:
    drafts = [(1, 2, 3, 5, 6, 7, 8, 9), ()]
    drafted = [
        Row(tokens=(4,), start=17, blocks=[9, 8, 7, 6], sample=SEEDED, drafts=drafts[0]),
        Row(tokens=(11,), start=7, blocks=[3], sample=GREEDY),
    ]
    part = from_words(drafted_words(drafted, Update([4, 0], [12, 13], [7, 3]), 8), 8)
    assert part.update == Update([4, 0], [12, 13], [7, 3])
    assert [(*one.tokens, one.start, tuple(one.drafts)) for one in part.drafted] == [(4, 17, drafts[0]), (11, 7, ())]
    assert [part.drafted[0].blocks[at // 8] for at in range(17, 26)] == [7] * 7 + [6] * 2
    assert (len(part.drafted[0].blocks), part.drafted[1].blocks[0]) == (4, 3)
    with pytest.raises(IndexError):
        LastBlocks(2, [7, 6])[1]
    names = ("token_B", "follows_B", "seq_slot_B", "start_B", "block_B", "prompt_len_B")
    plain = PlainRows(number=3, tables=[], **{name: np.array([10 * at, -at]) for at, name in enumerate(names, 1)})
    part = from_words(plain_words(plain, Update([9], [5], [6])), 8)
    assert part.plain is not None
    for name in names[:-1]:
        assert getattr(part.plain, name).tolist() == getattr(plain, name).tolist()
    assert (part.update.at, part.update.block) == ([5], [6])
    assert [list(one.blocks) for one in from_words(row_words([Row(tokens=[1, 2], start=0, blocks=[5])]), 8).rows] == [
        [5]
    ]
