"""Paged attention, which reads KV blocks in place: softmax(cap(scale * q k)) v, one pass over a row's blocks.

One kernel serves any number of queries per row: decode rows, rows with drafts, prefill chunks. A query's result depends
only on its own numbers and position: its tiles are its visible blocks in order, and its arithmetic is the same loop for
any number of queries. So a position gives the same bits alone or in a chunk, in any batch, with any number of threads.
"""

# Shapes: H query heads, K kv heads, G = H / K, D head dim, C tokens per block, Q queries of a task, R = Q * G.

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pdserve.engine.kernels import instructions
from pdserve.engine.kernels.bfloat16 import widen
from pdserve.engine.kernels.exponential import exp2
from pdserve.engine.kernels.rows import largest
from pdserve.engine.kernels.task import ANY, FLOAT32, INT32, INT64, KINDS, TaskKernel, pointer, take

MAX_QUERIES: Final = 16  # of one task
LEAST_WORK: Final = 1 << 17  # multiplications of a layer below which a second thread costs more than it gains
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
        instructions.prefetch(builder, builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.none(array, index), generate


@cache
def make_attend(head_dim: int, block_size: int, stored: str) -> TaskKernel:
    """The kernel for one shape and dtype of the pool (float32, bfloat16 or int8).

    attend(num_tasks, work, q, data, scales, out, tables, tasks, num_heads, num_kv_heads, pool_heads, block_stride,
    layer_start, scale_stride, scale_start, window, scale, softcap, scratch, scratch_floats): all but numbers of heads,
    strides, starts, window and scratch_floats are addresses, or `bits` of a float. q and out are [T, H, D] in float32,
    data is the pool in its own dtype, scales the same memory as float32, tables int32, tasks int64 [N, TASK_FIELDS].
    A position has `pool_heads` kv heads in the pool, of which `num_kv_heads` are used, from the starts on. Strides and
    starts are in elements; window and softcap are 0 if there is none. Each thread uses `scratch_floats` of `scratch`. A
    row's last block is read to its end, so its unused positions must be finite.
    """
    D, C = head_dim, block_size
    U = np.uint64
    DATA, is_int8, is_staged = KINDS[stored], stored == "int8", stored != "float32"  # staged: tiles are widened first
    per_line = _LINE_BYTES // {"int8": 1, "bfloat16": 2, "float32": 4}[stored]

    def attend(task_at: Any) -> None:
        q, out = carray(pointer(task_at[3], FLOAT32), ANY), carray(pointer(task_at[6], FLOAT32), ANY)
        data, scales = carray(pointer(task_at[4], DATA), ANY), carray(pointer(task_at[5], FLOAT32), ANY)
        tables = carray(pointer(task_at[7], INT32), ANY)
        tasks = carray(pointer(task_at[8], INT64), (task_at[2], TASK_FIELDS))
        num_heads, num_kv_heads, pool_heads = task_at[9], task_at[10], task_at[11]
        block_stride, layer_start, scale_stride, scale_start = task_at[12], task_at[13], task_at[14], task_at[15]
        window = task_at[16]
        scale, softcap = np.int64(task_at[17]).view(np.float64), np.int64(task_at[18]).view(np.float64)
        scratch_at = task_at[19] + 4 * take(task_at, 1) * task_at[20]
        scratch = carray(pointer(scratch_at, FLOAT32), (task_at[20],))
        G = num_heads // num_kv_heads
        part = C * pool_heads * D
        stride = U(pool_heads * D)
        is_all = pool_heads == num_kv_heads  # otherwise a position's heads are a run between those of other ranks
        run_lines = -(-num_kv_heads * D // per_line)
        q_scale = np.float32(scale) * _LOG2_E
        cap = np.float32(softcap) * _LOG2_E
        task = take(task_at, 0)
        while task < task_at[2]:
            table = tasks[task, 0]
            start = tasks[task, 1]
            first_query = tasks[task, 2]
            num_queries = tasks[task, 3]
            head_from = tasks[task, 4]
            head_to = tasks[task, 5]
            R = num_queries * G
            num_states = R * (head_to - head_from)
            held_keys = scratch[: C * D]
            held_values = scratch[C * D : 2 * C * D]
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
                next_page = table + page + 1
                if page == last_page:  # of the next task, which is taken now
                    following = take(task_at, 0)
                    next_task = min(following, task_at[2] - 1)
                    next_page = tasks[next_task, 0]
                    if window != 0:
                        next_page += max(0, tasks[next_task, 1] - window + 1) // C
                ahead = np.int64(tables[next_page]) * block_stride + layer_start
                lines = (2 * part) // per_line if is_all else 2 * C * run_lines
                for h in range(head_from, head_to):
                    k0 = U(base + h * D)
                    v0 = U(base + part + h * D)
                    if is_staged:
                        for c in range(U(C)):
                            for d in range(U(D)):
                                held_keys[c * U(D) + d] = widen(data[k0 + c * stride + d])
                            for d in range(U(D)):
                                held_values[c * U(D) + d] = widen(data[v0 + c * stride + d])
                        keys, values, k_at, v_at, apart = held_keys, held_values, U(0), U(0), U(D)
                    else:
                        keys, values, k_at, v_at, apart = data, data, k0, v0, stride
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
                        for c in range(U(0), U(C - C % 4), U(4)):  # a query is read once for four positions
                            at = k_at + c * apart
                            dot0, dot1, dot2, dot3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                            for d in range(U(D)):
                                query = queries[q0 + d]
                                dot0 += query * keys[at + d]
                                dot1 += query * keys[at + apart + d]
                                dot2 += query * keys[at + U(2) * apart + d]
                                dot3 += query * keys[at + U(3) * apart + d]
                            score[c], score[c + U(1)], score[c + U(2)], score[c + U(3)] = dot0, dot1, dot2, dot3
                        for c in range(U(C - C % 4), U(C)):
                            dot0 = np.float32(0)
                            for d in range(U(D)):
                                dot0 += queries[q0 + d] * keys[k_at + c * apart + d]
                            score[c] = dot0
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
                            at = v_at + c * apart
                            for d in range(U(D)):
                                sums[q0 + d] += (
                                    w0 * values[at + d]
                                    + w1 * values[at + apart + d]
                                    + w2 * values[at + U(2) * apart + d]
                                    + w3 * values[at + U(3) * apart + d]
                                )
                        for c in range(U(C - C % 4), U(C)):
                            w0 = score[c]
                            for d in range(U(D)):
                                sums[q0 + d] += w0 * values[v_at + c * apart + d]
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                target = U((token * num_heads + head) * D)
                source = U(state * D)
                share = _ONE / weights[state]
                for d in range(U(D)):
                    out[target + d] = sums[source + d] * share
            task = following

    return TaskKernel(attend, f"attend-{stored}-{D}-{C}", least=LEAST_WORK)


def scratch_floats(head_dim: int, block_size: int, num_heads: int) -> int:
    """Scratch memory of one thread: a tile of keys and values, its scores, and the states of all queries of a task."""
    return (2 * head_dim + 1) * block_size + num_heads * MAX_QUERIES * (2 * head_dim + 2)
