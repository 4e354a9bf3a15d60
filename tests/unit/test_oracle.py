"""What the oracle accepts, and that it rejects everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.sampling.sampler import Draw, sample
from tests.oracle import TIE, Oracle, Position

PROMPT = list(range(3, 35))
NUM_TOKENS = 120
LOW, HIGH = 64, 65  # two tokens whose rows of the output head are twins


def make_model(gain: float) -> Any:
    """`HIGH` is `LOW` with `gain` more on the logit wherever the last hidden value is 1; both are the likeliest."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_TE = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    with torch.no_grad():
        head_VE = model.lm_head.weight
        head_VE[LOW] = hidden_TE[-1] / hidden_TE[-1].norm() * 4.0  # far above all others behind the prompt
        head_VE[HIGH] = head_VE[LOW] * (1.0 + gain)
    return model


def test_float64_decides_ties_of_float32() -> None:
    model = make_model(gain=1e-11)
    tokens = torch.tensor([PROMPT])
    by_float32 = int(make_model(gain=1e-11).float()(tokens).logits[0, -1].argmax())
    assert by_float32 == LOW, "the two weights are one number in float32; the first of equals is taken"
    oracle = Oracle("", model)
    assert oracle.judge([PROMPT], [[HIGH]]).wrong == []
    assert oracle.judge([PROMPT], [[HIGH]]).ties == []
    verdict = oracle.judge([PROMPT], [[LOW]])
    assert verdict.wrong == []
    [tie] = verdict.ties
    assert (tie.ours, tie.best) == (LOW, HIGH)
    assert 0 < tie.gap < 1e-9


@pytest.mark.parametrize(("share", "is_tie"), [(0.9, True), (1.1, False)])
def test_the_bound_is_a_share_of_the_logits_deviation(share: float, is_tie: bool) -> None:
    logits_V = Oracle("", make_model(gain=0.0)).logits(PROMPT)[-1]
    gain = share * TIE * float(logits_V.std()) / float(logits_V[LOW])
    verdict = Oracle("", make_model(gain)).judge([PROMPT], [[LOW]])
    assert (len(verdict.ties), len(verdict.wrong)) == ((1, 0) if is_tie else (0, 1))


def greedy(oracle: Oracle, answer: list[int], num_tokens: int) -> list[int]:
    """The likeliest tokens behind the prompt and `answer`."""
    tokens = [*PROMPT, *answer]
    for _ in range(num_tokens):
        tokens.append(int(oracle.logits(tokens)[-1].argmax()))
    return tokens[len(PROMPT) + len(answer) :]


def test_positions_after_a_difference_are_judged() -> None:
    oracle = Oracle("", make_model(gain=0.0))
    right = greedy(oracle, [], 12)
    assert oracle.assert_exact([PROMPT], [right]).num_positions == 12
    wrong = [*right[:4], (right[4] + 7) % 128]
    wrong += greedy(oracle, wrong, 12 - len(wrong))
    wrong[9] = (wrong[9] + 7) % 128
    verdict = oracle.judge([PROMPT, PROMPT], [right, wrong])
    assert [(one.answer, one.at) for one in verdict.wrong if one.at < 10] == [(1, 4), (1, 9)]
    with pytest.raises(AssertionError, match="of 24 tokens are wrong"):
        verdict.check()


def test_near_ties_are_counted_and_bounded() -> None:
    oracle = Oracle("", make_model(gain=1e-11))
    with pytest.raises(AssertionError, match="no token was judged"):
        oracle.judge([], []).check()
    verdict = oracle.judge([PROMPT], [[LOW]])
    with pytest.raises(AssertionError, match=r"1 near-ties, less than 0\.01 allowed"):
        verdict.check()
    verdict.num_positions = 101
    verdict.check()
    verdict.ties.append(Position(0, 1, LOW, HIGH, 0.0))
    with pytest.raises(AssertionError, match="2 near-ties"):
        verdict.check()


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.8, seed=3), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.8, seed=4, top_p=0.9, top_k=40), marks=pytest.mark.slow),
        Sampling(temperature=1.0, seed=5, repetition_penalty=1.2, bad_token_ids=((LOW,),)),
    ],
)
def test_sampled_tokens_are_judged_by_their_own_noise(sampling: Sampling) -> None:
    """Half a `TIE` decides where two tokens are that close; another seed's token is wrong."""
    oracle = Oracle("", make_model(gain=0.0))
    right = sampled(oracle, sampling)
    oracle.assert_exact([PROMPT], [right], sampling=sampling)
    other = sampled(oracle, Sampling(temperature=sampling.temperature, seed=99))
    assert len(oracle.judge([PROMPT], [other], sampling=sampling).wrong) > NUM_TOKENS // 4


def sampled(oracle: Oracle, sampling: Sampling) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        logits_V = oracle.logits(tokens)[-1]
        tokens.append(sample(logits_V[None], [Draw(sampling, list(tokens), len(PROMPT))], [2])[0].token_id)
    return tokens[len(PROMPT) :]


def float32_tokens(model: Any) -> list[TokenOut]:
    """What a float32 engine would report of the prompt's tokens."""
    with torch.inference_mode():
        logprob_PV = model.float()(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [
        TokenOut(token_id=token, logprob=float(logprob_V[token]), top=top_of(logprob_V))
        for token, logprob_V in zip(PROMPT[1:], logprob_PV[:-1], strict=True)
    ]


def top_of(logprob_V: Tensor) -> tuple[tuple[int, float], ...]:
    values, tokens = logprob_V.topk(3)
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def test_logprobs_of_float32_are_accepted() -> None:
    Oracle("", make_model(gain=0.1)).assert_logprobs(PROMPT[:-1], 0, float32_tokens(make_model(gain=0.1)))


def test_logprobs_of_a_slightly_rounded_model_are_rejected() -> None:
    """One norm of 32 weights has the precision of TF32."""
    model = make_model(gain=0.1)
    with torch.no_grad():
        model.model.norm.weight.copy_((model.model.norm.weight * 2**13).round() / 2**13)
    with pytest.raises(AssertionError, match=r"differs by|not close"):
        Oracle("", make_model(gain=0.1)).assert_logprobs(PROMPT[:-1], 0, float32_tokens(model))


@pytest.mark.parametrize("wrong", ["order", "missing", "value"])
def test_the_top_must_be_the_most_likely_in_order(wrong: str) -> None:
    first, *others = float32_tokens(make_model(gain=0.1))
    a, b, c = first.top
    top = {"order": (b, a, c), "missing": (a, c), "value": (a, b, (c[0], c[1] + 0.1))}[wrong]
    spoilt = dataclasses.replace(first, top=top)
    with pytest.raises(AssertionError, match="not close"):
        Oracle("", make_model(gain=0.1)).assert_logprobs(PROMPT[:-1], 0, [spoilt, *others])


def test_norms_rotations_and_softmax_are_computed_in_float64() -> None:
    """Rounded weights and inputs alone leave no float32 in a result: two orders of summation agree to 1e-13."""
    oracle = Oracle("", make_model(gain=0.0))
    whole_TV = oracle.logits([*PROMPT, *PROMPT])
    part_V = oracle.logits(PROMPT)[-1]
    assert float((whole_TV[len(PROMPT) - 1] - part_V).abs().max()) < 1e-13 * float(part_V.abs().max()) * 100
    with torch.inference_mode():
        mixed_V = oracle._model(torch.tensor([PROMPT])).logits[0, -1]
    assert float((mixed_V - part_V).abs().max()) > 1e-10, "transformers itself rounds to float32 in between"
