"""Sampled tokens follow the right distribution, and each depends only on its row."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.sampling.sampler import (
    Draw,
    _mix,
    _mix_tensor,
    _signed,
    cutoffs,
    gumbel,
    keep_top_sigma,
    sample,
    stream,
    streams,
)

GOLDEN = [760, 496, 921, 633, 866, 952, 808, 206, 259, 282, 798, 257]
VOCAB = 12
NUM_DRAWS = 10_000
Z = 3.719  # One-sided normal quantile of 1 - 10^-4. Seeds are fixed, so a test that passes once always passes.


def logits() -> Tensor:
    rng = random.Random(4)
    return torch.tensor([rng.gauss(0.0, 1.5) for _ in range(VOCAB)])


def law(sampling: Sampling) -> list[float]:
    """The distribution by its definition, one token at a time."""
    values = [float(one) for one in logits().double()]
    if sampling.top_n_sigma:
        least = max(values) - sampling.top_n_sigma * statistics.pstdev(values)
        values = [one if one >= least else -math.inf for one in values]
    weight = [math.exp(one / sampling.temperature) for one in values]
    weight = [one if one >= sampling.min_p * max(weight) else 0.0 for one in weight]
    order = sorted(range(VOCAB), key=lambda token: -weight[token])
    for token in order[sampling.top_k or VOCAB :]:
        weight[token] = 0.0
    total, mass = sum(weight), 0.0
    for token in order:
        if mass >= sampling.top_p * total:
            weight[token] = 0.0
        mass += weight[token]
    return [one / sum(weight) for one in weight]


def chi_square_limit(freedom: int) -> float:
    """Quantile 1 - 10^-4 of the chi-square law (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + Z * math.sqrt(2 / (9 * freedom))) ** 3


def assert_follows(counts: Sequence[int], expected: Sequence[float]) -> None:
    total = sum(counts)
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0.0)
    cells = [(count, share * total) for count, share in zip(counts, expected, strict=True) if share > 0.0]
    assert min(mean for _, mean in cells) >= 5  # Below this expected count, chi-square is not valid.
    assert sum((count - mean) ** 2 / mean for count, mean in cells) < chi_square_limit(max(1, len(cells) - 1))


def draw_many(draws: Sequence[Draw], logits_V: Tensor | None = None) -> list[int]:
    rows = (logits() if logits_V is None else logits_V).expand(len(draws), -1)
    return [out.token_id for out in sample(rows, draws, eos_token_ids=())]


LAWS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 50},
    {"top_p": 0.6},
    {"top_p": 0.95, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_n_sigma": 0.5},
    {"top_n_sigma": 1.5, "temperature": 3.0},
    {"top_n_sigma": 2.0, "top_k": 5, "top_p": 0.9},
    {"min_p": 0.05, "top_k": 6, "top_p": 0.9, "temperature": 1.7},
]


@pytest.mark.parametrize(
    ("varies", "own"),
    [*(("seed", own) for own in LAWS), *(("position", own) for own in (LAWS[0], LAWS[6], LAWS[-1]))],
    ids=lambda one: one if isinstance(one, str) else ",".join(f"{key}={value}" for key, value in one.items()),
)
def test_samples_follow_the_distribution(varies: str, own: dict[str, Any]) -> None:
    if varies == "seed":
        draws = [Draw(Sampling(seed=seed, **own), range(9), 0) for seed in range(NUM_DRAWS)]
    else:
        draws = [Draw(Sampling(seed=3, **own), range(position), 0) for position in range(NUM_DRAWS)]
    tokens = draw_many(draws)
    assert_follows([tokens.count(token) for token in range(VOCAB)], law(Sampling(**own)))


def test_noise_of_positions_and_seeds_is_independent() -> None:
    flat = torch.zeros(4)
    along = draw_many([Draw(Sampling(seed=1), range(position), 0) for position in range(NUM_DRAWS)], flat)
    across = draw_many([Draw(Sampling(seed=seed), range(1), 0) for seed in range(NUM_DRAWS)], flat)
    for tokens in (along, across):
        pairs = [4 * one + other for one, other in zip(tokens[::2], tokens[1::2], strict=True)]
        assert_follows([pairs.count(pair) for pair in range(16)], [1 / 16] * 16)


