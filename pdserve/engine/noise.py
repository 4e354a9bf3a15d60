"""Counter-based noise: the number depends only on (seed, position, token), and needs no state.

So every worker samples the same token, in any batch, before and after preemption, migration or a retry. The hash is
splitmix64's finaliser (Steele, Lea, Flood 2014), applied to seed, position and token in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 2**64 - 1


def stream(seed: int, position: int) -> int:
    """The 64-bit state that all tokens of one sampled position share."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def streams(draws: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The states of (seed, position) pairs, as int64 with the same bits."""
    return torch.tensor([_signed(stream(seed, position)) for seed, position in draws], device=device)


def gumbel(state: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for each token id under each state (int64 both, broadcast together).

    float64, because the largest values decide the result, and float32 uniforms would cut them off at 2^-24.
    """
    bits = _mix_tensor(state + (token + 1) * _signed(_GOLDEN))
    uniform = _shift(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)  # in (0, 1), without both ends
    return uniform.log_().neg_().log_().neg_()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    """Like _mix: int64 products wrap around, which is arithmetic modulo 2^64."""
    value = (_shift(value, 30).bitwise_xor_(value)).mul_(_signed(_MIX_1))
    value = (_shift(value, 27).bitwise_xor_(value)).mul_(_signed(_MIX_2))
    return _shift(value, 31).bitwise_xor_(value)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's shift is arithmetic."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
