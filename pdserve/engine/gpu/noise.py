"""The Gumbel noise of engine/noise.py in a kernel: the same bits for (seed, position, token), on any device.

The 64-bit hash and the uniform number are integers and exact products, so they are equal bit for bit. The two float64
logarithms come from CUDA's library here and from torch's vector library there, each within one unit in the last place.
The noise agrees to about 4e-16 of its size (at most 1e-14), so a sampled token could differ only if two tokens' scores
are that close.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def stream(seed, position):
    """Like noise.stream: the state that all tokens of one sampled position share. Both int64; the seed's bits count as
    unsigned."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    return _mix(state + (position.to(tl.uint64, bitcast=True) + 1) * _GOLDEN)


@triton.jit
def gumbel(state, token):
    """Like noise.gumbel: float64 for each int32 token."""
    bits = _mix(state + (token.to(tl.uint64) + 1) * _GOLDEN) >> 11
    uniform = (bits.to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * _UNIT
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)
