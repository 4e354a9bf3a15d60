"""Checks of sampling.py and cutoff.py against the CPU's sampler, noise and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.types import Sampling
from pdserve.engine.gpu.kernels.sampling import Sampler, gumbel, stream
from pdserve.engine.gpu.kernels.samplings import Draws, floor_key
from pdserve.engine.sampling import sampler as host_noise
from pdserve.engine.sampling.sampler import Draw, sample
from tests.gpu.cases import Case, Launch, draw

_SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 123456789)


@triton.jit
def _noise(seed, position, state_out, noise_out, count, COUNT: tl.constexpr):
    row = tl.program_id(0)
    state = stream(tl.load(seed + row), tl.load(position + row))
    token = tl.arange(0, COUNT)
    tl.store(state_out + row, state.to(tl.int64, bitcast=True))
    tl.store(noise_out + row * count + token, gumbel(state, token))


def _check_noise(device: torch.device) -> float:
    seed_B = torch.tensor(_SEEDS, device=device)
    position_B = torch.tensor([0, 1, 7, 2**20, 131_072, 5], device=device)
    state_B = torch.zeros(len(_SEEDS), dtype=torch.int64, device=device)
    noise_BV = torch.zeros(len(_SEEDS), 1024, dtype=torch.float64, device=device)
    _noise[(len(_SEEDS),)](seed_B, position_B, state_B, noise_BV, 1024, COUNT=1024)
    draws = list(zip((seed % 2**64 for seed in _SEEDS), position_B.tolist(), strict=True))
    expected_B = host_noise.streams(draws, torch.device("cpu"))
    if not torch.equal(state_B.cpu(), expected_B):
        return float("inf")  # random bits are integers: either all are equal or the check fails
    expected_BV = host_noise.gumbel(expected_B[:, None], torch.arange(1024))
    return float((noise_BV.cpu() - expected_BV).abs().max())


def draws_of(samplings: Sequence[Sampling], positions: Sequence[int], device: torch.device) -> Draws:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Draws(
        seed=column([one.seed for one in samplings], torch.int64),
        position=column(list(positions), torch.int64),
        temperature=column([0.0 if one.is_greedy else one.temperature for one in samplings], torch.float32),
        top_k=column([one.top_k for one in samplings], torch.int32),
        top_p=column([one.top_p for one in samplings], torch.float64),
        floor=column([floor_key(one.min_p) for one in samplings], torch.int32),
    )


def _agreement(
    name: str, vocab_size: int, samplings: Sequence[Sampling], logits_BV: Tensor, num_processors: int
) -> Case:
    """The share of rows whose token differs from the CPU's token, plus the largest error of a logprob."""

    def check(device: torch.device) -> float:
        positions = list(range(5, 5 + len(samplings)))
        sampler = Sampler(len(samplings) + 1, vocab_size, device, num_processors)
        token_B, logprob_B = sampler.draw(logits_BV.to(device), draws_of(samplings, positions, device))
        draws = [Draw(one, [1] * position, 1, None) for one, position in zip(samplings, positions, strict=True)]
        expected = sample(logits_BV.float(), draws, ())
        differ = sum(token != out.token_id for token, out in zip(token_B.tolist(), expected, strict=True))
        reference = logits_BV.double().log_softmax(-1).gather(1, token_B.cpu()[:, None])[:, 0]
        error = float((logprob_B.cpu().double() - reference).abs().max())
        return differ / len(samplings) + (error if error == error else float("inf"))

    # A float32 logprob near -10 is a multiple of 9.5e-7, and the device's own exp2 adds 2.4e-7 to each of its sums.
    return Case(f"draw {name}", check, 4e-6)


def _samplings(count: int, **kinds: float) -> list[Sampling]:
    return [Sampling(seed=seed, max_tokens=1, **kinds) for seed in range(count)]  # type: ignore[arg-type]


_MIXED = [
    *_samplings(2, temperature=0.0),
    *_samplings(2, temperature=1.0),
    *_samplings(1, temperature=1e-6),
    *_samplings(1, temperature=0.7, top_k=5),
    *_samplings(2, temperature=1.3, top_p=0.8),
    *_samplings(1, temperature=1.0, min_p=0.05),
    *_samplings(2, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01),
    *_samplings(1, temperature=1.0, top_k=1000, top_p=0.7),
]


_FLAT = [
    *_samplings(1, temperature=3.0, top_p=0.98),
    *_samplings(1, temperature=2.0, top_k=2500),
    *_samplings(1, temperature=2.0, top_k=2500, top_p=0.97),
    *_samplings(1, temperature=2.0, top_p=0.9, min_p=0.02),
]


def _ties() -> Tensor:
    """Equal logits for the best token, for the k-th and around the limit of top_p; also banned tokens."""
    logits_BV = draw((len(_MIXED), 3000), torch.float32, 2).mul(4).round().div(2)
    logits_BV[:, 100:400] = -torch.inf
    return logits_BV


CASES = [
    Case("noise", _check_noise, 1e-14),
    _agreement("mixed", 3000, _MIXED, draw((len(_MIXED), 3000), torch.float32, 1, size=3.0), 132),
    _agreement("one part", 3000, _MIXED[:5], draw((5, 3000), torch.float32, 1, size=3.0), 1),
    _agreement("ties", 3000, _MIXED, _ties(), 132),
    _agreement("bfloat16", 1025, _MIXED, draw((len(_MIXED), 1025), torch.bfloat16, 3, size=3.0), 132),
    _agreement("truncated in one part", 3000, _MIXED[5:9], draw((4, 3000), torch.float32, 5, size=3.0), 1),
    _agreement("more candidates than one look holds", 5000, _FLAT, draw((len(_FLAT), 5000), torch.float32, 6), 132),
    _agreement("few tokens", 7, _MIXED[4:10], draw((6, 7), torch.float32, 4), 132),
]


def _launch(name: str, num_rows: int, **kinds: float) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        vocab_size = 128_256
        logits_BV = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device=device)
        if device.type != "meta":
            logits_BV.normal_().mul_(3)
        sampler = Sampler(num_rows, vocab_size, device)
        draws = draws_of(_samplings(num_rows, **kinds), [1] * num_rows, device)
        return lambda: sampler.draw(logits_BV, draws), lambda: logits_BV.float().argmax(-1)

    return Launch(f"draw {name} b={num_rows} v=128256", make, num_rows * 128_256 * 2)


LAUNCHES = [
    _launch("greedy", 1, temperature=0.0),
    _launch("greedy", 128, temperature=0.0),
    _launch("any", 1, temperature=1.0),
    _launch("any", 128, temperature=1.0),
    _launch("top_p", 1, temperature=1.0, top_p=0.9),
    _launch("top_p", 128, temperature=1.0, top_p=0.9),
    _launch("top_k top_p", 128, temperature=1.0, top_k=50, top_p=0.9),
]
