"""vLLM's tokens and logprobs, in float32, against transformers in float64, position by position.

Each test runs for every tiny model. The pool's old contents are never read, blocks lie scattered, and rows of prefill
and decode share steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.protocol.plan import views_of
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from tests.models.conftest import with_and_without_drafts
from tests.models.far_oracle import FarOracle
from tests.unit.engine.test_drafts import ASKED

GREEDY = Sampling(temperature=0.0, max_tokens=32)

Serve = Callable[..., list[list[int]]]
MakePrompt = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def _old_contents(engine: Engine) -> None:
    """Every float in the pool is NaN."""
    engine.pool.buffer[:] = b"\xff" * len(engine.pool.buffer)


def test_mixed_batches_match_transformers(
    engine: Engine, oracle: FarOracle, serve: Serve, request_of: Any, make_prompt: MakePrompt
) -> None:
    prompts = [make_prompt(length) for length in (1, 2, 16, 63, 150, 300)]
    requests = [request_of(prompt=prompt, sampling=GREEDY, arrival=3 * at) for at, prompt in enumerate(prompts)]
    got = serve(engine, requests, chunk=48)
    assert [len(tokens) for tokens in got] == [32] * len(prompts)
    oracle.assert_exact(prompts, got)


@pytest.mark.usefixtures("has_equal_logits")
def test_sampling_drafts_and_logprobs_match_transformers(
    engine: Engine, oracle: FarOracle, serve: Serve, request_of: Any, make_prompt: MakePrompt
) -> None:
    """Greedy, seeded and penalised requests share steps, without drafts and with right and wrong ones."""

    def requests() -> list[Any]:
        asked = list(ASKED.values())
        return [
            request_of(prompt=make_prompt(length, seed=at), sampling=asked[at % 4], arrival=2 * at)
            for at, length in enumerate((3, 33, 65, 130))
        ]

    for served in with_and_without_drafts(serve, engine, requests):
        answered = [[out.token_id for out in one.outs] for one in served]
        oracle.assert_exact([one.prompt for one in served], answered, sampling=[one.sampling for one in served])
        for one in served:
            assert all((out.logprob is None) == (one.sampling.logprobs is None) for out in one.outs)
            assert all(len(out.top) == (one.sampling.logprobs or 0) for out in one.outs)
            oracle.assert_logprobs(one.history[:-1], len(one.prompt) - 1, one.outs)


def row_of(history: list[int], start: int, blocks: list[int], prompt_len: int) -> Row:
    return Row(
        tokens=history[start:], start=start, blocks=blocks, sample=GREEDY, history=list(history), prompt_len=prompt_len
    )


def decoded(engine: Engine, history: list[int], start: int, blocks: list[int], prompt_len: int, count: int) -> None:
    """Appends `count` greedy tokens."""
    for _ in range(count):
        [out] = engine.step([row_of(history, start, blocks, prompt_len)])[0].sampled
        start = len(history)
        history.append(out.token_id)


def test_decode_goes_on_from_blocks_that_were_moved_as_bytes(
    engine: Engine, oracle: FarOracle, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(75)
    history = list(prompt)
    source, target = [9, 3, 100, 8, 50, 10, 198], [1, 0, 2, 199, 51, 11, 197]  # of 32 tokens or 16
    decoded(engine, history, 0, source, len(prompt), 1)
    pool, runs = engine.pool.buffer, engine.pool.runs_per_block
    for ours, theirs in zip(source, target, strict=True):
        views = [views_of(pool, [block], engine.spec.block_bytes, (), runs) for block in (ours, theirs)]
        for old, new in zip(*views, strict=True):
            new[:] = old
            old[:] = b"\xff" * len(old)
    decoded(engine, history, len(prompt), target, len(prompt), 31)
    oracle.assert_exact([prompt], [history[len(prompt) :]])


def test_prompts_that_share_blocks_match_transformers(
    engine: Engine, oracle: FarOracle, make_prompt: MakePrompt
) -> None:
    """The second prompt finds the first two blocks of the first, while that one decodes."""
    size = engine.spec.block_size
    first = make_prompt(2 * size + 5)
    second = [*first[: 2 * size], *make_prompt(9, seed=1)]
    one, other = list(first), list(second)
    decoded(engine, one, 0, [5, 6, 7, 8], len(first), 2)
    starts = [len(one) - 1, 2 * size]
    for _ in range(16):
        rows = [
            row_of(one, starts[0], [5, 6, 7, 8], len(first)),
            row_of(other, starts[1], [5, 6, 17, 18], len(second)),
        ]
        starts = [len(one), len(other)]
        outs = engine.step(rows)
        one.append(outs[0].sampled[0].token_id)
        other.append(outs[1].sampled[0].token_id)
    oracle.assert_exact([first, second], [one[len(first) :], other[len(second) :]])


@pytest.mark.usefixtures("has_equal_logits")
def test_scores_of_prompts_match_transformers(engine: Engine, oracle: FarOracle, make_prompt: MakePrompt) -> None:
    prompt = make_prompt(90)
    scored = []
    for start, end in ((0, 40), (40, 90)):
        targets = prompt[start + 1 : end + 1]
        row = Row(tokens=prompt[start:end], start=start, blocks=[4, 2, 3, 8, 0, 1], targets=targets, num_top=5)
        scored += engine.step([row])[0].scored
    assert [one.token_id for one in scored] == prompt[1:]
    oracle.assert_logprobs(prompt[:-1], 0, scored)
