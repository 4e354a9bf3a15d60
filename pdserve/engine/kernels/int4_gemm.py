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
from llvmlite import binding, ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from pdserve.engine.kernels import instructions, jit
from pdserve.engine.kernels.int4_layout import PANEL, STEP
from pdserve.engine.kernels.task import FLOAT32, UINT8, TaskKernel, pointer, take
from pdserve.engine.rounding import ZERO_POINT

binding.initialize_native_asmparser()  # for the instruction that has no stable name in LLVM

_FEATURES: Final = {"+avx512f", "+avx512vnni"}
_LANES: Final = 16
_VECTORS: Final = PANEL // _LANES
_LINE: Final = 64
_STEP_BYTES = PANEL * STEP // 2
_SCALE_BYTES = 2
_ROUNDING_BYTES = PANEL * (_SCALE_BYTES + 1)  # scales and zeros of a block
_PACKED_ROWS = 4
_MOST_ROWS = 6  # with four vectors of a panel each, they fill the registers
_CHUNK_ROWS = 48  # rows whose inputs stay in the cache while all panels are multiplied with them
_AHEAD = 4096  # bytes from the weights that are multiplied to those that are prefetched


@intrinsic
def _multiply(
    _context: Any,
    rows: Any,
    block: Any,
    wide: Any,
    x: Any,
    x_stride: Any,
    sums: Any,
    sum_stride: Any,
    totals: Any,
    steps: Any,
) -> Any:
    """Adds the products of one group to totals[r, 0:64]; `rows` is a literal.

    `block`, `x`, `sums` and `totals` are the addresses of a block, of the first row's int8 inputs, of the sum of its
    inputs, and of its float32 results; strides are in bytes. Few rows unpack the block themselves. More would not leave
    enough registers: they read the weights at `wide`, one per byte. The prefetched addresses may be beyond the weights.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    num_rows = rows.literal_value
    is_packed = num_rows <= _PACKED_ROWS

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        long, word, byte, single = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
        words, singles = ir.VectorType(word, _LANES), ir.VectorType(single, _LANES)
        _, block, wide, x, x_stride, sums, sum_stride, totals, steps = args
        asm = ir.InlineAsm(ir.FunctionType(words, [words, words, words]), "vpdpbusd $3, $2, $0", "=v,0,v,v")

        def at(address: Any, offset: int) -> Any:
            return builder.add(address, long(offset))

        def load(address: Any, of: Any) -> Any:
            value = builder.load(builder.inttoptr(address, of.as_pointer()))
            value.align = 1
            return value

        def constant(value: int) -> Any:
            return ir.Constant(words, [value] * _LANES)

        def prefetch(address: Any) -> None:
            instructions.prefetch(builder, builder.inttoptr(at(address, _AHEAD), byte.as_pointer()))

        tiles = [(row, part) for row in range(num_rows) for part in range(_VECTORS)]
        row_x = [builder.add(x, builder.mul(x_stride, long(row))) for row in range(num_rows)]
        entry = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(long)
        step.add_incoming(long(0), entry)
        held = [builder.phi(words) for _ in tiles]
        for value in held:
            value.add_incoming(constant(0), entry)
        packed_at = builder.add(block, builder.mul(step, long(_STEP_BYTES)))
        wide_at = builder.add(wide, builder.mul(step, long(2 * _STEP_BYTES)))
        lines = [part * _LINE for part in range(_VECTORS)]
        for line in lines:
            prefetch(at(packed_at, line))
        if is_packed:
            packed = [load(at(packed_at, line), words) for line in lines]
            halves = [
                [builder.and_(one, constant(0x0F0F0F0F)) for one in some]
                for some in (packed, [builder.lshr(one, constant(4)) for one in packed])
            ]
        else:
            halves = [[load(at(wide_at, half * _STEP_BYTES + line), words) for line in lines] for half in range(2)]
        added: list[Any] = list(held)
        for half, weights in enumerate(halves):
            for row in range(num_rows):
                inputs_at = at(builder.add(row_x[row], builder.mul(step, long(STEP))), STEP // 2 * half)
                inputs = instructions.broadcast(builder, load(inputs_at, word), _LANES)
                for part in range(_VECTORS):
                    tile = row * _VECTORS + part
                    added[tile] = builder.call(asm, [added[tile], weights[part], inputs])
        following = builder.add(step, long(1))
        step.add_incoming(following, loop)
        for value, new in zip(held, added, strict=True):
            value.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
        builder.position_at_end(done)
        scales_at = builder.add(block, builder.mul(steps, long(_STEP_BYTES)))
        zeros_at = at(scales_at, PANEL * _SCALE_BYTES)
        for line in range(0, _ROUNDING_BYTES, _LINE):
            prefetch(at(scales_at, line))
        halves_of_words, bytes_ = ir.VectorType(ir.HalfType(), _LANES), ir.VectorType(byte, _LANES)
        parts = [part * _LANES for part in range(_VECTORS)]
        scales = [builder.fpext(load(at(scales_at, _SCALE_BYTES * part), halves_of_words), singles) for part in parts]
        zeros = [builder.uitofp(builder.zext(load(at(zeros_at, part), bytes_), words), singles) for part in parts]
        for row in range(num_rows):
            total = load(builder.add(sums, builder.mul(sum_stride, long(row))), single)
            negative = instructions.broadcast(builder, builder.fneg(total), _LANES)
            for part in range(_VECTORS):
                whole = builder.sitofp(added[row * _VECTORS + part], singles)
                exact = instructions.fused(builder, negative, zeros[part], whole)
                target = at(totals, 4 * (row * PANEL + parts[part]))
                new = instructions.fused(builder, exact, scales[part], load(target, singles))
                builder.store(new, builder.inttoptr(target, singles.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.none(rows, *([types.int64] * 8)), generate


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
        block_bytes, most = steps * _STEP_BYTES + _ROUNDING_BYTES, min(M, _CHUNK_ROWS)
        signed, sums = np.zeros((most, num_inputs), np.uint8), np.empty((most, num_groups), np.float32)
        totals, wide = np.empty((most, PANEL), np.float32), np.empty((steps, 2, _STEP_BYTES), np.uint8)
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
            num_parts = (rows + _MOST_ROWS - 1) // _MOST_ROWS
            for group in range(num_groups):
                block = blocks + (panel * num_groups + group) * block_bytes
                if rows > _PACKED_ROWS:
                    packed = carray(pointer(block, UINT8), (steps, _STEP_BYTES))
                    for step in range(steps):
                        for i in range(_STEP_BYTES):
                            wide[step, 0, i] = packed[step, i] & np.uint8(15)
                            wide[step, 1, i] = packed[step, i] >> np.uint8(4)
                for part in range(num_parts):
                    row = part * rows // num_parts
                    count = (part + 1) * rows // num_parts - row
                    x_at, sum_at = signed_at + row * num_inputs + group * size, sums_at + 4 * (row * num_groups + group)
                    add_at, stride = totals_at + 4 * row * PANEL, 4 * num_groups
                    if count == 1:
                        _multiply(1, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 2:
                        _multiply(2, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 3:
                        _multiply(3, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 4:
                        _multiply(4, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    elif count == 5:
                        _multiply(5, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
                    else:
                        _multiply(6, block, wide_at, x_at, num_inputs, sum_at, stride, add_at, steps)
            begin = panel * PANEL
            for row in range(rows):
                scale = x_scale[first + row] * factor
                for n in range(min(PANEL, N - begin)):
                    out[first + row, begin + n] = totals[row, n] * scale

    return TaskKernel(multiply_int4, "multiply-int4", least=0)


def is_supported() -> bool:
    """Whether this CPU and numba's target have the instructions."""
    return torch.cpu._is_vnni_supported() and set(jit.target()[1].split(",")) >= _FEATURES


def multiply(blocks: Tensor, factor: float, size: int, num_outputs: int, x_MK: Tensor, x_scale_M1: Tensor) -> Tensor:
    """[M, N] of inputs as `ops.quantise` rounds them; the last group of `size` inputs may be partly beyond K.

    The stored scales are multiplied with `factor`.
    """
    x_MK = x_MK.contiguous()
    (num_rows, num_inputs), (num_panels, num_groups, _) = x_MK.shape, blocks.shape
    out_MN = torch.empty((num_rows, num_outputs))
    addresses = blocks.data_ptr(), x_MK.data_ptr(), x_scale_M1.data_ptr(), out_MN.data_ptr()
    sizes = num_rows, num_inputs, num_outputs, num_groups, size
    _kernel()(num_panels * -(-num_rows // _CHUNK_ROWS), 1, *addresses, *sizes, jit.bits(factor))
    return out_MN
