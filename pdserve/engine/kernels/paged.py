"""Paged attention, which reads KV blocks in place: softmax(cap(scale * q k)) v, one pass over a row's blocks.

One kernel serves any number of queries per row: decode rows, rows with drafts, prefill chunks. A query's result depends
only on its own numbers and position: its tiles are its visible blocks in order, and its arithmetic is the same for any
number of queries (tiles.py). So a position gives the same bits alone or in a chunk, in any batch, with any number of
threads.
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
from pdserve.engine.kernels.instructions import LANES
from pdserve.engine.kernels.rows import largest
from pdserve.engine.kernels.task import ANY, FLOAT32, INT32, INT64, KINDS, TaskKernel, pointer, take
from pdserve.engine.kernels.tiles import ROWS, add_values, scores

MAX_QUERIES: Final = 16  # of one task
LEAST_WORK: Final = 1 << 17  # multiplications of a layer below which a second thread costs more than it gains
TASK_FIELDS: Final = 6  # first of its blocks in the tables, position and index of its first query, Q, kv heads from, to

_LINE_BYTES = 64
_LONG_HEAD = 128
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
    W, S = -(-D // LANES) * LANES, -(-C // LANES) * LANES  # a state's width, and the scores of a tile
    U = np.uint64
    DATA, is_int8 = KINDS[stored], stored == "int8"
    # Tiles are widened, padded or copied first. Long heads are copied because positions that are 4 KiB apart displace
    # each other in the cache.
    is_staged = stored != "float32" or D != W or C != S or D >= _LONG_HEAD
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
        held_keys, held_values = scratch[: S * W], scratch[S * W : 2 * S * W]
        score = scratch[2 * S * W : 2 * S * W + ROWS * S]
        score_at = scratch_at + 8 * S * W
        rest_at = score_at + 4 * ROWS * S
        rest = scratch[2 * S * W + ROWS * S :]
        G = num_heads // num_kv_heads
        part = C * pool_heads * D
        stride = U(pool_heads * D)
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
            run_lines = -(-(head_to - head_from) * D // per_line)  # of a position's heads
            queries = rest[: num_states * W]
            sums = rest[num_states * W : 2 * num_states * W]
            sums_at = rest_at + 4 * num_states * W
            maxima = rest[2 * num_states * W : 2 * num_states * W + num_states]
            weights = rest[2 * num_states * W + num_states : 2 * num_states * W + 2 * num_states]
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                source = U((token * num_heads + head) * D)
                target = U(state * W)
                for d in range(U(D)):
                    queries[target + d] = q[source + d] * q_scale
                for d in range(U(D), U(W)):
                    queries[target + d] = np.float32(0)
                for d in range(U(W)):
                    sums[target + d] = np.float32(0)
                maxima[state] = _UNSEEN
                weights[state] = np.float32(0)
            first_page = 0 if window == 0 else max(0, start - window + 1) // C
            last_page = (start + num_queries - 1) // C
            for page in range(first_page, last_page + 1):
                block = np.int64(tables[table + page])
                base = block * block_stride + layer_start
                scale_base = block * scale_stride + scale_start
                next_page, next_head = table + page + 1, head_from
                if page == last_page:  # of the next task, which is taken now
                    following = take(task_at, 0)
                    next_task = min(following, task_at[2] - 1)
                    next_page, next_head = tasks[next_task, 0], tasks[next_task, 4]
                    if window != 0:
                        next_page += max(0, tasks[next_task, 1] - window + 1) // C
                ahead = np.int64(tables[next_page]) * block_stride + layer_start + next_head * D
                # The rows that see a position of the page: r // G is a row's query.
                row_from = max(0, page * C - start) * G
                row_to = R if window == 0 else min(R, ((page + 1) * C + window - 1 - start) * G)
                share = -(-2 * C * run_lines // max(1, (head_to - head_from) * (row_to - row_from)))  # lines of a row
                run = line = 0
                for h in range(head_from, head_to):
                    k0 = U(base + h * D)
                    v0 = U(base + part + h * D)
                    if is_staged:
                        for c in range(U(C)):
                            k_scale = v_scale = _ONE
                            if is_int8:
                                at = U(scale_base) + c * U(pool_heads) + U(h)
                                k_scale, v_scale = scales[at], scales[at + U(C * pool_heads)]
                            for d in range(U(D)):
                                held_keys[c * U(W) + d] = widen(data[k0 + c * stride + d]) * k_scale
                            for d in range(U(D)):
                                held_values[c * U(W) + d] = widen(data[v0 + c * stride + d]) * v_scale
                            for d in range(U(D), U(W)):
                                held_keys[c * U(W) + d] = np.float32(0)
                                held_values[c * U(W) + d] = np.float32(0)
                        keys_at, values_at, apart = scratch_at, scratch_at + 4 * S * W, np.int64(4 * W)
                    else:
                        keys_at, values_at = task_at[4] + 4 * np.int64(k0), task_at[4] + 4 * np.int64(v0)
                        apart = 4 * np.int64(stride)
                    for first_row in range(row_from, row_to, ROWS):
                        num_rows = min(ROWS, row_to - first_row)
                        first_state = (h - head_from) * R + first_row
                        for row in range(num_rows):
                            for _ in range(share if run < 2 * C else 0):
                                _prefetch(data, ahead + run * pool_heads * D + line * per_line)
                                line += 1
                                if line == run_lines:
                                    run, line = run + 1, 0
                            query_at = rest_at + 4 * W * (first_state + row)
                            for c in range(0, C, LANES):
                                scores(W, query_at, keys_at + c * apart, apart, score_at + 4 * (row * S + c))
                        for row in range(num_rows):
                            state = first_state + row
                            seen = score[row * S : row * S + C]
                            if cap > 0:
                                for c in range(U(C)):
                                    # cap * tanh(x / cap), by 2^y, y <= 0; x carries the factor log2(e), and so does cap
                                    small = exp2(-abs(seen[c]) * _TWO * _LOG2_E / cap)
                                    bounded = cap * (_ONE - small) / (_ONE + small)
                                    seen[c] = -bounded if seen[c] < 0 else bounded
                            position = start + (first_row + row) // G
                            seen_to = position + 1 - page * C
                            seen_from = 0 if window == 0 else position - window + 1 - page * C
                            if seen_from > 0 or seen_to < C:
                                for c in range(C):
                                    if c < seen_from or c >= seen_to:
                                        seen[c] = _UNSEEN
                            old = maxima[state]
                            new = largest(seen, old)
                            if new > old:
                                shrink = exp2(old - new)
                                weights[state] *= shrink
                                for d in range(U(state * W), U(state * W + W)):
                                    sums[d] *= shrink
                                maxima[state] = new
                            total = np.float32(0)
                            for c in range(U(C)):
                                weight = exp2(seen[c] - new)
                                weight = np.float32(0) if seen[c] == _UNSEEN else weight
                                seen[c] = weight
                                total += weight
                            weights[state] += total
                        add_values(
                            W, num_rows, score_at, np.int64(4 * S), values_at, apart, np.int64(C),
                            sums_at + 4 * W * first_state,
                        )  # fmt: skip
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                target = U((token * num_heads + head) * D)
                source = U(state * W)
                inverse = _ONE / weights[state]
                for d in range(U(D)):
                    out[target + d] = sums[source + d] * inverse
            task = following

    return TaskKernel(attend, f"attend-{stored}-{D}-{C}", least=LEAST_WORK)


def scratch_floats(head_dim: int, block_size: int, num_heads: int) -> int:
    """Scratch memory of one thread: a tile of keys and values, its scores, and the states of all queries of a task."""
    width, size = -(-head_dim // LANES) * LANES, -(-block_size // LANES) * LANES
    return (2 * width + ROWS) * size + num_heads * MAX_QUERIES * (2 * width + 2)
