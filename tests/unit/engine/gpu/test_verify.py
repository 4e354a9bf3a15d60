"""Rows with drafts in the graph of several tokens give the eager engine's tokens, for any drafts and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.engine import DoneFlight, GraphFlight
from pdserve.engine.gpu.kernels.fixed_shapes import buckets_for, verified_tokens
from pdserve.engine.interface import PENDING, Row, RowOut
from tests.support.slow import slow_except
from tests.unit.engine.conftest import Request
from tests.unit.engine.gpu.test_few_rows import ALL
from tests.unit.engine.gpu.test_resample import GRAMMAR, RIVALS, SEEDED, EveryThird, Text, assert_same, texts_of

GREEDY_4 = Sampling(temperature=0.0, max_tokens=4)
KINDS: tuple[dict[str, Any], ...] = (
    {"logprobs": 0},
    {**SEEDED, "top_k": 40, "top_p": 0.9},
    {"grammar": GRAMMAR, "logprobs": 2, **SEEDED},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.2, **RIVALS},
    {"min_tokens": 5, "stop_token_ids": tuple(range(3, 67)), **SEEDED},
)


def take(texts: Sequence[Text], outs: Sequence[RowOut]) -> None:
    for text, out in zip(texts, outs, strict=True):
        assert out.failed is None
        text.outs += out.sampled
        text.tokens += [token.token_id for token in out.sampled]


def drafted(text: Text, drafts: Sequence[int]) -> Row:
    return replace(text.row(), drafts=list(drafts))


@pytest.mark.parametrize("most_steps", slow_except([2, 5], 2))
def test_drafts_give_the_eager_engines_tokens(make_pair: Callable[..., Any], most_steps: int) -> None:
    eager, graph = make_pair("llama", most_rows=6, grammars=EveryThird(), most_tokens=16)
    truth = texts_of(eager, KINDS)
    for _ in range(6):
        take(truth, eager.step([text.row() for text in truth]))
    ours = texts_of(graph, KINDS)
    num_steps = num_accepted = 0
    while (going := [text for text in ours if len(text.outs) < 5]) and num_steps < most_steps:
        rows = []
        for text in going:
            number = ours.index(text)
            right = truth[number].tokens[len(text.tokens) :]
            drafts = right[: (number + num_steps) % 4]
            if drafts and (number + num_steps) % 3 == 0:
                drafts[-1] = (drafts[-1] + 1) % 384
            rows.append(drafted(text, drafts))
        before = sum(len(text.outs) for text in going)
        flight = graph.launch(rows, None)
        assert isinstance(flight, GraphFlight)
        take(going, flight.wait())
        num_accepted += sum(len(text.outs) for text in going) - before - len(going)
        num_steps += 1
    assert num_accepted > len(KINDS)
    for mine, other in zip(ours, truth, strict=True):
        other.tokens = other.tokens[: len(mine.tokens)]
        other.outs = other.outs[: len(mine.outs)]
        assert_same(mine, other)


@pytest.mark.parametrize("switches", slow_except(["", ALL], ALL))
def test_drafts_with_prompts_in_the_same_step(
    switches: str, make_pair: Callable[..., Any], serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", switches)
    eager, graph = make_pair("gemma2", most_tokens=12)

    def requests() -> list[Request]:
        return [
            Request(prompt=[3 + 31 * one + at for at in range(length)], sampling=GREEDY_4, arrival=one)
            for one, length in enumerate((5, 19, 9))
        ]

    expected = serve(eager, requests(), chunk=8)
    right = {31 * one + 3: text for one, text in enumerate(expected)}

    def guess(one: Request) -> list[int]:
        return right[one.prompt[0]][len(one.outs) :][:2]

    assert serve(graph, requests(), chunk=8, guess=guess) == expected


def test_steps_beyond_the_largest_bucket_are_eager(make_pair: Callable[..., Any]) -> None:
    eager, graph = make_pair("llama", most_rows=3, most_tokens=4)
    ours, theirs = texts_of(graph, [{}, {}, {}]), texts_of(eager, [{}, {}, {}])
    guesses = ([9, 9], [7, 7], [])
    flight = graph.launch([drafted(text, each) for text, each in zip(ours, guesses, strict=True)], None)
    assert isinstance(flight, DoneFlight)
    take(ours, flight.wait())
    take(theirs, eager.step([drafted(text, each) for text, each in zip(theirs, guesses, strict=True)]))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    flight = graph.launch([drafted(ours[0], [5])], None)
    assert isinstance(flight, GraphFlight)
    tokens = ours[0].tokens
    follower = Row(tokens=(PENDING,), start=len(tokens), blocks=ours[0].blocks, sample=Sampling(), follows=0)
    with pytest.raises(InternalError, match="follows"):
        graph.launch([follower], flight)
    take(ours[:1], flight.wait())


def test_buckets_of_tokens_hold_every_row_and_are_bounded() -> None:
    assert verified_tokens(64, 8) == 512
    assert verified_tokens(4, 16) == 64
    assert verified_tokens(600, 2) == 600
    assert buckets_for(verified_tokens(2, 2)) == (1, 2, 4)
