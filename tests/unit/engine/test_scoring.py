"""A prompt's logprobs equal those of transformers, for any chunks and batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.core.types import Sampling, TokenOut
from pdserve.engine import torch_engine
from pdserve.engine.interface import Engine, Row
from pdserve.engine.torch_engine import score
from tests.oracle import Oracle


@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_scores_match_transformers(
    chunk: int,
    tiny: Callable[[str], Path],
    open_either: Callable[..., Engine],
    make_prompt: Callable[..., list[int]],
    oracle_of: Callable[[Path], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second row decodes in the same steps. The vocabulary is projected for a few positions at a time."""
    folder = tiny("llama")
    engine, prompt, other = open_either(folder), make_prompt(40), make_prompt(5, seed=3)
    monkeypatch.setattr(torch_engine, "MAX_LOGITS", 3 * engine.spec.vocab_size)
    blocks, scored, sampled = [3, 1, 2], list[TokenOut](), list[TokenOut]()
    greedy = Sampling(temperature=0.0)
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        end = start + len(tokens)
        is_last = end == len(prompt)
        row = Row(
            tokens=tokens,
            start=start,
            blocks=blocks,
            targets=prompt[start + 1 : end + 1],
            num_top=3,
            sample=greedy if is_last else None,
            history=prompt if is_last else (),
            prompt_len=len(prompt),
        )
        beside = Row(
            tokens=other[-1:] if start else other,
            start=len(other) - 1 if start else 0,
            blocks=[0],
            sample=greedy,
            history=other,
            prompt_len=5,
        )
        mine, theirs = engine.step([row, beside])
        scored += mine.scored
        sampled += mine.sampled
        assert theirs.scored == ()
        other = [*other, theirs.sampled[0].token_id] if len(other) < 16 else other
    assert [one.token_id for one in scored] == prompt[1:]
    assert all(one.logprob is not None and len(one.top) == 3 for one in scored)
    oracle = oracle_of(folder)
    oracle.assert_logprobs(prompt[:-1], 0, scored)
    oracle.assert_exact([prompt], [[one.token_id for one in sampled]])


def test_few_positions_are_projected_at_once() -> None:
    sizes: list[int] = []

    def project(x_TE: Tensor) -> Tensor:
        sizes.append(len(x_TE))
        return x_TE @ torch.ones(4, 2**20)

    assert len(score(project, torch.randn(40, 4), range(33), 0, 2**20)) == 33
    assert sizes == [16, 16, 1]


def test_targets_are_checked_before_anything_is_written(
    tiny: Callable[[str], Path], open_either: Callable[..., Engine]
) -> None:
    engine = open_either(tiny("llama"))
    for targets in ([1, 2, 3], [engine.spec.vocab_size]):
        with pytest.raises(InternalError):
            engine.step([Row(tokens=[1, 2], start=0, blocks=[0], targets=targets)])
