"""Paged attention, which reads KV blocks in place: softmax(cap(scale * q k)) v, one pass over a row's blocks.

One kernel serves any number of queries per row: decode rows, rows with drafts, prefill chunks. A query's result depends
only on its own numbers and position: its tiles are its visible blocks in order, and its arithmetic is the same loop for
any number of queries. So a position gives the same bits alone or in a chunk, in any batch, with any number of threads.
"""

# Shapes: H query heads, K kv heads, G = H / K, D head dim, C tokens per block, Q queries of a task, R = Q * G.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pdserve.engine.kernels import jit
from pdserve.engine.kernels.bfloat16 import widen
from pdserve.engine.kernels.exponential import exp2

MAX_QUERIES: Final = 16  # of one task
TASK_FIELDS: Final = 6  # first of its blocks in the tables, position and index of its first query, Q, kv heads from, to

_LINE_BYTES = 64
_ONE, _TWO = np.float32(1), np.float32(2)
_UNSEEN = np.float32(-1e30)
_LOG2_E = np.float32(1 / math.log(2))


@intrinsic
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line of array[index]; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch.p0", fnty=ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        )
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(function, [address, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.none(array, index), generate


@njit(fastmath=True)
def largest(scores: Any, first: Any) -> Any:
    """Ignores NaN, which a vector maximum cannot preserve; the weights computed from the scores do preserve it."""
    largest = first
    for score in scores:
        largest = max(largest, score)
    return largest


def make_attend(head_dim: int, block_size: int, stored: str) -> Callable[..., None]:
    """The kernel for one shape and dtype of the pool (float32, bfloat16 or int8), compiled at its first call.

    attend(q, data, scales, out, tables, tasks, first, last, num_heads, num_kv_heads, pool_heads, block_stride,
    layer_start, scale_stride, scale_start, window, scale, softcap, scratch) computes tasks[first:last]. All arrays but
    `tasks` are flat: q and out are [T, H, D], data the pool in its own dtype (bfloat16 as `words`), scales the same
    memory as float32. A position has `pool_heads` kv heads in the pool, of which `num_kv_heads` are used, from the
    starts on. Strides and starts are in elements; window and softcap are 0 if there is none. A row's last block is read
    to its end, so its unused positions must be finite.
    """
    D, C = head_dim, block_size
    U = np.uint64
    is_int8, is_staged = stored == "int8", stored != "float32"  # staged: each tile is widened before it is used
    per_line = _LINE_BYTES // {"int8": 1, "bfloat16": 2, "float32": 4}[stored]

    def attend(
        q: Any,
        data: Any,
        scales: Any,
        out: Any,
        tables: Any,
        tasks: Any,
        first: int,
        last: int,
        num_heads: int,
        num_kv_heads: int,
        pool_heads: int,
        block_stride: int,
        layer_start: int,
        scale_stride: int,
        scale_start: int,
        window: int,
        scale: float,
        softcap: float,
        scratch: Any,
    ) -> None:
        G = num_heads // num_kv_heads
        part = C * pool_heads * D
        stride = U(pool_heads * D)
        is_all = pool_heads == num_kv_heads  # otherwise a position's heads are a run between those of other ranks
        run_lines = -(-num_kv_heads * D // per_line)
        q_scale = np.float32(scale) * _LOG2_E
        cap = np.float32(softcap) * _LOG2_E
        for task in range(first, last):
            table = tasks[task, 0]
            start = tasks[task, 1]
            first_query = tasks[task, 2]
            num_queries = tasks[task, 3]
            head_from = tasks[task, 4]
            head_to = tasks[task, 5]
            R = num_queries * G
            num_states = R * (head_to - head_from)
            keys = scratch[: C * D]
            values = scratch[C * D : 2 * C * D]
            score = scratch[2 * C * D : 2 * C * D + C]
            rest = scratch[2 * C * D + C :]
            queries = rest[: num_states * D]
            sums = rest[num_states * D : 2 * num_states * D]
            maxima = rest[2 * num_states * D : 2 * num_states * D + num_states]
            weights = rest[2 * num_states * D + num_states : 2 * num_states * D + 2 * num_states]
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                source = U((token * num_heads + head) * D)
                target = U(state * D)
                for d in range(U(D)):
                    queries[target + d] = q[source + d] * q_scale
                    sums[target + d] = np.float32(0)
                maxima[state] = _UNSEEN
                weights[state] = np.float32(0)
            first_page = 0 if window == 0 else max(0, start - window + 1) // C
            last_page = (start + num_queries - 1) // C
            for page in range(first_page, last_page + 1):
                block = np.int64(tables[table + page])
                base = block * block_stride + layer_start
                scale_base = block * scale_stride + scale_start
                ahead = np.int64(tables[table + min(page + 1, last_page)]) * block_stride + layer_start
                lines = (2 * part) // per_line if is_all else 2 * C * run_lines
                for h in range(head_from, head_to):
                    k0 = U(base + h * D)
                    v0 = U(base + part + h * D)
                    if is_staged:
                        for c in range(U(C)):
                            for d in range(U(D)):
                                keys[c * U(D) + d] = widen(data[k0 + c * stride + d])
                            for d in range(U(D)):
                                values[c * U(D) + d] = widen(data[v0 + c * stride + d])
                    for r in range(R):
                        position = start + r // G
                        seen_to = min(C, position + 1 - page * C)
                        seen_from = 0 if window == 0 else max(0, position - window + 1 - page * C)
                        if seen_from >= seen_to:
                            continue
                        state = (h - head_from) * R + r
                        line_from, line_to = state * lines // num_states, (state + 1) * lines // num_states
                        if is_all:
                            for line in range(line_from, line_to):
                                _prefetch(data, ahead + line * per_line)
                        else:
                            for run in range(line_from // run_lines, -(-line_to // run_lines)):
                                shift = ahead + run * (pool_heads * D - run_lines * per_line)
                                first_line = max(line_from, run * run_lines)
                                for line in range(first_line, min(line_to, (run + 1) * run_lines)):
                                    _prefetch(data, shift + line * per_line)
                        q0 = U(state * D)
                        for c in range(U(C)):
                            dot = np.float32(0)
                            if is_staged:
                                for d in range(U(D)):
                                    dot += queries[q0 + d] * keys[c * U(D) + d]
                            else:
                                for d in range(U(D)):
                                    dot += queries[q0 + d] * data[k0 + c * stride + d]
                            score[c] = dot
                        if is_int8:
                            for c in range(U(C)):
                                score[c] *= scales[U(scale_base) + c * U(pool_heads) + U(h)]
                        if cap > 0:
                            for c in range(U(C)):
                                # cap * tanh(x / cap), by 2^y, y <= 0; x carries the factor log2(e), and so does cap.
                                small = exp2(-abs(score[c]) * _TWO * _LOG2_E / cap)
                                bounded = cap * (_ONE - small) / (_ONE + small)
                                score[c] = -bounded if score[c] < 0 else bounded
                        if seen_from > 0 or seen_to < C:
                            for c in range(C):
                                if c < seen_from or c >= seen_to:
                                    score[c] = _UNSEEN
                        old = maxima[state]
                        new = largest(score, old)
                        if new > old:
                            shrink = exp2(old - new)
                            weights[state] *= shrink
                            for d in range(U(D)):
                                sums[q0 + d] *= shrink
                            maxima[state] = new
                        total = np.float32(0)
                        for c in range(U(C)):
                            weight = exp2(score[c] - new)
                            weight = np.float32(0) if score[c] == _UNSEEN else weight
                            score[c] = weight
                            total += weight
                        weights[state] += total
                        if is_int8:
                            v_scale = U(scale_base + C * pool_heads + h)
                            for c in range(U(C)):
                                score[c] *= scales[v_scale + c * U(pool_heads)]
                        for c in range(U(0), U(C - C % 4), U(4)):
                            w0, w1, w2, w3 = score[c], score[c + U(1)], score[c + U(2)], score[c + U(3)]
                            if is_staged:
                                at = c * U(D)
                                for d in range(U(D)):
                                    sums[q0 + d] += (
                                        w0 * values[at + d]
                                        + w1 * values[at + U(D) + d]
                                        + w2 * values[at + U(2 * D) + d]
                                        + w3 * values[at + U(3 * D) + d]
                                    )
                            else:
                                at = v0 + c * stride
                                for d in range(U(D)):
                                    sums[q0 + d] += (
                                        w0 * data[at + d]
                                        + w1 * data[at + stride + d]
                                        + w2 * data[at + U(2) * stride + d]
                                        + w3 * data[at + U(3) * stride + d]
                                    )
                        for c in range(U(C - C % 4), U(C)):
                            w0 = score[c]
                            if is_staged:
                                for d in range(U(D)):
                                    sums[q0 + d] += w0 * values[c * U(D) + d]
                            else:
                                for d in range(U(D)):
                                    sums[q0 + d] += w0 * data[v0 + c * stride + d]
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                target = U((token * num_heads + head) * D)
                source = U(state * D)
                share = _ONE / weights[state]
                for d in range(U(D)):
                    out[target + d] = sums[source + d] * share

    return jit.compiled(attend)


def scratch_floats(head_dim: int, block_size: int, num_heads: int) -> int:
    """Scratch memory of one thread: a tile of keys and values, its scores, and the states of all queries of a task."""
    return (2 * head_dim + 1) * block_size + num_heads * MAX_QUERIES * (2 * head_dim + 2)