def test_noise_is_gumbel() -> None:
    noise = gumbel(streams([(11, 5)], torch.device("cpu")), torch.arange(200_000))
    assert float(noise.mean()) == pytest.approx(0.57722, abs=4 * 1.2825 / math.sqrt(200_000))
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert noise.isfinite().all()


def test_tensor_and_integer_hashes_are_equal() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    assert _mix_tensor(torch.tensor([_signed(one) for one in values])).tolist() == [
        _signed(_mix(one)) for one in values
    ]
    assert len({stream(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(1000)}) == 3000


def test_seeded_tokens_are_stable_across_releases() -> None:
    draws = [Draw(Sampling(seed=2**64 - 1), range(position), 0) for position in range(12)]
    assert draw_many(draws, torch.zeros(1000)) == GOLDEN


def mixed_draws() -> list[Draw]:
    rng = random.Random(2)
    draws = []
    for _ in range(40):
        history = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        sampling = Sampling(
            seed=rng.randrange(2**64),
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 3]),
            top_p=rng.choice([1.0, 0.7]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.8]),
            frequency_penalty=rng.choice([0.0, -0.4]),
            logprobs=rng.choice([None, 0, 2]),
            min_tokens=rng.choice([0, 10]),
            stop_token_ids=(1,),
        )
        draws.append(Draw(sampling, history, rng.randrange(len(history) + 1)))
    return draws


def test_a_row_samples_the_same_in_any_batch() -> None:
    draws = mixed_draws()
    torch.manual_seed(0)
    rows_BV = torch.randn(len(draws), VOCAB) * 2
    before = rows_BV.clone()
    together = sample(rows_BV, draws, eos_token_ids=(0,))
    assert torch.equal(rows_BV, before)
    alone = [sample(rows_BV[row : row + 1], [draw], eos_token_ids=(0,))[0] for row, draw in enumerate(draws)]
    assert alone == together
    backwards = sample(rows_BV.flip(0), draws[::-1], eos_token_ids=(0,))
    assert backwards[::-1] == together


def test_penalties_equal_their_definition() -> None:
    draws = mixed_draws()
    torch.manual_seed(1)
    rows_BV = torch.randn(len(draws), VOCAB) * 2
    for row, draw in enumerate(draws):
        one = draw.sampling
        expected = [float(value) for value in rows_BV[row]]
        output = list(draw.history)[draw.prompt_len :]
        for token in range(VOCAB):
            if token in (0, 1) and len(output) < one.min_tokens:
                expected[token] = -math.inf
            if token in draw.history:
                expected[token] *= one.repetition_penalty if expected[token] <= 0 else 1 / one.repetition_penalty
            expected[token] -= one.presence_penalty * (token in output) + one.frequency_penalty * output.count(token)
        greedy = Sampling(
            temperature=0.0,
            repetition_penalty=one.repetition_penalty,
            presence_penalty=one.presence_penalty,
            frequency_penalty=one.frequency_penalty,
            min_tokens=one.min_tokens,
            stop_token_ids=(1,),
        )
        [out] = sample(rows_BV[row : row + 1], [Draw(greedy, draw.history, draw.prompt_len)], eos_token_ids=(0,))
        assert out.token_id == max(range(VOCAB), key=lambda token: expected[token])


@pytest.mark.parametrize("sigma", [0.01, 1.0, 3.0, 100.0])
def test_top_n_sigma_matches_float64(sigma: float) -> None:
    """Over the logits that are not banned. Tokens at the limit, within float32 rounding, may be kept or removed."""
    torch.manual_seed(2)
    rows_BV = 5.0 + torch.randn(3, 2000) * torch.tensor([[0.01], [2.0], [30.0]])
    rows_BV[:, ::7] = -math.inf
    kept_BV = keep_top_sigma(rows_BV, torch.full((3,), sigma))
    for row_V, kept_V in zip(rows_BV.double().tolist(), kept_BV.tolist(), strict=True):
        left = [value for value in row_V if value > -math.inf]
        deviation = statistics.pstdev(left)
        least = max(left) - sigma * deviation
        for value, kept in zip(row_V, kept_V, strict=True):
            if abs(value - least) > 1e-4 * deviation:
                assert kept == (value if value >= least else -math.inf)


