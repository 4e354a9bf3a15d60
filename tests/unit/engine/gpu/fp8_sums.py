"""The accuracy that fast accumulation costs an fp8 product, by emulation.

A Hopper's fp8 matrix unit keeps about 14 bits of a sum: the 32 terms of an instruction and the sum so far are truncated
13 bits after the first bit of the largest (DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2). Fast accumulation
keeps the whole sum there; otherwise it is added to a float32 register every 128 terms. Activations are normal numbers
with eight channels twenty times as large, weights are normal; both are rounded to e4m3, by row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

TERMS: Final = 32
BITS: Final = 13


def cut(x: Tensor, exponent: Tensor) -> Tensor:
    step = torch.exp2(exponent - BITS)
    return torch.trunc(x / step) * step


def product(a_MK: Tensor, b_NK: Tensor, promoted_each: int | None) -> Tensor:
    total = torch.zeros(len(a_MK), len(b_NK), dtype=torch.float64)
    held = torch.zeros_like(total)
    for at in range(0, a_MK.shape[1], TERMS):
        terms = a_MK[:, None, at : at + TERMS].double() * b_NK[None, :, at : at + TERMS].double()
        largest = torch.maximum(terms.abs().amax(-1), held.abs()).clamp(min=1e-30)
        exponent = largest.log2().floor()
        held = cut(terms, exponent[..., None]).sum(-1) + cut(held, exponent)
        if promoted_each is not None and (at + TERMS) % promoted_each == 0:
            total, held = total + held, torch.zeros_like(held)
    return total + held


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float(), scale.double()


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def errors(num_terms: int, seed: int = 0) -> tuple[float, float, float]:
    """Root mean squares over that of the product: of rounding to fp8, of fast sums, of promoted ones."""
    rng = torch.Generator().manual_seed(seed)
    a_MK, b_NK = (torch.randn(rows, num_terms, generator=rng) for rows in (16, 24))
    a_MK[:, torch.randint(num_terms, (8,), generator=rng)] *= 20
    (a, scale_a), (b, scale_b) = rounded(a_MK), rounded(b_NK)
    wanted, scale = a_MK.double() @ b_NK.double().T, scale_a * scale_b.T
    exact = a.double() @ b.double().T
    sums = [rms((product(a, b, each) - exact) * scale) / rms(wanted) for each in (None, 128)]
    return rms(exact * scale - wanted) / rms(wanted), sums[0], sums[1]
