"""The graph engine samples the eager engine's tokens: alone, with prompts, and with asynchronous scheduling."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.engine import DoneFlight, GraphFlight, is_graph_row
from pdserve.engine.interface import NEW_ROW, PENDING, ContinuedRows, Engine, Flight, Row
from pdserve.engine.load import build_engine
from tests.support.slow import slow_except
from tests.unit.engine.conftest import GREEDY, Request
from tests.unit.engine.gpu.conftest import MAX_ROWS

SEEDED = Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=2**64 - 3, max_tokens=8)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.3, max_tokens=5)


def requests() -> list[Request]:
    samplings = (GREEDY, SEEDED, PENALISED, SEEDED)
    made = []
    for index, (length, sampling) in enumerate(zip((5, 19, 9, 1), samplings, strict=True)):
        prompt = [3 + (index * 31 + at * 7) % 380 for at in range(length)]
        limited = Sampling(**{name: getattr(sampling, name) for name in KEPT} | {"max_tokens": 6})
        made.append(Request(prompt=prompt, sampling=limited, arrival=index))
    return made


KEPT = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")


@pytest.mark.parametrize("name", slow_except(["qwen3", "gemma2"], "gemma2"))
def test_tokens_match_the_eager_engine(
    name: str, make_pair: Callable[..., Any], serve: Callable[..., list[list[int]]]
) -> None:
    eager, graph = make_pair(name)
    assert serve(graph, requests(), chunk=8) == serve(eager, requests(), chunk=8)


@pytest.mark.gpu_checks
@pytest.mark.parametrize("name", slow_except(["llama", "qwen3"], "llama"))
def test_heads_first_blocks_of_64_give_the_same_tokens(
    name: str,
    make_pair: Callable[..., Any],
    serve: Callable[..., list[list[int]]],
    open_engine: Callable[..., Engine],
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, chunks and graphs over the other layout, all by the GPU's kernels, against the CPU engine."""
    prompts = requests()
    prompts[0].prompt.extend(3 + (5 * at) % 380 for at in range(80))  # more than a block
    plain = open_engine(tiny(name), kv_blocks=64, max_context_tokens=128)
    expected = serve(plain, copy.deepcopy(prompts), chunk=24)
    monkeypatch.setenv("PDSERVE_GPU", "layout=heads")
    monkeypatch.setattr(build_engine, "is_triton", lambda device: True)
    facts = SimpleNamespace(multi_processor_count=4, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    _, graph = make_pair(name, block_size=64)
    shape = graph.pool.shape
    assert (shape.heads_first, shape.block_size, graph.spec.layout) == (True, 64, "block-major-heads.v1")
    assert plain.spec.layout == "block-major.v1"
    assert serve(graph, prompts, chunk=24) == expected


def prefill(engine: Engine, prompt: list[int], blocks: list[int]) -> int:
    row = Row(tokens=prompt, start=0, blocks=blocks, sample=GREEDY, history=prompt, prompt_len=len(prompt))
    return engine.step([row])[0].sampled[0].token_id


def test_an_async_step_uses_tokens_not_yet_read(make_pair: Callable[..., Any]) -> None:
    """Rows leave and change positions between steps. Each step is launched before the previous one is waited for."""
    eager, graph = make_pair("llama")
    rng = random.Random(1)
    prompts = [[3 + (7 * i + j) % 380 for j in range(4 + 3 * i)] for i in range(MAX_ROWS)]
    blocks = [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(MAX_ROWS)]
    expected, texts = [], []
    for prompt, table in zip(prompts, blocks, strict=True):
        text = [*prompt, prefill(eager, prompt, table)]
        assert prefill(graph, prompt, table) == text[-1]
        texts.append(list(text))
        for _ in range(7):
            row = Row(
                tokens=text[-1:], start=len(text) - 1, blocks=table, sample=GREEDY, history=text, prompt_len=len(prompt)
            )
            text.append(eager.step([row])[0].sampled[0].token_id)
        expected.append(text)

    flight: Flight | None = None
    order: list[int] = []
    flights: list[tuple[Flight, list[int]]] = []
    for step in range(7):
        # Half of the rows leave in the middle. A row that has left does not return.
        chosen = rng.sample(order or range(MAX_ROWS), MAX_ROWS if step < 3 else 2)
        rows = [
            Row(
                tokens=(PENDING,) if flight is not None else texts[which][-1:],
                start=len(prompts[which]) + step,
                blocks=blocks[which],
                sample=GREEDY,
                history=texts[which],
                prompt_len=len(prompts[which]),
                follows=order.index(which) if flight is not None else None,
            )
            for which in chosen
        ]
        before, flight = flight, graph.launch(rows, flight)
        flights.append((flight, chosen))
        assert isinstance(flight, GraphFlight)
        if before is not None:
            read(flights.pop(0), texts)
        order = chosen
    read(flights.pop(), texts)
    for which, text in enumerate(texts):
        assert text == expected[which][: len(text)]
        assert len(text) > len(prompts[which]) + 3


def read(flight: tuple[Flight, list[int]], texts: list[list[int]]) -> None:
    for which, out in zip(flight[1], flight[0].wait(), strict=True):
        texts[which].append(out.sampled[0].token_id)


@pytest.mark.parametrize("is_async", slow_except([True, False], True))
def test_chained_rows_are_read_once(make_pair: Callable[..., Any], is_async: bool) -> None:
    """Rows join, leave and begin blocks. Only rows that continue no other are read. Tokens match the eager engine."""
    eager, graph = make_pair("llama")
    samplings = [GREEDY, SEEDED, Sampling(temperature=0.0, min_tokens=9, max_tokens=30)]
    prompts = [[3 + (7 * i + j) % 380 for j in range(5 + 3 * i)] for i in range(3)]
    tables = [list(range(20 * i, 20 * i + 1)) for i in range(3)]
    expected, texts = [], []
    for prompt, table, sampling in zip(prompts, tables, samplings, strict=True):
        blocks = [*table, *range(table[-1] + 1, table[-1] + 19)]
        text = [*prompt, prefill(eager, prompt, blocks)]
        assert prefill(graph, prompt, blocks) == text[-1]
        texts.append(list(text))
        for _ in range(12):
            row = Row(
                tokens=text[-1:],
                start=len(text) - 1,
                blocks=blocks,
                sample=sampling,
                history=text,
                prompt_len=len(prompt),
            )
            text.append(eager.step([row])[0].sampled[0].token_id)
        expected.append(text)

    num_steps, size = 10, graph.spec.block_size
    members = [
        [0, 1, 2] if 2 <= step < 6 else [0, 2] if step == 6 else [1, 0] if step < 2 else [0]
        for step in range(num_steps)
    ]
    made: list[int] = []
    flights: list[tuple[Flight, list[int]]] = []
    before: list[int] = []
    launched = [len(text) for text in texts]  # The tokens after every launched step has sampled.
    for step, chosen in enumerate(members):
        for which in chosen:
            while len(tables[which]) * size < launched[which]:
                tables[which].append(tables[which][-1] + 1)
        places = [before.index(which) if which in before else NEW_ROW for which in chosen]
        starts = [launched[which] - 1 for which in chosen]

        def make(index: int, chosen: Any = chosen, places: Any = places, starts: Any = starts) -> Row:
            which, is_pending = chosen[index], is_async and places[index] != NEW_ROW
            made.append(which)
            return Row(
                tokens=(PENDING,) if is_pending else texts[which][-1:],
                start=starts[index],
                blocks=tables[which],
                sample=samplings[which],
                history=texts[which],
                prompt_len=len(prompts[which]),
                follows=places[index] if is_pending else None,
            )

        rows = ContinuedRows(make, places, number=step + 1, before=step, is_async=is_async and step > 0)
        flights.append((graph.launch(rows, flights[-1][0] if is_async and flights else None), chosen))
        for which in chosen:
            launched[which] += 1
        before = chosen
        for flight, sampled_of in flights[-2:-1] if is_async else flights[-1:]:
            for which, out in zip(sampled_of, flight.wait(), strict=True):
                texts[which].append(out.sampled[0].token_id)
    if is_async:
        for which, out in zip(members[-1], flights[-1][0].wait(), strict=True):
            texts[which].append(out.sampled[0].token_id)
    for text, full in zip(texts, expected, strict=True):
        assert text == full[: len(text)]
    # The rows of the first step, the row that joins, and the row while it needs more than the graph's sampling.
    assert (made.count(0), made.count(1)) == (1, 1)
    assert 1 <= made.count(2) <= 6


def test_rows_that_continue_an_older_step_are_read_again(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama")
    text, blocks = [5, 6, 7], [0, 1]
    text.append(prefill(eager, text, blocks))
    assert prefill(graph, text[:3], blocks) == text[3]

    def make(index: int) -> Row:
        return Row(tokens=text[-1:], start=len(text) - 1, blocks=blocks, sample=GREEDY, history=text, prompt_len=3)

    for number, before in ((1, 0), (3, 2), (4, 1)):
        expected = eager.step([make(0)])[0].sampled[0].token_id
        rows = ContinuedRows(make, [0 if before else NEW_ROW], number=number, before=before, is_async=False)
        assert graph.step(rows)[0].sampled[0].token_id == expected
        text.append(expected)
    pending = Row(tokens=(PENDING,), start=6, blocks=blocks, sample=GREEDY, history=text, prompt_len=3, follows=0)
    following = ContinuedRows(lambda _: pending, [0], number=5, before=4, is_async=True)
    with pytest.raises(InternalError, match="does not run"):
        graph.launch(following, None)


def test_rows_without_a_graph_are_eager(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama")
    prompt, blocks = [5, 9, 200, 31, 7], [1, 2]
    text = [*prompt, prefill(eager, prompt, blocks)]
    prefill(graph, prompt, blocks)
    drafted = Row(
        tokens=text[-1:],
        start=len(prompt),
        blocks=blocks,
        sample=GREEDY,
        history=text,
        prompt_len=len(prompt),
        drafts=(7, 9),
    )
    assert not is_graph_row(drafted, 2)
    assert is_graph_row(drafted, 4)
    assert isinstance(graph.launch([drafted], None), DoneFlight)
    assert graph.step([drafted]) == eager.step([drafted])


def test_more_rows_than_the_largest_bucket_are_eager(make_pair: Callable[..., Any]) -> None:
    _, graph = make_pair("llama")
    rows = [
        Row(tokens=[7 + i], start=0, blocks=[i], sample=GREEDY, history=[7 + i], prompt_len=1)
        for i in range(MAX_ROWS + 1)
    ]
    assert len(graph.step(rows)) == MAX_ROWS + 1
    assert graph.step([]) == []
    with pytest.raises(InternalError, match="follows"):
        graph.launch([Row(tokens=(PENDING,), start=1, blocks=[0], sample=GREEDY, follows=0)], None)
