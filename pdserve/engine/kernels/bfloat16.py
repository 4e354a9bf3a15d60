"""bfloat16 values in kernels, as the upper halves of float32 values; numpy and numba have no such type.

A kernel's array of bfloat16 values is an array of uint16: `words` of a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.kernels import jit


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
