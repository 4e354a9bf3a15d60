"""Normalises and rotates queries and keys, and stores keys and values in their blocks, in one pass over the tokens.

Equals ops.rms_norm, rope.rotate and pool.write up to the rounding of fused products. Each token is computed
independently.
"""

# Shapes: T tokens, H query heads, K kv heads, D head dim, C tokens per block.

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numba import carray

from pdserve.engine.kernels.bfloat16 import narrow, widen
from pdserve.engine.kernels.jit import inlined
from pdserve.engine.kernels.rows import largest, rows_at_once
from pdserve.engine.kernels.task import ANY, FLOAT32, INT64, KINDS, TaskKernel, pointer, take

LEAST_WORK: Final = 1 << 16  # elements of the queries below which a second thread costs more than it gains

# The same operations as in pool.quantise; none of them can be fused, so the bits are equal.
_INT8_MAX, _STEP, _LEAST = np.float32(127), np.float32(1 / 127), np.float32(2**-120)


@inlined
def normalise(row: Any, weight: Any, eps: Any) -> Any:
    """The RMS norm of the row, in place."""
    total = np.float32(0)
    for d in range(np.uint64(row.size)):
        total += row[d] * row[d]
    factor = np.float32(1) / np.sqrt(total / np.float32(row.size) + eps)
    for d in range(np.uint64(row.size)):
        row[d] = row[d] * factor * weight[d]


@cache
def make_place(head_dim: int, block_size: int, stored: str, computed: str, *, is_normed: bool) -> TaskKernel:
    """The kernel for one shape, dtype of the pool (float32, bfloat16 or int8) and of q, k and v (float32 or bfloat16).

    place(num_tokens, work, q, k, v, q_stride, k_stride, v_stride, cos, sin, block_T, offset_T, q_out, data, scales,
    num_heads, num_kv_heads, pool_heads, block_stride, layer_start, scale_stride, scale_start, q_norm, k_norm, eps). All
    but sizes, strides, starts and eps, which are the `bits` of a float, are addresses. q, k and v have strides per
    token; q_out [T, H, D], cos and sin [T, D / 2], and q_norm and k_norm [D], the weights of RMS norms, are contiguous
    and float32. The pool's arguments are those of kernels.paged. Without `is_normed`, the last three are not used.
    """
    D, C, R = head_dim, block_size, head_dim // 2
    U = np.uint64
    IN, DATA, is_int8, is_bfloat16 = KINDS[computed], KINDS[stored], stored == "int8", stored == "bfloat16"

    def place(task: Any) -> None:
        q, k, v = (
            carray(pointer(task[3], IN), ANY),
            carray(pointer(task[4], IN), ANY),
            carray(pointer(task[5], IN), ANY),
        )
        q_stride, k_stride, v_stride = task[6], task[7], task[8]
        cos, sin = carray(pointer(task[9], FLOAT32), ANY), carray(pointer(task[10], FLOAT32), ANY)
        block_T, offset_T = carray(pointer(task[11], INT64), ANY), carray(pointer(task[12], INT64), ANY)
        q_out = carray(pointer(task[13], FLOAT32), ANY)
        data, scales = carray(pointer(task[14], DATA), ANY), carray(pointer(task[15], FLOAT32), ANY)
        num_heads, num_kv_heads, pool_heads = task[16], task[17], task[18]
        block_stride, layer_start, scale_stride, scale_start = task[19], task[20], task[21], task[22]
        q_norm, k_norm = carray(pointer(task[23], FLOAT32), (D,)), carray(pointer(task[24], FLOAT32), (D,))
        eps = np.float32(np.int64(task[25]).view(np.float64))
        row = np.empty(D, np.float32)
        size = np.empty(D, np.float32)
        num_tokens = task[2]
        at_once = rows_at_once(num_tokens)
        while True:
            first = take(task, 0) * at_once
            if first >= num_tokens:
                return
            for token in range(first, min(first + at_once, num_tokens)):
                at = U(token * R)
                for head in range(num_heads):
                    source = U(token * q_stride + head * D)
                    target = U((token * num_heads + head) * D)
                    for d in range(U(D)):
                        row[d] = widen(q[source + d])
                    if is_normed:
                        normalise(row, q_norm, eps)
                    for r in range(U(R)):
                        low, high = row[r], row[U(R) + r]
                        q_out[target + r] = low * cos[at + r] - high * sin[at + r]
                        q_out[target + U(R) + r] = high * cos[at + r] + low * sin[at + r]
                for head in range(num_kv_heads):
                    slot = offset_T[token] * pool_heads + head
                    for part in range(2):
                        if part == 0:
                            source = U(token * k_stride + head * D)
                            for d in range(U(D)):
                                row[d] = widen(k[source + d])
                            if is_normed:
                                normalise(row, k_norm, eps)
                            for r in range(U(R)):
                                low, high = row[r], row[U(R) + r]
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

    name = f"place-{computed}-{stored}-{D}-{C}{'-normed' if is_normed else ''}"
    return TaskKernel(place, name, least=LEAST_WORK)
