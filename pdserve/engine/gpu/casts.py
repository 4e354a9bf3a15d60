"""Casts with equal rounding in compiled kernels and in Triton's interpreter.

The interpreter (3.6) truncates bfloat16 instead of rounding, rounds fp8 mantissas without the carry, and multiplies
bfloat16 tiles as integers. So in the interpreter values are first rounded in float32 to a value of the target dtype,
and products use float32. Compiled kernels use the hardware's casts, which round to the nearest, ties to even.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_RINT = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to an integer
_FP8_RINT = tl.constexpr(1.5 * 2.0**14)  # adding it rounds to multiples of 2^-9, the step of fp8's subnormals
_FP8_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 to float32, bfloat16, float16 or fp8 (e4m3; |x| at most 448)."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            x = _drop_bits(x, 16)
        if dtype == tl.float8e4nv:
            tiny = tl.abs((x + _FP8_RINT) - _FP8_RINT).to(tl.uint32, bitcast=True)
            tiny |= (x.to(tl.uint32, bitcast=True) >> 31) << 31  # a negative that becomes zero keeps its sign
            x = tl.where(tl.abs(x) < _FP8_LEAST_NORMAL, tiny.to(tl.float32, bitcast=True), _drop_bits(x, 20))
    return x.to(dtype)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """An operand of a tl.dot with float32 sums."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x.to(dtype)


@triton.jit
def rint(x):
    """The nearest integer, ties to even, of a float32 below 2^22. Needs enable_fp_fusion=False if x is a product."""
    return (x + _RINT) - _RINT


@triton.jit
def _drop_bits(x, COUNT: tl.constexpr):
    """Rounds away the last bits of a float32's mantissa, ties to even. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + ((1 << (COUNT - 1)) - 1) + ((bits >> COUNT) & 1)
    rounded = (rounded >> COUNT) << COUNT
    return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
