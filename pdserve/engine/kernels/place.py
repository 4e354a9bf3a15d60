"""Rotates queries and keys and stores keys and values in their blocks, in one pass over a step's tokens.

Equals rope.rotate and pool.write up to the rounding of fused products. Each token is computed independently.
"""

# Shapes: T tokens, H query heads, K kv heads, D head dim, C tokens per block.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdserve.engine.kernels import jit
from pdserve.engine.kernels.bfloat16 import narrow, widen
from pdserve.engine.kernels.paged import largest

# The same operations as in pool.quantise; none of them can be fused, so the bits are equal.
_INT8_MAX, _STEP, _LEAST = np.float32(127), np.float32(1 / 127), np.float32(2**-120)


def make_place(head_dim: int, block_size: int, stored: str) -> Callable[..., None]:
    """The kernel for one shape and dtype of the pool (float32, bfloat16 or int8), compiled at its first call.

    place(q, k, v, q_stride, k_stride, v_stride, cos, sin, block_T, offset_T, q_out, data, scales, num_heads,
    num_kv_heads, pool_heads, block_stride, layer_start, scale_stride, scale_start, first, last) does tokens first ..
    last - 1. All arrays are flat; bfloat16 is given as `words`. q, k and v have strides per token; q_out [T, H, D] and
    cos and sin [T, D / 2] are contiguous and float32. The pool's arguments are those of kernels.paged.
    """
    D, C, R = head_dim, block_size, head_dim // 2
    is_int8, is_bfloat16 = stored == "int8", stored == "bfloat16"
    U = np.uint64

    def place(
        q: Any,
        k: Any,
        v: Any,
        q_stride: int,
        k_stride: int,
        v_stride: int,
        cos: Any,
        sin: Any,
        block_T: Any,
        offset_T: Any,
        q_out: Any,
        data: Any,
        scales: Any,
        num_heads: int,
        num_kv_heads: int,
        pool_heads: int,
        block_stride: int,
        layer_start: int,
        scale_stride: int,
        scale_start: int,
        first: int,
        last: int,
    ) -> None:
        row = np.empty(D, np.float32)
        size = np.empty(D, np.float32)
        for token in range(first, last):
            at = U(token * R)
            for head in range(num_heads):
                source = U(token * q_stride + head * D)
                target = U((token * num_heads + head) * D)
                for r in range(U(R)):
                    low, high = widen(q[source + r]), widen(q[source + U(R) + r])
                    q_out[target + r] = low * cos[at + r] - high * sin[at + r]
                    q_out[target + U(R) + r] = high * cos[at + r] + low * sin[at + r]
            for head in range(num_kv_heads):
                slot = offset_T[token] * pool_heads + head
                for part in range(2):
                    if part == 0:
                        source = U(token * k_stride + head * D)
                        for r in range(U(R)):
                            low, high = widen(k[source + r]), widen(k[source + U(R) + r])
                            row[r] = low * cos[at + r] - high * sin[at + r]
                            row[U(R) + r] = high * cos[at + r] + low * sin[at + r]
                    else:
                        source = U(token * v_stride + head * D)
                        for d in range(U(D)):
                            row[d] = widen(v[source + d])
                    in_layer = part * C * pool_heads + slot
                    target = U(block_T[token] * block_stride + layer_start + in_layer * D)
                    if is_int8:
                        broken = np.float32(0)  # NaN if a value is not finite; so is the scale
                        for d in range(U(D)):
                            size[d] = abs(row[d])
                            broken += row[d] * np.float32(0)
                        most = largest(size, np.float32(0))
                        inverse = _INT8_MAX / most if most > _LEAST else np.float32(0)
                        scales[U(block_T[token] * scale_stride + scale_start + in_layer)] = most * _STEP + broken
                        for d in range(U(D)):
                            whole = np.rint(row[d] * inverse)
                            whole = min(max(whole, -_INT8_MAX), _INT8_MAX)
                            data[target + d] = np.int8(np.int32(whole))
                    elif is_bfloat16:
                        for d in range(U(D)):
                            data[target + d] = narrow(row[d])
                    else:
                        for d in range(U(D)):
                            data[target + d] = row[d]

    return jit.compiled(place)
