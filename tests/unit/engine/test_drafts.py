"""Drafts change the number of tokens per step, never the tokens: right, wrong and partly right drafts in one batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine import toy
from pdserve.engine.interface import Engine, Row, kept
from pdserve.engine.toy import ToyEngine
from tests.oracle import Oracle
from tests.support.slow import slow_except

EVERY_TIME = ("gemma3", "mixtral-window")  # Windows in some layers; experts.
FAMILIES = [
    "llama",
    "llama-tied-biased",
    "llama-llama3-rope",
    "llama-linear-rope",
    "llama-yarn-rope",
    "mistral-window",
    "qwen2-window-by-layer",
    "qwen3",
    "qwen3-moe",
    "mixtral-window",
    "gemma3",
    "gemma2",
]
ASKED = {
    "greedy": Sampling(temperature=0.0, max_tokens=40),
    "seeded": Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=7, max_tokens=40),
    "penalised": Sampling(
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        min_tokens=30,
        logprobs=3,
        max_tokens=40,
    ),
    "seeded and penalised": Sampling(temperature=1.5, seed=3, frequency_penalty=1.0, logprobs=0, max_tokens=40),
}

Tiny = Callable[[str], Path]
OpenEngine = Callable[..., Engine]
Serve = Callable[..., list[list[int]]]
MakePrompt = Callable[..., list[int]]


class SpoiltDrafts:
    """Drafts from a known answer, some of them wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._answers = answers
        self._random = random.Random(seed)

    def __call__(self, one: Any) -> list[int]:
        answer = self._answers[(*one.prompt, one.sampling.seed)]
        drafts = answer[len(one.outs) :][: self._random.choice([0, 1, 3, 3, 7, 15])]
        if drafts and self._random.random() < 0.5:
            drafts[self._random.randrange(len(drafts))] ^= 1
        return drafts


