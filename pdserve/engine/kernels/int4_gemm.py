"""The product with 4-bit weights in groups, for any number of rows.

        y[t, n] ~ s_x[t] * sum_g s_w[n, g] * (sum_k q_x[t, k] q_w[n, k] - zero[n, g] * sum_k q_x[t, k])

int4_layout.py says how weights are stored. Activations are rounded as for int8. The sums of a group are exact:
integers, then float32 below 2^24. Groups are added in order, so a row has the same bits in any batch.
"""

# Shapes: M rows, K inputs, N outputs, G inputs of a group.

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numba import carray
from torch import Tensor

from pdserve.engine.kernels import amx, amx_int4, jit
from pdserve.engine.kernels.int4_layout import PANEL, ROUNDING_BYTES, STEP, STEP_BYTES
from pdserve.engine.kernels.int4_product import PACKED_ROWS, multiply_group
from pdserve.engine.kernels.panel_product import MOST_ROWS
from pdserve.engine.kernels.results import empty
from pdserve.engine.kernels.task import FLOAT32, UINT8, TaskKernel, pointer, take
from pdserve.engine.rounding import ZERO_POINT

_FEATURES: Final = {"+avx512f", "+avx512vnni"}
_AVX2_FEATURES: Final = {"+avx2", "+fma", "+f16c"}
_CHUNK_ROWS = 48  # rows whose inputs stay in the cache while all panels are multiplied with them


@cache
def _kernel() -> TaskKernel:
    """multiply_int4(panels * chunks of rows, work, blocks, x, x_scale, out, M, K, N, K / G, G, factor): addresses,
    sizes, and a factor of all scales."""

    def multiply_int4(task: Any) -> None:
        blocks, M, K, N, num_groups, size = task[3], task[7], task[8], task[9], task[10], task[11]
        factor = np.float32(np.int64(task[12]).view(np.float64))
        x, x_scale = carray(pointer(task[4], UINT8), (M, K)), carray(pointer(task[5], FLOAT32), (M,))
        out = carray(pointer(task[6], FLOAT32), (M, N))
        num_panels, num_inputs, steps = (N + PANEL - 1) // PANEL, num_groups * size, size // STEP
        block_bytes, most = steps * STEP_BYTES + ROUNDING_BYTES, min(M, _CHUNK_ROWS)
        signed, sums = np.zeros((most, num_inputs), np.uint8), np.empty((most, num_groups), np.float32)
        totals, wide = np.empty((most, PANEL), np.float32), np.empty((steps, 2, STEP_BYTES), np.uint8)
        signed_at, sums_at = np.int64(signed.ctypes.data), np.int64(sums.ctypes.data)
        totals_at, wide_at = np.int64(totals.ctypes.data), np.int64(wide.ctypes.data)
        # numba frees an array after its last use by name: all of these have one in the loop.
        held = np.int64(-1)
        while True:
            item = take(task, 0)
            if item >= task[2]:
                return
            panel, first = item % num_panels, item // num_panels * _CHUNK_ROWS
            rows = min(_CHUNK_ROWS, M - first)
            if first != held:
                held = first
                for row in range(rows):
                    source, target = x[first + row], signed[row]
                    for k in range(np.uint64(K)):
                        target[k] = source[k] ^ np.uint8(ZERO_POINT)
                    for group in range(num_groups):
                        total = np.int32(0)
                        for k in range(np.uint64(group * size), np.uint64((group + 1) * size)):
                            total += np.int32(np.int8(target[k]))
                        sums[row, group] = np.float32(total)
            totals[:rows] = np.float32(0)
            num_parts = (rows + MOST_ROWS - 1) // MOST_ROWS
            for group in range(num_groups):
                block = blocks + (panel * num_groups + group) * block_bytes
                if rows > PACKED_ROWS:
                    packed = carray(pointer(block, UINT8), (steps, STEP_BYTES))
                    for step in range(steps):
                        for i in range(STEP_BYTES):
                            wide[step, 0, i] = packed[step, i] & np.uint8(15)
                            wide[step, 1, i] = packed[step, i] >> np.uint8(4)
                for part in range(num_parts):
                    row = part * rows // num_parts
                    count = (part + 1) * rows // num_parts - row
                    x_at, sum_at = signed_at + row * num_inputs + group * size, sums_at + 4 * (row * num_groups + group)
                    add_at, stride = totals_at + 4 * row * PANEL, 4 * num_groups
                    if count == 1:
                        multiply_group(1, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 2:
                        multiply_group(2, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 3:
                        multiply_group(3, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 4:
                        multiply_group(4, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 5:
                        multiply_group(5, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    else:
                        multiply_group(6, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
            begin = panel * PANEL
            for row in range(rows):
                scale = x_scale[first + row] * factor
                for n in range(min(PANEL, N - begin)):
                    out[first + row, begin + n] = totals[row, n] * scale

    return TaskKernel(multiply_int4, "multiply-int4", least=0)


def is_supported() -> bool:
    """Whether this CPU and numba's target have the instructions."""
    features = set(jit.target()[1].split(","))
    if "+avx512f" in features:
        return torch.cpu._is_vnni_supported() and features >= _FEATURES
    return torch.cpu._is_avx2_supported() and features >= _AVX2_FEATURES


def multiply(blocks: Tensor, factor: float, size: int, num_outputs: int, x_MK: Tensor, x_scale_M1: Tensor) -> Tensor:
    """[M, N] of inputs as `ops.quantise` rounds them; the last group of `size` inputs may be partly beyond K.

    The stored scales are multiplied with `factor`.
    """
    x_MK = x_MK.contiguous()
    (num_rows, num_inputs), (num_panels, num_groups, _) = x_MK.shape, blocks.shape
    out_MN = empty((num_rows, num_outputs))
    addresses = blocks.data_ptr(), x_MK.data_ptr(), x_scale_M1.data_ptr(), out_MN.data_ptr()
    sizes = num_rows, num_inputs, num_outputs, num_groups, size
    kernel, part_rows = _kernel(), _CHUNK_ROWS
    if num_rows > amx.ROWS and amx_int4.is_supported(size):  # fewer do not fill the rows of a tile
        kernel, part_rows = amx_int4.make_kernel(), amx_int4.PART_ROWS
    kernel(num_panels * -(-num_rows // part_rows), 1, *addresses, *sizes, jit.bits(factor))
    return out_MN
