"""Norms, gates and rounding: one pass over each row, which stays in the cache until it is stored.

A kernel reads float32 or bfloat16, computes in float32, and stores float32, bfloat16, or integers around 128 with a
scale for the row. Each row is computed independently, always in the same order.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload
from torch import Tensor

from pdserve.engine.cpu.kernels import instructions
from pdserve.engine.cpu.kernels.arithmetic import exp, narrow, widen
from pdserve.engine.cpu.kernels.jit import bits, inlined
from pdserve.engine.cpu.kernels.rounding import LEAST_SCALE, LEVELS, ZERO_POINT
from pdserve.engine.cpu.kernels.task import FLOAT32, INT64, KINDS, TaskKernel, pointer, take

_LEAST_WORK: Final = 1 << 16  # elements below which a second thread costs more than it gains
_GATE_WORK: Final = 8  # an exponential, in elements of a norm
_LANES: Final = 16
_TURNS: Final = 64  # of a kernel, at least, so that many threads finish together
_MOST_AT_ONCE: Final = 16
_SPAN: Final = 512  # values of which the largest is found at a time


def norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float, out_TE: Tensor, scale_T1: Tensor) -> None:
    """Stores the RMS norm of x in `out_TE`, after `delta_TE`, if any, was added to x in place.

    `scale_T1` is written only if `out_TE` is uint8. x is float32 if there is a delta.
    """
    num_rows, size = x_TE.shape
    kernel = _norm(_name(x_TE), "" if delta_TE is None else _name(delta_TE), _name(out_TE))
    delta = 0 if delta_TE is None else delta_TE.data_ptr()
    addresses = x_TE.data_ptr(), delta, weight_E.data_ptr(), out_TE.data_ptr(), scale_T1.data_ptr()
    kernel(num_rows, num_rows * size, size, bits(eps), *addresses)


def gate(name: str, gate_up: Tensor, out_TF: Tensor, scale_T1: Tensor) -> None:
    """Stores silu(gate) * up, or gelu(gate) * up with the tanh form of gelu, for [T, 2F]: gate, then up."""
    num_rows, size = out_TF.shape
    kernel = _gate(name, _name(gate_up), _name(out_TF))
    kernel(num_rows, _GATE_WORK * num_rows * size, size, gate_up.data_ptr(), out_TF.data_ptr(), scale_T1.data_ptr())


def rounded(x_TK: Tensor, out_TK: Tensor, scale_T1: Tensor) -> None:
    """Stores the rounded rows."""
    num_rows, size = x_TK.shape
    kernel = _rounded(_name(x_TK), _name(out_TK))
    kernel(num_rows, num_rows * size, size, x_TK.data_ptr(), out_TK.data_ptr(), scale_T1.data_ptr())


def add_bias(x_TN: Tensor, bias_N: Tensor) -> None:
    """Adds a float32 bias to each row in place."""
    num_rows, size = x_TN.shape
    _add_bias(_name(x_TN))(num_rows, num_rows * size, size, x_TN.data_ptr(), bias_N.data_ptr())


def argmax(x_TV: Tensor, out_T: Tensor) -> None:
    """Stores the index of the first of the largest values of each row; NaN is not larger than any. x is float32."""
    num_rows, size = x_TV.shape
    _argmax()(num_rows, num_rows * size, size, x_TV.data_ptr(), out_T.data_ptr())


def _name(x: Tensor) -> str:
    return _NAMES[x.dtype]


_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}


@inlined
def rows_at_once(num_rows: Any) -> Any:
    """How many rows a thread takes: threads that count by single rows wait for each other at the counter."""
    return min(max(num_rows // _TURNS, 1), _MOST_AT_ONCE)


@intrinsic
def _most_of(_context: Any, address: Any, steps: Any, first: Any, is_size: Any) -> Any:
    """The largest of `first` and of 16 * steps values, or of their magnitudes; `is_size` is a literal.

    LLVM compares one value at a time, because a NaN forbids another order. Here each lane ignores NaN.
    """
    if not isinstance(is_size, types.IntegerLiteral):
        return None

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        long, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), _LANES)
        address, steps, first, _ = args

        def larger(held: Any, new: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", new, held), new, held)

        start = instructions.broadcast(builder, first, _LANES)
        before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", steps, long(0)), loop, done)
        builder.position_at_end(loop)
        step, held = builder.phi(long), builder.phi(vector)
        at = builder.add(address, builder.mul(step, long(4 * _LANES)))
        values = builder.load(builder.inttoptr(at, vector.as_pointer()))
        values.align = 4
        if is_size.literal_value:
            values = instructions.magnitude(builder, values)
        new, following = larger(held, values), builder.add(step, long(1))
        for phi, initial, changed in ((step, long(0), following), (held, start, new)):
            phi.add_incoming(initial, before)
            phi.add_incoming(changed, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
        builder.position_at_end(done)
        most = builder.phi(vector)
        most.add_incoming(start, before)
        most.add_incoming(new, loop)
        width = _LANES // 2
        while width:
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [lane ^ width for lane in range(_LANES)])
            most = larger(most, builder.shuffle_vector(most, most, lanes))
            width //= 2
        return builder.extract_element(most, long(0))

    return types.float32(types.int64, types.int64, types.float32, is_size), generate


@inlined
def largest(values: Any, first: Any) -> Any:
    """The largest of `first` and the float32 values; ignores NaN."""
    steps = np.int64(values.size) // _LANES
    most = _most_of(np.int64(values.ctypes.data), steps, first, 0)
    for i in range(steps * _LANES, values.size):
        most = max(most, values[i])
    return most


@inlined
def largest_size(values: Any, first: Any) -> Any:
    """The same of magnitudes."""
    steps = np.int64(values.size) // _LANES
    most = _most_of(np.int64(values.ctypes.data), steps, first, 1)
    for i in range(steps * _LANES, values.size):
        most = max(most, abs(values[i]))
    return most


def store(held: Any, out: Any, scale: Any, row: Any) -> Any:
    """Rounds the row `held`, in float32, to out[row], by the dtype of `out`. For kernels."""
    raise NotImplementedError


@overload(store, inline="always")
def _store(held: Any, out: Any, scale: Any, row: Any) -> Any:
    return {types.float32: _store_float32, types.uint16: _store_bfloat16}.get(out.dtype, _store_integers)


def _store_float32(held: Any, out: Any, scale: Any, row: Any) -> Any:
    target = out[row]
    for i in range(np.uint64(held.size)):
        target[i] = held[i]


def _store_bfloat16(held: Any, out: Any, scale: Any, row: Any) -> Any:
    target = out[row]
    for i in range(np.uint64(held.size)):
        target[i] = narrow(held[i])


def _store_integers(held: Any, out: Any, scale: Any, row: Any) -> Any:
    target, most = out[row], largest_size(held, np.float32(LEAST_SCALE))
    scale[row] = most / np.float32(LEVELS)
    factor = np.float32(LEVELS) / most
    for i in range(np.uint64(held.size)):
        target[i] = np.uint8(np.int32(np.rint(held[i] * factor)) + np.int32(ZERO_POINT))


@cache
def _norm(x_kind: str, delta_kind: str, out_kind: str) -> TaskKernel:
    X, DELTA, OUT, HAS_DELTA = KINDS[x_kind], KINDS.get(delta_kind, FLOAT32), KINDS[out_kind], bool(delta_kind)

    def norm_rows(task: Any) -> None:
        rows, size, eps = task[2], task[3], np.float32(np.int64(task[4]).view(np.float64))
        x = carray(pointer(task[5], X), (rows, size))
        delta = carray(pointer(task[6], DELTA), (rows, size))
        weight = carray(pointer(task[7], FLOAT32), (size,))
        out = carray(pointer(task[8], OUT), (rows, size))
        scale = carray(pointer(task[9], FLOAT32), (rows,))
        held = np.empty(size, np.float32)
        at_once = rows_at_once(rows)
        while True:
            first = take(task, 0) * at_once
            if first >= rows:
                return
            for row in range(first, min(first + at_once, rows)):
                source, total = x[row], np.float32(0)
                if HAS_DELTA:
                    change = delta[row]
                    for i in range(np.uint64(size)):
                        value = source[i] + widen(change[i])
                        source[i] = value
                        total += value * value
                else:
                    for i in range(np.uint64(size)):
                        value = widen(source[i])
                        total += value * value
                factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
                for i in range(np.uint64(size)):
                    held[i] = widen(source[i]) * factor * weight[i]
                store(held, out, scale, row)

    return TaskKernel(norm_rows, f"norm-{x_kind}-{delta_kind or 'none'}-{out_kind}", least=_LEAST_WORK)


@inlined
def _silu(x: Any) -> Any:
    return x / (np.float32(1) + exp(-x))


@inlined
def _gelu(x: Any) -> Any:
    """(1 + tanh(u)) / 2 is 1 / (1 + e^-2u): one exponential, and no cancellation if tanh is near -1."""
    u2 = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)  # 2 sqrt(2 / pi)
    return x / (np.float32(1) + exp(-u2))


@cache
def _gate(name: str, in_kind: str, out_kind: str) -> TaskKernel:
    IN, OUT, IS_SILU = KINDS[in_kind], KINDS[out_kind], name == "silu"

    def gate_rows(task: Any) -> None:
        rows, size = task[2], task[3]
        gate_up = carray(pointer(task[4], IN), (rows, 2 * size))
        out = carray(pointer(task[5], OUT), (rows, size))
        scale = carray(pointer(task[6], FLOAT32), (rows,))
        held = np.empty(size, np.float32)
        at_once = rows_at_once(rows)
        while True:
            first = take(task, 0) * at_once
            if first >= rows:
                return
            for row in range(first, min(first + at_once, rows)):
                gate, up = gate_up[row, :size], gate_up[row, size:]
                if IS_SILU:
                    for i in range(np.uint64(size)):
                        held[i] = _silu(widen(gate[i])) * widen(up[i])
                else:
                    for i in range(np.uint64(size)):
                        held[i] = _gelu(widen(gate[i])) * widen(up[i])
                store(held, out, scale, row)

    return TaskKernel(gate_rows, f"gate-{name}-{in_kind}-{out_kind}", least=_LEAST_WORK)


@cache
def _rounded(in_kind: str, out_kind: str) -> TaskKernel:
    IN, OUT = KINDS[in_kind], KINDS[out_kind]

    def round_rows(task: Any) -> None:
        rows, size = task[2], task[3]
        x = carray(pointer(task[4], IN), (rows, size))
        out = carray(pointer(task[5], OUT), (rows, size))
        scale = carray(pointer(task[6], FLOAT32), (rows,))
        held = np.empty(size, np.float32)
        at_once = rows_at_once(rows)
        while True:
            first = take(task, 0) * at_once
            if first >= rows:
                return
            for row in range(first, min(first + at_once, rows)):
                source = x[row]
                for i in range(np.uint64(size)):
                    held[i] = widen(source[i])
                store(held, out, scale, row)

    return TaskKernel(round_rows, f"round-{in_kind}-{out_kind}", least=_LEAST_WORK)


@cache
def _add_bias(kind: str) -> TaskKernel:
    KIND, IS_BFLOAT16 = KINDS[kind], kind == "bfloat16"

    def add_bias_to_rows(task: Any) -> None:
        rows, size = task[2], task[3]
        x = carray(pointer(task[4], KIND), (rows, size))
        bias = carray(pointer(task[5], FLOAT32), (size,))
        at_once = rows_at_once(rows)
        while True:
            first = take(task, 0) * at_once
            if first >= rows:
                return
            for row in range(first, min(first + at_once, rows)):
                target = x[row]
                for i in range(np.uint64(size)):
                    value = widen(target[i]) + bias[i]
                    target[i] = narrow(value) if IS_BFLOAT16 else value

    return TaskKernel(add_bias_to_rows, f"add-bias-{kind}", least=_LEAST_WORK)


@cache
def _argmax() -> TaskKernel:
    def find_largest(task: Any) -> None:
        rows, size = task[2], task[3]
        x = carray(pointer(task[4], FLOAT32), (rows, size))
        out = carray(pointer(task[5], INT64), (rows,))
        at_once = rows_at_once(rows)
        while True:
            first = take(task, 0) * at_once
            if first >= rows:
                return
            for row in range(first, min(first + at_once, rows)):
                most, begin = np.float32(-np.inf), 0
                for span in range(0, size, _SPAN):  # the span of the first largest value, which is then searched
                    here = largest(x[row, span : min(span + _SPAN, size)], np.float32(-np.inf))
                    if here > most:
                        most, begin = here, span
                out[row] = 0
                for i in range(begin, min(begin + _SPAN, size)):
                    if x[row, i] == most:
                        out[row] = i
                        break

    return TaskKernel(find_largest, "argmax", least=_LEAST_WORK)
