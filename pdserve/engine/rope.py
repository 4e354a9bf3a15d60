"""Rotary position embedding: the frequencies of every supported rope type, and the rotation."""

# Shapes: T tokens in the packed batch, N heads, D head dim, R = D / 2 rotated pairs.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [R] in float32. The order of operations is that of transformers."""
    exponent_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _SCALINGS[rope.kind](rope, head_dim, 1.0 / rope.theta**exponent_R)


def rotation(
    frequency_R: Tensor, attention_factor: float, position_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin) at each token's position, [T, 1, R]. Computed in float32, where positions up to 2^24 are exact."""
    angle_T1R = position_T[:, None, None] * frequency_R
    cos_T1R, sin_T1R = angle_T1R.cos(), angle_T1R.sin()
    if attention_factor != 1.0:
        cos_T1R, sin_T1R = cos_T1R * attention_factor, sin_T1R * attention_factor
    return cos_T1R.to(dtype), sin_T1R.to(dtype)


def rotate(x_TND: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotates pair i, which is dimensions i and i + R (the layout of Hugging Face checkpoints)."""
    low_TNR, high_TNR = x_TND.chunk(2, dim=-1)
    return torch.cat((low_TNR * cos_T1R - high_TNR * sin_T1R, high_TNR * cos_T1R + low_TNR * sin_T1R), dim=-1)


def _linear(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    return frequency_R / rope.factor


def _llama3(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    """Stretches long wavelengths, keeps short ones, and blends those in between. Source: Llama 3.1 reference code."""
    wavelength_R = 2 * math.pi / frequency_R
    longest, shortest = rope.original_positions / rope.low_freq_factor, rope.original_positions / rope.high_freq_factor
    share_R = (rope.original_positions / wavelength_R - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_R = (1 - share_R) * frequency_R / rope.factor + share_R * frequency_R
    stretched_R = torch.where(wavelength_R > longest, frequency_R / rope.factor, frequency_R)
    is_between_R = (wavelength_R >= shortest) & (wavelength_R <= longest)
    return torch.where(is_between_R, blended_R, stretched_R)


def _yarn(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    """Blends original and stretched frequencies along a ramp over the dimensions. Source: arXiv 2309.00071."""

    def dimension(num_rotations: float) -> float:
        return head_dim * math.log(rope.original_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    ramp_R = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_R = 1 - ramp_R
    stretched_R = 1.0 / (rope.factor * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return stretched_R * (1 - kept_R) + frequency_R * kept_R


def _default(rope: RopeConfig, head_dim: int, frequency_R: Tensor) -> Tensor:
    return frequency_R


_SCALINGS: Final[Mapping[str, Callable[[RopeConfig, int, Tensor], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
