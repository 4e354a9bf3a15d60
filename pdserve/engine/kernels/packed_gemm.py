"""The product of few rows with packed weights, at memory bandwidth.

oneDNN stores a float32 matrix in panels of 64 outputs, [N / 64, K, 64], and multiplies few rows with it at two thirds
of the rate at which the weights can be read, because it waits for memory and then computes. Here a block of weights is
multiplied with all rows while the next block is prefetched. An output is added in oneDNN's order, by fused multiply-add
over k, with partial sums of `chunk` inputs. The bits are therefore equal, and a row may use either product.
`find_chunk` tests this before the kernel is used for a weight.
"""

# Shapes: M rows, K inputs, N outputs.

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from pdserve.engine.kernels import jit, openmp

PANEL: Final = 64  # outputs

_LANES = 16
_VECTORS = PANEL // _LANES
_GROUP = 6  # rows at a time: with four vectors of a panel each, they fill the registers
_BLOCK = 64  # inputs: their weights are 16 KiB, half of the L1 cache
_LINE = 64
_INPUT_BYTES = PANEL * 4  # of a panel's weights for one input
_CHUNKS: Final = (4096, 2048, 1024, 512, 256, 128)
_TRIED_ROWS: Final = (5, 33)
_FIELDS: Final = 8


@intrinsic
def _multiply(
    _context: Any, rows: Any, w: Any, x: Any, x_stride: Any, sums: Any, count: Any, is_first: Any, ahead: Any, step: Any
) -> Any:
    """sums[r, 0:64] += x[r, k] * w[k, 0:64] for k = 0 .. count - 1, in order; `rows` is a literal.

    All arguments but counts and flags are addresses. The sums begin at 0 if `is_first`. Two cache lines are prefetched
    with each k, from `ahead` on, `step` bytes further each time; any address is harmless.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    num_rows = rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        single, long, word, byte = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
        vector = ir.VectorType(single, _LANES)
        _, w, x, x_stride, sums, count, is_first, ahead, step = args
        w, x, sums = (builder.inttoptr(one, single.as_pointer()) for one in (w, x, sums))
        fma = builder.module.declare_intrinsic(
            f"llvm.fma.v{_LANES}f32", fnty=ir.FunctionType(vector, [vector, vector, vector])
        )
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch.p0", fnty=ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        )

        def place(base: Any, row: int, part: int) -> Any:
            return builder.bitcast(builder.gep(base, [long(row * PANEL + part * _LANES)]), vector.as_pointer())

        def load(pointer: Any) -> Any:
            value = builder.load(pointer)
            value.align = 4
            return value

        tiles = [(row, part) for row in range(num_rows) for part in range(_VECTORS)]
        zero, begins = ir.Constant(vector, [0.0] * _LANES), builder.icmp_signed("!=", is_first, long(0))
        starts = [builder.select(begins, zero, load(place(sums, *tile))) for tile in tiles]
        entry = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(long)
        k.add_incoming(long(0), entry)
        held = [builder.phi(vector) for _ in tiles]
        for value, start in zip(held, starts, strict=True):
            value.add_incoming(start, entry)
        line = builder.inttoptr(builder.add(ahead, builder.mul(k, step)), byte.as_pointer())
        for offset in (0, _LINE):
            builder.call(fetch, [builder.gep(line, [long(offset)]), word(0), word(2), word(1)])
        w_k = builder.gep(w, [builder.mul(k, long(PANEL))])
        weights = [load(place(w_k, 0, part)) for part in range(_VECTORS)]
        undefined = ir.Constant(vector, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(word, _LANES), [0] * _LANES)
        added = []
        for row in range(num_rows):
            one = builder.load(builder.gep(x, [builder.add(builder.mul(x_stride, long(row)), k)]))
            every = builder.shuffle_vector(builder.insert_element(undefined, one, word(0)), undefined, lanes)
            added += [
                builder.call(fma, [every, weights[part], held[row * _VECTORS + part]]) for part in range(_VECTORS)
            ]
        following = builder.add(k, long(1))
        k.add_incoming(following, loop)
        for value, new in zip(held, added, strict=True):
            value.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        for tile, new in zip(tiles, added, strict=True):
            builder.store(new, place(sums, *tile)).align = 4
        return context.get_dummy_value()

    return types.none(rows, *([types.int64] * 8)), generate


@intrinsic
def _take(_context: Any, counter: Any) -> Any:
    """Atomically increments the number at `counter` and returns the old value, so each thread gets another number."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def _floats(_context: Any, address: Any) -> Any:
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64), generate


