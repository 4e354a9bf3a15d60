"""The paged pool's kernels: one stores the keys and values of new tokens, one attends to them.

Attention reads KV blocks in place: softmax(cap(scale * q k)) v, one pass over a row's positions. One kernel serves any
number of queries per row: decode rows, rows with drafts, prefill chunks. A query's result depends only on its own
numbers and position: its tiles begin at multiples of 64 positions, and its arithmetic is the same for any number of
queries (tiles.py). So a position gives the same bits alone or in a chunk, in any batch, with any number of threads.
Values of positions that a query does not see have weight 0, so they must be finite.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels import instructions
from pdserve.engine.cpu.kernels.arithmetic import exp2, narrow, widen
from pdserve.engine.cpu.kernels.instructions import LANES
from pdserve.engine.cpu.kernels.jit import inlined
from pdserve.engine.cpu.kernels.rows import largest, rows_at_once
from pdserve.engine.cpu.kernels.task import ANY, FLOAT32, INT32, INT64, KINDS, TaskKernel, pointer, take
from pdserve.engine.cpu.kernels.tiles import GROUP, KEYS, ROWS, UNSEEN, add_values, arrange, scores, softmax

# Shapes: H query heads, K kv heads, G = H / K, D head dim, C tokens per block, Q queries of a task, R = Q * G.

LEAST_WORK: Final = 1 << 17  # multiplications of a layer below which a second thread costs more than it gains
TASK_FIELDS: Final = 6  # first of its blocks in the tables, position and index of its first query, Q, kv heads from, to

_LINE_BYTES = 64
_LEAST_QUERIES, _MOST_QUERIES, _TASK_ROWS = 16, 64, 96  # of a task; more rows arrange keys less often
_ONE, _TWO = np.float32(1), np.float32(2)
_UNSEEN = np.float32(UNSEEN)
_LOG2_E = np.float32(1 / math.log(2))


def max_queries(num_heads: int, num_kv_heads: int) -> int:
    """Of one task."""
    return min(max(_TASK_ROWS * num_kv_heads // num_heads, _LEAST_QUERIES), _MOST_QUERIES)


@intrinsic
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line of array[index]; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        instructions.prefetch(builder, builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.none(array, index), generate


@inlined
def _find(places: Any, tables: Any, table: Any, key: Any, earliest: Any, last: Any, sizes: Any) -> Any:
    """Stores where the position key + i of each row of a tile begins in the pool, in elements of its dtype.

    Positions that no query of the task sees are replaced by the nearest one that a query sees.
    """
    block_size, block_stride, layer_start, stride = sizes
    for i in range(KEYS):
        position = min(max(key + i, earliest), last)
        block = np.int64(tables[table + position // block_size])
        places[i] = block * block_stride + layer_start + position % block_size * stride


@cache
def make_attend(head_dim: int, block_size: int, stored: str) -> TaskKernel:
    """The kernel for one shape and dtype of the pool (float32, bfloat16 or int8).

    attend(num_tasks, work, q, data, scales, out, tables, tasks, num_heads, num_kv_heads, pool_heads, block_stride,
    layer_start, scale_stride, scale_start, window, scale, softcap, scratch, scratch_floats): all but numbers of heads,
    strides, starts, window and scratch_floats are addresses, or `bits` of a float. q and out are [T, H, D] in float32,
    data is the pool in its own dtype, scales the same memory as float32, tables int32, tasks int64 [N, TASK_FIELDS].
    A position has `pool_heads` kv heads in the pool, of which `num_kv_heads` are used, from the starts on. Strides and
    starts are in elements; window and softcap are 0 if there is none. Each thread uses `scratch_floats` of `scratch`,
    which are finite at the start.
    """
    D, C, U = head_dim, block_size, np.uint64
    W = _width(head_dim)
    DATA, is_int8 = KINDS[stored], stored == "int8"
    is_staged = stored != "float32" or D != W  # keys are widened or padded before they are arranged
    per_line = _LINE_BYTES // {"int8": 1, "bfloat16": 2, "float32": 4}[stored]
    ARRANGED, VALUES, STAGED, SCORES = D * KEYS, KEYS * W, GROUP * W, ROWS * KEYS  # floats

    def attend(task_at: Any) -> None:
        q, out = carray(pointer(task_at[3], FLOAT32), ANY), carray(pointer(task_at[6], FLOAT32), ANY)
        data, scales = carray(pointer(task_at[4], DATA), ANY), carray(pointer(task_at[5], FLOAT32), ANY)
        tables = carray(pointer(task_at[7], INT32), ANY)
        tasks = carray(pointer(task_at[8], INT64), (task_at[2], TASK_FIELDS))
        num_heads, num_kv_heads, pool_heads = task_at[9], task_at[10], task_at[11]
        scale_stride, scale_start, window = task_at[14], task_at[15], task_at[16]
        scale, softcap = np.int64(task_at[17]).view(np.float64), np.int64(task_at[18]).view(np.float64)
        keys_at = task_at[19] + 4 * take(task_at, 1) * task_at[20]  # of this thread's scratch memory
        values_at = keys_at + 4 * ARRANGED
        staged_at = values_at + 4 * VALUES
        score_at = staged_at + 4 * STAGED
        places_at = score_at + 4 * SCORES
        factor_at = places_at + 8 * (3 * KEYS + GROUP)
        rest_at = factor_at + 4 * LANES
        values, staged = (
            carray(pointer(values_at, FLOAT32), (VALUES,)),
            carray(pointer(staged_at, FLOAT32), (STAGED,)),
        )
        places = carray(pointer(places_at, INT64), (2 * KEYS,))
        key_row_at, value_row_at = places_at + 16 * KEYS, places_at + 8 * (2 * KEYS + GROUP)
        key_rows = carray(pointer(key_row_at, INT64), (GROUP,))
        value_rows = carray(pointer(value_row_at, INT64), (KEYS,))
        rest = carray(pointer(rest_at, FLOAT32), ANY)
        G = num_heads // num_kv_heads
        part = C * pool_heads * D
        sizes = (C, task_at[12], task_at[13], pool_heads * D)
        q_scale = np.float32(scale) * _LOG2_E
        cap = np.float32(softcap) * _LOG2_E
        now = np.int64(0)  # of `places`: where this tile's begin
        following = take(task_at, 0)
        is_first = True
        while following < task_at[2]:
            task = following
            table, start, first_query, num_queries = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
            head_from, head_to = tasks[task, 4], tasks[task, 5]
            R = num_queries * G
            num_states = R * (head_to - head_from)
            sums_at, most_at = rest_at + 4 * num_states * W, rest_at + 8 * num_states * W
            total_at = most_at + 4 * num_states
            sums, totals = (
                carray(pointer(sums_at, FLOAT32), (num_states * W,)),
                carray(pointer(total_at, FLOAT32), (num_states,)),
            )
            maxima = carray(pointer(most_at, FLOAT32), (num_states,))
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                source = U((token * num_heads + head) * D)
                target = U(state * W)
                for d in range(U(D)):
                    rest[target + d] = q[source + d] * q_scale
                for d in range(U(W)):
                    sums[target + d] = np.float32(0)
                maxima[state] = _UNSEEN
                totals[state] = np.float32(0)
            last = start + num_queries - 1
            earliest = 0 if window == 0 else max(0, start - window + 1)
            first_key = earliest // KEYS * KEYS
            if is_first:
                _find(places[:KEYS], tables, table, first_key, earliest, last, sizes)
                is_first = False
            for key in range(first_key, last + 1, KEYS):
                # The next tile, which may be of the next task, is prefetched while this one is arranged.
                here, ahead = places[now : now + KEYS], places[KEYS - now : 2 * KEYS - now]
                if key + KEYS <= last:
                    _find(ahead, tables, table, key + KEYS, earliest, last, sizes)
                else:
                    following = take(task_at, 0)
                    if following < task_at[2]:
                        next_start = tasks[following, 1]
                        next_earliest = 0 if window == 0 else max(0, next_start - window + 1)
                        next_key = next_earliest // KEYS * KEYS
                        next_last = next_start + tasks[following, 3] - 1
                        _find(ahead, tables, tasks[following, 0], next_key, next_earliest, next_last, sizes)
                    else:
                        for i in range(KEYS):
                            ahead[i] = here[i]
                now = KEYS - now
                count = min(KEYS, last + 1 - key)
                # The rows that see a position of the tile: r // G is a row's query.
                row_from = max(0, key - start) * G
                row_to = R if window == 0 else min(R, (key + KEYS + window - 1 - start) * G)
                # For a few rows, copying values takes longer than reading them in place.
                is_direct = not is_staged and row_to - row_from <= ROWS
                turn = turn_head = np.int64(0)
                for h in range(head_from, head_to):
                    for first in range(0, count, GROUP):
                        for i in range(GROUP):
                            k0 = U(here[first + i] + h * D)
                            v0 = k0 + U(part)
                            soon = ahead[turn] + (head_from + turn_head) * D
                            for line in range(0, D, per_line):
                                _prefetch(data, soon + line)
                                _prefetch(data, soon + part + line)
                            turn_head += 1
                            if turn_head == head_to - head_from:
                                turn, turn_head = turn + 1, np.int64(0)
                            k_scale = v_scale = _ONE
                            if is_int8:
                                position = min(max(key + first + i, earliest), last)
                                block = np.int64(tables[table + position // C])
                                at = U(block * scale_stride + scale_start + position % C * pool_heads + h)
                                k_scale, v_scale = scales[at], scales[at + U(C * pool_heads)]
                            if is_direct:
                                value_rows[first + i] = task_at[4] + 4 * np.int64(v0)
                            else:
                                value_rows[first + i] = values_at + 4 * W * (first + i)
                                target = U((first + i) * W)
                                for d in range(U(D)):
                                    values[target + d] = widen(data[v0 + d]) * v_scale
                            if is_staged:
                                target = U(i * W)
                                for d in range(U(D)):
                                    staged[target + d] = widen(data[k0 + d]) * k_scale
                                key_rows[i] = staged_at + 4 * i * W
                            else:
                                key_rows[i] = task_at[4] + 4 * np.int64(k0)
                        arrange(D, key_row_at, np.int64(0), keys_at + 4 * first * D)
                    for first_row in range(row_from, row_to, ROWS):
                        num_rows = min(ROWS, row_to - first_row)
                        state = (h - head_from) * R + first_row
                        scores(D, W, num_rows, rest_at + 4 * W * state, keys_at, score_at)
                        if cap > 0:
                            score = carray(pointer(score_at, FLOAT32), (SCORES,))
                            for i in range(U(num_rows * KEYS)):
                                # cap * tanh(x / cap), by 2^y, y <= 0; x carries the factor log2(e), and so does cap
                                small = exp2(-abs(score[i]) * _TWO * _LOG2_E / cap)
                                bounded = cap * (_ONE - small) / (_ONE + small)
                                score[i] = -bounded if score[i] < 0 else bounded
                        for row in range(num_rows):
                            position = start + (first_row + row) // G
                            seen_from = np.int64(0) if window == 0 else position - window + 1 - key
                            softmax(
                                score_at + 4 * KEYS * row, seen_from, position + 1 - key,
                                most_at + 4 * (state + row), total_at + 4 * (state + row), factor_at + 4 * row,
                            )  # fmt: skip
                        add_values(W, num_rows, score_at, value_row_at, count, factor_at, sums_at + 4 * W * state)
            for state in range(num_states):
                head = (head_from + state // R) * G + state % G
                token = first_query + state % R // G
                target = U((token * num_heads + head) * D)
                source = U(state * W)
                inverse = _ONE / totals[state]
                for d in range(U(D)):
                    out[target + d] = sums[source + d] * inverse

    return TaskKernel(attend, f"attend-{stored}-{D}-{C}", least=LEAST_WORK)


def _width(head_dim: int) -> int:
    """Dims of a state, in whole vectors."""
    return -(-head_dim // LANES) * LANES


def scratch_floats(head_dim: int, num_heads: int, num_kv_heads: int) -> int:
    """Scratch memory of one thread: a tile of arranged keys and of values, a group of keys, scores, places, and the
    states of all queries of a task: the query, its sums, its largest score and the sum of its weights."""
    width = _width(head_dim)
    tile = head_dim * KEYS + (KEYS + GROUP) * width + ROWS * KEYS + 2 * (3 * KEYS + GROUP) + LANES
    size = tile + num_heads * max_queries(num_heads, num_kv_heads) * (2 * width + 2)
    return -(-size // GROUP) * GROUP


# --- keys and values of new tokens ----------------------------------------------------------------------------
# Normalises and rotates queries and keys, and stores keys and values in their blocks, in one pass over the tokens. Each
# token is computed independently. The result equals that of cpu/ops.py, model/attention.py and memory/pool.py up to the
# rounding of fused products.

# Shapes: T tokens, H query heads, K kv heads, D head dim, C tokens per block.

LEAST_PLACED: Final = 1 << 16  # elements of the queries below which a second thread costs more than it gains

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
    return TaskKernel(place, name, least=LEAST_PLACED)