def test_top_n_sigma_keeps_equal_logits() -> None:
    rows_BV = torch.tensor([[2.0, 2.0, 2.0], [-math.inf, 3.0, -math.inf]])
    assert torch.equal(keep_top_sigma(rows_BV, torch.tensor([0.5, 0.5])), rows_BV)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    tied = torch.tensor([[0.0, 5.0, 5.0, 1.0, 5.0]])
    assert sample(tied, [Draw(Sampling(temperature=0.0), [0], 1)], ())[0].token_id == 1


def test_equal_logits_are_kept_or_removed_together() -> None:
    tied = torch.tensor([[0.0, 5.0, 5.0, 1.0, 5.0]])
    for own in ({"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.01}):
        draws = [Draw(Sampling(seed=seed, **own), [0], 1) for seed in range(200)]
        assert {out.token_id for out in sample(tied.expand(200, -1), draws, ())} == {1, 2, 4}


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_truncation_of_a_large_vocabulary_equals_sorting_all_of_it(spread: float) -> None:
    """A flat row needs more than the first tier, and a peaked one in the same batch does not."""
    torch.manual_seed(5)
    rows_BV = torch.randn(6, 6000) * torch.tensor([spread, 3.0])[torch.arange(6) % 2, None]
    rows_BV -= rows_BV.amax(dim=-1, keepdim=True)
    for own in (
        {"top_p": 0.9},
        {"top_k": 5},
        {"top_k": 1000, "top_p": 0.8},
        {"top_p": 0.99, "min_p": 0.3},
        {"min_p": 0.9},
    ):
        sampling = Sampling(**own)
        assert cutoffs(rows_BV, [sampling] * 6).tolist() == [sorted_cutoff(row_V, sampling) for row_V in rows_BV]


def sorted_cutoff(row_V: Tensor, sampling: Sampling) -> float:
    values = sorted(row_V.tolist(), reverse=True)
    values = [one for one in values if math.exp(one) >= sampling.min_p][: sampling.top_k or len(values)]
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return float(torch.tensor(math.log(sampling.min_p)))
    weights = [math.exp(one) for one in values]
    mass, total = 0.0, sum(weights)
    for index, weight in enumerate(weights):
        if mass >= sampling.top_p * total:
            return values[index - 1]
        mass += weight
    return values[-1]


def test_ends_are_banned_until_min_tokens() -> None:
    favours_end = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    for temperature in (0.0, 1e-3):
        asked = Sampling(temperature=temperature, min_tokens=2, stop_token_ids=(1, 99), max_tokens=4)
        tokens = [
            sample(favours_end, [Draw(asked, [3] * (5 + num_output), 5)], eos_token_ids=(0,))[0].token_id
            for num_output in range(4)
        ]
        assert tokens == [2, 2, 0, 0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(3)
    rows_BV = torch.randn(3, VOCAB)
    asked = [
        Sampling(temperature=0.0, logprobs=3, presence_penalty=2.0),
        Sampling(temperature=0.1, logprobs=0, top_k=1),
        Sampling(temperature=0.1),
    ]
    outs = sample(rows_BV, [Draw(one, [1, 2, 3], 0) for one in asked], ())
    expected_BV = rows_BV.log_softmax(-1)
    assert outs[0].logprob == pytest.approx(float(expected_BV[0, outs[0].token_id]))
    top = expected_BV[0].topk(3)
    assert [token for token, _ in outs[0].top] == top.indices.tolist()
    assert [value for _, value in outs[0].top] == pytest.approx(top.values.tolist())
    assert outs[1].logprob == pytest.approx(float(expected_BV[1, outs[1].token_id]))
    assert (outs[1].top, outs[2].logprob, outs[2].top) == ((), None, ())


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 100.0])
def test_extreme_temperatures_and_logits_stay_numbers(temperature: float) -> None:
    huge = torch.tensor([[3e38, -3e38, 0.0]])
    asked = Sampling(temperature=temperature, top_p=0.5, min_p=0.5)
    assert sample(huge, [Draw(asked, [0], 1)], ())[0].token_id == 0
