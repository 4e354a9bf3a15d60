"""Bans and bias equal transformers' logits processors; if bans leave no token, the weakest ones are dropped."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.sampling.sampler import Draw, is_masked, is_plain, mask, penalise, sample

VOCAB = 40
EOS = 39


def logits(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def masked(sampling: Sampling, history: list[int], prompt_len: int = 0, seed: int = 0) -> Tensor:
    return mask_row(logits(seed), Draw(sampling, history, prompt_len))


def mask_row(logits_V: Tensor, draw: Draw) -> Tensor:
    """Masks a row between two rows that must not change."""
    raw_BV = torch.stack([logits(98), logits_V, logits(99)])
    masked_BV = raw_BV.clone()
    mask(masked_BV, raw_BV, {1: draw}, (EOS,))
    assert torch.equal(masked_BV[::2], raw_BV[::2])
    return masked_BV[1]


def by_transformers(processor: Any, history: list[int], seed: int = 0) -> Tensor:
    scores: Tensor = processor(torch.tensor([history], dtype=torch.int64), logits(seed)[None].clone())[0]
    return scores


def test_bad_words_match_transformers() -> None:
    """Few tokens, so that prefixes occur often. There is no prompt, because transformers would also match it."""
    rng = random.Random(5)
    seen = 0
    for case in range(300):
        words = {tuple(rng.randrange(4) for _ in range(rng.randint(1, 3))) for _ in range(3)}
        history = [rng.randrange(4) for _ in range(rng.randint(1, 6))]
        ours = masked(Sampling(bad_token_ids=tuple(words)), history, seed=case)
        theirs = by_transformers(
            transformers.NoBadWordsLogitsProcessor([list(word) for word in words], EOS), history, case
        )
        assert torch.equal(ours, theirs)
        seen += any(len(word) == 3 and float(ours[word[-1]]) == -math.inf for word in words)
    assert seen > 20


def test_a_bad_word_that_begins_in_the_prompt_is_not_banned() -> None:
    sampling = Sampling(bad_token_ids=((1, 2),))
    assert masked(sampling, [1], prompt_len=1)[2] > -math.inf
    assert masked(sampling, [1], prompt_len=0)[2] == -math.inf


def test_bias_matches_transformers() -> None:
    bias = {3: 7.5, 11: -100.0, 38: 0.25}
    theirs = by_transformers(
        transformers.SequenceBiasLogitsProcessor([[[one], value] for one, value in bias.items()]), [5, 3]
    )
    assert torch.equal(masked(Sampling(logit_bias=tuple(bias.items())), [5, 3]), theirs)


def test_allowed_tokens_match_suppressing_all_others() -> None:
    allowed = (2, 9, 30)
    others = [token for token in range(VOCAB) if token not in allowed]
    theirs = by_transformers(transformers.SuppressTokensLogitsProcessor(others), [1])
    assert torch.equal(masked(Sampling(allowed_token_ids=allowed), [1]), theirs)


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_matches_transformers(num_output: int) -> None:
    history = list(range(4 + num_output))
    theirs = by_transformers(transformers.MinNewTokensLengthLogitsProcessor(4, 2, EOS, device="cpu"), history)
    assert torch.equal(masked(Sampling(min_tokens=2), history, prompt_len=4), theirs)


def test_bias_comes_before_penalties() -> None:
    sampling = Sampling(logit_bias=((3, -5.0), (5, 5.0)), repetition_penalty=1.7)
    draw = Draw(sampling, [5, 3, 5], 1)
    ours = mask_row(logits(2), draw)
    penalise(ours, draw)
    biased = by_transformers(transformers.SequenceBiasLogitsProcessor([[[3], -5.0], [[5], 5.0]]), [5, 3, 5], 2)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[5, 3, 5]]), biased[None].clone())[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_a_ban_that_leaves_no_token_is_skipped() -> None:
    allowed = Sampling(allowed_token_ids=(EOS,), min_tokens=3)
    assert masked(allowed, [1], 1).isfinite().nonzero().flatten().tolist() == [EOS]
    bad = Sampling(allowed_token_ids=(2, 3), bad_token_ids=((7, 2), (8, 3), (1, 7, 3)), logit_bias=((2, 1.0),))
    assert masked(bad, [7]).isfinite().nonzero().flatten().tolist() == [3]
    assert masked(bad, [8]).isfinite().nonzero().flatten().tolist() == [2]
    # Every allowed token would complete a bad word. The bad words are skipped, and the allowed tokens apply.
    both = masked(bad, [1, 7])
    assert both.isfinite().nonzero().flatten().tolist() == [2, 3]
    assert both[2] == logits(0)[2] + 1.0
    # Bad words still apply if skipping min_tokens is enough.
    last = Sampling(allowed_token_ids=(4, EOS), bad_token_ids=((4,),), min_tokens=9)
    assert masked(last, [1], 1).isfinite().nonzero().flatten().tolist() == [EOS]


def test_sampled_tokens_are_never_banned() -> None:
    """Masks, penalties, temperature, truncation and logprobs together, in a batch with plain rows."""
    rng = random.Random(8)
    draws = []
    for row in range(60):
        history = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        draws.append(
            Draw(
                Sampling(
                    seed=row,
                    max_tokens=99,
                    temperature=rng.choice([0.0, 0.7, 2.0]),
                    top_k=rng.choice([0, 3]),
                    top_p=rng.choice([1.0, 0.5]),
                    min_p=rng.choice([0.0, 0.2]),
                    min_tokens=rng.choice([0, 99]),
                    repetition_penalty=rng.choice([1.0, 1.5]),
                    allowed_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 5]))),
                    bad_token_ids=tuple((one,) for one in rng.sample(range(VOCAB), rng.choice([0, 3, 20]))),
                    logit_bias=tuple((one, rng.uniform(-100, 100)) for one in rng.sample(range(VOCAB), 2)),
                    logprobs=rng.choice([None, 3]),
                ),
                history,
                1,
            )
        )
        draws.append(Draw(Sampling(seed=row), history, 1))
    logits_BV = torch.stack([logits(row) for row in range(len(draws))])
    before = logits_BV.clone()
    together = sample(logits_BV, draws, (EOS,))
    assert torch.equal(logits_BV, before)
    for row, (draw, out) in enumerate(zip(draws, together, strict=True)):
        may = mask_row(logits_BV[row], draw)
        assert may[out.token_id] > -math.inf
        assert out == sample(logits_BV[row : row + 1], [draw], (EOS,))[0]
        if out.logprob is not None:  # The model's own logprobs, regardless of bans.
            assert out.logprob == pytest.approx(float(logits_BV[row].log_softmax(0)[out.token_id]), abs=1e-6)


def test_a_plain_row_is_not_changed() -> None:
    assert is_plain(Draw(Sampling(), [1, 2], 1))
    for own in (
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_token_ids": ((1,),)},
        {"min_tokens": 2},
    ):
        draw = Draw(dataclasses.replace(Sampling(), **own), [1, 2], 1)  # type: ignore[arg-type]
        assert is_masked(draw)
        assert not is_plain(draw)