@pytest.mark.parametrize("name", slow_except(FAMILIES, *EVERY_TIME))
def test_drafts_change_no_token_and_no_logprob(
    name: str,
    tiny: Tiny,
    open_either: OpenEngine,
    serve: Serve,
    oracle_of: Callable[[Path], Oracle],
    request_of: Any,
    make_prompt: MakePrompt,
) -> None:
    engine = open_either(tiny(name))
    engine.pool.buffer[:] = b"\xff" * len(engine.pool.buffer)  # Every float is NaN.

    def requests() -> list[Any]:
        asked = list(ASKED.values())
        return [
            request_of(prompt=make_prompt(length, seed=index), sampling=asked[index % 4], arrival=2 * index)
            for index, length in enumerate((3, 16, 40, 65, 130, 20, 90, 17))
        ]

    plain, guessed = requests(), requests()
    expected = serve(engine, plain, chunk=48)
    answers = {(*one.prompt, one.sampling.seed): tokens for one, tokens in zip(plain, expected, strict=True)}
    num_steps = 0
    step = engine.step

    class Counted:
        spec, pool = engine.spec, engine.pool

        def step(self, rows: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            return step(rows)

    serve(Counted(), guessed, chunk=48, seed=1, guess=SpoiltDrafts(answers, seed=5))
    assert num_steps < 40  # Without drafts it takes 54 steps. The last request arrives at step 14.
    oracle = oracle_of(tiny(name))
    for served in (plain, guessed):
        answered = [[out.token_id for out in one.outs] for one in served]
        assert [len(answer) for answer in answered] == [40] * len(served)
        prompts, sampling = [one.prompt for one in served], [one.sampling for one in served]
        oracle.assert_exact(prompts, answered, sampling=sampling)
        for one in served:
            for out in one.outs:
                assert (out.logprob is None) == (one.sampling.logprobs is None)
                assert len(out.top) == (one.sampling.logprobs or 0)
            oracle.assert_logprobs(one.history[:-1], len(one.prompt) - 1, one.outs)


def test_rejected_drafts_do_not_affect_later_tokens(tiny: Tiny, open_either: OpenEngine) -> None:
    """Drafts extend into a new block. Its tail is finite, and the next step overwrites the rejected drafts."""
    engine = open_either(tiny("llama"))
    engine.pool.buffer[:] = b"\xff" * len(engine.pool.buffer)
    greedy, size = Sampling(temperature=0.0), engine.spec.block_size
    history = [5, 6, 7, 8] * (size // 4)
    engine.step([Row(tokens=history[:-1], start=0, blocks=[4])])
    last = Row(tokens=history[-1:], start=size - 1, blocks=[4], sample=greedy, history=history, prompt_len=size)
    [first] = engine.step([last])[0].sampled
    wrong = [first.token_id ^ 1, 9, 10]
    assert engine.step([replace(last, blocks=[4, 2], drafts=wrong)])[0].sampled == (first,)
    block = torch.frombuffer(engine.pool.buffer, dtype=torch.float32).view(engine.spec.num_blocks, -1)[2]
    assert block.isfinite().all()
    longer = [*history, first.token_id]
    again = Row(tokens=longer[size:], start=size, blocks=[4, 2], sample=greedy, history=longer, prompt_len=size)
    [after] = engine.step([again])[0].sampled
    fresh = open_either(tiny("llama"))
    whole = Row(tokens=longer, start=0, blocks=[0, 1], sample=greedy, history=longer, prompt_len=size)
    assert [after] == list(fresh.step([whole])[0].sampled)


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    sampled = [TokenOut(token_id=token) for token in (1, 2, 3)]
    assert kept(sampled, [1, 2]) == tuple(sampled)
    assert kept(sampled, [1, 9]) == tuple(sampled[:2])
    assert kept(sampled, [9, 2]) == tuple(sampled[:1])
    assert kept(sampled[:1], []) == tuple(sampled[:1])
    assert kept([], []) == ()


@pytest.mark.parametrize("seed", [None, 11])
def test_the_toy_keeps_the_same_rule(seed: int | None) -> None:
    engine = ToyEngine(block_size=4, num_blocks=8)
    prompt = list(b"toy drafts")
    expected = toy.answer(prompt, 5, seed=seed)
    sampling = Sampling(temperature=0.0 if seed is None else 1.0, seed=seed or 0)

    def draw(drafts: list[int]) -> list[int]:
        row = Row(
            tokens=prompt,
            start=0,
            blocks=[3, 1, 6, 2],
            sample=sampling,
            history=prompt,
            prompt_len=len(prompt),
            drafts=drafts,
        )
        return [token.token_id for token in engine.step([row])[0].sampled]

    assert draw(expected[:4]) == expected
    assert draw([*expected[:2], 31, expected[3]]) == expected[:3]
    assert draw([31]) == expected[:1]


@pytest.mark.parametrize(
    ("drafts", "is_asked", "problem"),
    [([1, 2, 3], True, "1 blocks cannot hold 5"), ([257], True, "outside the vocabulary"), ([1], False, "drafts and")],
)
def test_wrong_drafts_are_refused(drafts: list[int], is_asked: bool, problem: str) -> None:
    engine = ToyEngine(block_size=4, num_blocks=8)
    sample = Sampling(temperature=0.0) if is_asked else None
    with pytest.raises(InternalError, match=problem):
        engine.step([Row(tokens=[1, 2], start=0, blocks=[0], sample=sample, history=[1, 2], drafts=drafts)])


def test_a_draft_completes_no_bad_word(
    tiny: Tiny, open_either: OpenEngine, serve: Serve, request_of: Any, make_prompt: MakePrompt
) -> None:
    """The drafts are the tokens of the text without bans, so bad words often end within the drafts."""
    engine, prompt = open_either(tiny("llama")), make_prompt(20)
    for own in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 5}):
        [free] = serve(engine, [request_of(prompt=prompt, sampling=Sampling(max_tokens=40, **own))])
        bad = tuple(tuple(free[at : at + size]) for at, size in ((2, 2), (6, 3), (11, 1), (15, 2), (20, 4), (30, 2)))
        sampling = Sampling(
            max_tokens=40, bad_token_ids=bad, logit_bias=((free[0], -0.5), (free[1], 0.5)), min_tokens=40, **own
        )
        [expected] = serve(engine, [request_of(prompt=prompt, sampling=sampling)])
        assert expected != free
        for text in (expected, free):
            one = request_of(prompt=prompt, sampling=sampling)
            guesses = [text[at : at + 6] for at in range(41)]
            assert serve(engine, [one], guess=lambda one, guesses=guesses: guesses[len(one.outs)]) == [expected]
        for word in bad:
            assert word not in [tuple(expected[at : at + len(word)]) for at in range(40)]