@njit(error_model="numpy", inline="never")
def _group(
    rows: int, w: int, x: int, x_stride: int, sums: int, count: int, is_first: int, ahead: int, step: int
) -> None:
    if rows == 1:
        _multiply(1, w, x, x_stride, sums, count, is_first, ahead, step)
    elif rows == 2:
        _multiply(2, w, x, x_stride, sums, count, is_first, ahead, step)
    elif rows == 3:
        _multiply(3, w, x, x_stride, sums, count, is_first, ahead, step)
    elif rows == 4:
        _multiply(4, w, x, x_stride, sums, count, is_first, ahead, step)
    elif rows == 5:
        _multiply(5, w, x, x_stride, sums, count, is_first, ahead, step)
    else:
        _multiply(6, w, x, x_stride, sums, count, is_first, ahead, step)


def _panels(task: Any) -> None:
    """Takes panels until none is left. `task` is a counter, followed by the values of `Panels.__call__`."""
    w, x, out_at, M = task[1], task[2], task[3], task[4]
    K, N, chunk = task[5], task[6], task[7]
    out = carray(_floats(out_at), (M, N))
    sums = np.empty((M, PANEL), np.float32)
    sums_at = np.int64(sums.ctypes.data)
    num_groups = (M + _GROUP - 1) // _GROUP
    # The first groups prefetch a block's lines, four for each input: two each with two groups, one each with four.
    step = np.int64(_LINE if num_groups > 3 else 2 * _LINE)
    while True:
        panel = _take(task)
        if panel >= N // PANEL:
            return
        for first in range(0, K, chunk):
            end = min(first + chunk, K)
            for k in range(first, end, _BLOCK):
                block, count = w + (panel * K + k) * _INPUT_BYTES, min(_BLOCK, end - k)
                for group in range(num_groups):
                    row = group * M // num_groups
                    rows = (group + 1) * M // num_groups - row
                    ahead = block + (_BLOCK * _INPUT_BYTES + group * _BLOCK * step)
                    if num_groups == 1 or group * step >= _INPUT_BYTES:
                        ahead = block  # these are in the cache already
                    x_at, sum_at = x + (row * K + k) * 4, sums_at + row * _INPUT_BYTES
                    _group(rows, block, x_at, K, sum_at, count, np.int64(k == first), ahead, step)
            target = out[:, panel * PANEL : (panel + 1) * PANEL]
            for row in range(M):
                for n in range(PANEL):
                    target[row, n] = sums[row, n] if first == 0 else target[row, n] + sums[row, n]


@cache
def _kernel() -> Callable[[int], None]:
    compiled = jit.c_function(types.void(types.CPointer(types.int64)), _panels)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


@final
class Panels:
    """Packed weights in oneDNN's layout; `packed` owns the memory."""

    def __init__(self, packed: Tensor, num_outputs: int, num_inputs: int, chunk: int) -> None:
        self._packed = packed
        self._address = torch.ops.mkldnn.data_ptr(packed)
        self._sizes = (num_inputs, num_outputs, chunk)

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N], for any number of rows; faster than oneDNN for few."""
        x_MK = x_MK.contiguous()
        num_rows = x_MK.shape[0]
        out_MN = x_MK.new_empty(num_rows, self._sizes[1])
        task = (ctypes.c_int64 * _FIELDS)(0, self._address, x_MK.data_ptr(), out_MN.data_ptr(), num_rows, *self._sizes)
        openmp.run(_kernel(), ctypes.addressof(task))
        return out_MN


def is_supported() -> bool:
    """Whether vector registers are wide enough on this CPU and in numba's target."""
    return torch.cpu._is_avx512_supported() and "+avx512f" in jit.target()[1].split(",")


def make_panels(packed: Tensor, num_outputs: int, num_inputs: int) -> Panels | None:
    """None if oneDNN packs or adds differently on this machine, or if there are too few registers for the kernel."""
    is_whole = num_outputs % PANEL == 0 and torch.ops.mkldnn._nbytes(packed) == 4 * num_outputs * num_inputs
    if not is_whole or not is_supported():
        return None
    shape = (num_outputs, num_inputs)
    if shape not in _chunk_of:
        _chunk_of[shape] = _find_chunk(packed, *shape)
    chunk = _chunk_of[shape]
    return None if chunk is None else Panels(packed, num_outputs, num_inputs, chunk)


_chunk_of: Final[dict[tuple[int, int], int | None]] = {}  # by outputs and inputs: oneDNN chooses by the shape


def _find_chunk(packed: Tensor, num_outputs: int, num_inputs: int) -> int | None:
    """The number of inputs in oneDNN's partial sums: the one that gives the same bits, for few rows and for more."""
    for chunk in _CHUNKS:
        if chunk < 2 * num_inputs and all(_agree(packed, num_outputs, num_inputs, chunk, rows) for rows in _TRIED_ROWS):
            return chunk
    return None


def _agree(packed: Tensor, num_outputs: int, num_inputs: int, chunk: int, num_rows: int) -> bool:
    x_MK = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows))
    expected: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, packed, None, "none", [], "")
    return torch.equal(Panels(packed, num_outputs, num_inputs, chunk)(x_MK), expected)
