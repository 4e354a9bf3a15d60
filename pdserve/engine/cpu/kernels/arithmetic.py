"""Arithmetic for kernels: bfloat16 values, as the upper halves of float32 values, and powers.

numpy and numba have no bfloat16. A kernel's array of bfloat16 values is an array of uint16: `words` of a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.cpu.kernels import jit
from pdserve.engine.cpu.kernels.jit import inlined


def words(x: Tensor) -> Any:
    """The memory of a contiguous tensor as an array: uint16 for bfloat16, otherwise the tensor's own dtype."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def widen(value: Any) -> Any:
    """A value of `words`, or an int8, in float32; a float32 value unchanged. For kernels."""
    raise NotImplementedError


def narrow(value: Any) -> Any:
    """A float32 value rounded to bfloat16, to nearest even, as uint16. A NaN stays one. For kernels."""
    raise NotImplementedError


if jit.is_available():
    from numba import types
    from numba.extending import overload

    @overload(widen, inline="always")
    def _widen(value: Any) -> Any:
        return {types.int8: _from_int8, types.uint16: _from_bfloat16}.get(value, _as_it_is)

    def _from_int8(value: Any) -> Any:
        return np.float32(value)

    def _from_bfloat16(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    def _as_it_is(value: Any) -> Any:
        return value

    @overload(narrow, inline="always")
    def _narrow(value: Any) -> Any:
        return _to_bfloat16

    def _to_bfloat16(value: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


# --- powers ---------------------------------------------------------------------------------------------------
# 2^(n + f) with |f| <= 1/2, by a series and a shift, in vector instructions.

_HALF, _ONE = np.float32(0.5), np.float32(1)
_LOW = np.float32(-126)  # below it 2^x is not a normal float32
_LOG2_E, _LOG2_E_WIDE = np.float32(1 / math.log(2)), np.float64(1 / math.log(2))
# ln 2 in two parts: n times the first is exact, so that x - n ln 2 keeps all its bits. Fast math may merge the two
# products again: fused multiply-add makes up for that, and CPUs without it reduce in float64.
_LN2_HIGH, _LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860682030941723e-6)
# Taylor series of 2^f for |f| <= 1/2, where six terms are exact to a unit in the last place.
_C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))


@inlined
def _power(n: Any, f: Any) -> Any:
    series = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _ONE
    return series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def _rest_fused(x: Any, n: Any) -> Any:
    return (x - n * _LN2_HIGH - n * _LN2_LOW) * _LOG2_E


@inlined
def _rest_wide(x: Any, n: Any) -> Any:
    return np.float32(np.float64(x) * _LOG2_E_WIDE - np.float64(n))


_rest = _rest_fused if jit.is_available() and "+fma" in jit.target()[1].split(",") else _rest_wide


@inlined
def exp2(x: Any) -> Any:
    """2^x for x <= 0."""
    x = _LOW if x < _LOW else x
    n = np.floor(x + _HALF)
    return _power(n, x - n)


@inlined
def exp(x: Any) -> Any:
    """e^x to a relative 4e-7 for |x| < 80."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * _LOG2_E + _HALF)
    return _power(n, _rest(x, n))
