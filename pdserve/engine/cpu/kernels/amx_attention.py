"""Paged attention in bfloat16 by AMX, for rounded weights: paged.py with tiles of 64 positions and 16 queries.

        scores[k, q] = keys[k] . queries[q]      weights = softmax      out[q] = weights[q, :] values

Queries, keys, weights and values are bfloat16, sums are float32. Keys are read in place as rows of a tile. Queries, and
pairs of values, are arranged as its columns. A query's tiles begin at multiples of 64 positions, and its arithmetic is
the same for any other queries beside it, so a position gives the same bits alone or in a chunk, in any batch. Values of
positions that a query does not see have weight 0, so they must be finite.
"""

# Shapes: H query heads, K kv heads, G = H / K, D head dim, C tokens per block, Q queries of a task, R = Q * G rows of a
#         kv head, in groups of 16.

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pdserve.engine.cpu.kernels import amx, instructions
from pdserve.engine.cpu.kernels.amx import ROW_BYTES, ROWS, TILE_BYTES, configure, release
from pdserve.engine.cpu.kernels.amx_softmax import KEYS, STEP_KEYS, softmax
from pdserve.engine.cpu.kernels.arithmetic import exp2, narrow
from pdserve.engine.cpu.kernels.paged import LEAST_WORK, TASK_FIELDS
from pdserve.engine.cpu.kernels.task import ANY, FLOAT32, INT32, INT64, TaskKernel, pointer, take

MAX_QUERIES: Final = 64  # of one task

_PARTS: Final = KEYS // ROWS  # tiles of keys
_STEPS: Final = KEYS // STEP_KEYS  # tiles of weights
_MOST_SUMS: Final = 4  # tiles of sums in registers
_STEP_DIMS: Final = ROW_BYTES // 2  # dims of a tile of keys
_ONE, _TWO = np.float32(1), np.float32(2)
_UNSEEN = np.float32(-1e30)
_LOG2_E = np.float32(1 / math.log(2))
_LONG = ir.IntType(64)
_WORDS, _FLOATS = ir.VectorType(ir.IntType(32), ROWS), ir.VectorType(ir.FloatType(), ROWS)
_SHORTS = ir.VectorType(ir.IntType(16), ROWS)


def is_supported(head_dim: int, block_size: int) -> bool:
    return head_dim % _STEP_DIMS == block_size % ROWS == 0 and amx.is_supported("bfloat16")


@intrinsic
def _scores(_context: Any, dim: Any, k0: Any, k1: Any, k2: Any, k3: Any, stride: Any, queries: Any, out: Any) -> Any:
    """Scores of 64 keys and 16 queries, [64, 16] in float32. `dim` is a literal; the others are the addresses of each
    16 keys, the bytes from one key to the next, and the addresses of the arranged queries and of the scores."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    steps = dim.literal_value // _STEP_DIMS

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        keys = args[1 : 1 + _PARTS]
        stride, queries, out = args[1 + _PARTS :]
        columns, rows = _PARTS, _PARTS + 1
        for part in range(_PARTS):
            amx.clear(builder, part)
        for step in range(steps):
            amx.load(builder, columns, builder.add(queries, _LONG(step * TILE_BYTES)), _LONG(ROW_BYTES))
            for part, at in enumerate(keys):
                amx.load(builder, rows, builder.add(at, _LONG(step * ROW_BYTES)), stride)
                amx.multiply(builder, amx.PRODUCT["bfloat16"], part, rows, columns)
        for part in range(_PARTS):
            amx.store(builder, part, builder.add(out, _LONG(part * TILE_BYTES)), _LONG(ROW_BYTES))
        return context.get_dummy_value()

    return types.none(dim, *([types.int64] * 7)), generate


@intrinsic
def _arrange_values(_context: Any, dim: Any, values: Any, stride: Any, out: Any) -> Any:
    """Arranges the values of 16 positions as half of each tile of 32 positions and 16 dims: a row has two positions."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    columns = dim.literal_value // ROWS

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, values, stride, out = args
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 2 * ROWS), [x for i in range(ROWS) for x in (i, ROWS + i)])

        def pair(index: Any) -> None:
            at = builder.add(values, builder.mul(builder.mul(index, _LONG(2)), stride))
            to = builder.add(out, builder.mul(index, _LONG(ROW_BYTES)))
            for column in range(columns):
                shift = _LONG(column * 2 * ROWS)
                low = instructions.load(builder, builder.add(at, shift), _SHORTS, 2)
                high = instructions.load(builder, builder.add(builder.add(at, stride), shift), _SHORTS, 2)
                both = builder.shuffle_vector(low, high, lanes)
                instructions.store(builder, both, builder.add(to, _LONG(column * TILE_BYTES)), 4)

        instructions.each(builder, _LONG(ROWS // 2), pair)
        return context.get_dummy_value()

    return types.none(dim, *([types.int64] * 3)), generate


@intrinsic
def _copy_keys(_context: Any, dim: Any, keys: Any, stride: Any, out: Any) -> Any:
    """Copies 16 keys, so that they follow each other: keys of a pool displace each other in the cache."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    row_bytes = 2 * dim.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, keys, stride, out = args

        def key(index: Any) -> None:
            at, to = (
                builder.add(keys, builder.mul(index, stride)),
                builder.add(out, builder.mul(index, _LONG(row_bytes))),
            )
            for shift in range(0, row_bytes, ROW_BYTES):
                line = instructions.load(builder, builder.add(at, _LONG(shift)), _WORDS, 2)
                instructions.store(builder, line, builder.add(to, _LONG(shift)), 4)

        instructions.each(builder, _LONG(ROWS), key)
        return context.get_dummy_value()

    return types.none(dim, *([types.int64] * 3)), generate


@intrinsic
def _arrange_queries(_context: Any, dim: Any, queries: Any, out: Any) -> Any:
    """Arranges 16 queries, [16, dim] in bfloat16, as columns of tiles of 32 dims."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    size = dim.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, queries, out = args
        for step in range(size // _STEP_DIMS):
            at = [builder.add(queries, _LONG(2 * row * size + step * ROW_BYTES)) for row in range(ROWS)]
            for pair, words in enumerate(
                instructions.transposed(builder, [instructions.load(builder, one, _WORDS, 4) for one in at])
            ):
                instructions.store(builder, words, builder.add(out, _LONG(step * TILE_BYTES + pair * ROW_BYTES)), 4)
        return context.get_dummy_value()

    return types.none(dim, types.int64, types.int64), generate


@intrinsic
def _scale(_context: Any, dim: Any, sums: Any, factors: Any) -> Any:
    """Multiplies the sums of each query, [16, dim], with its factor."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    size = dim.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, sums, factors = args

        def row(index: Any) -> None:
            one = instructions.load(builder, builder.add(factors, builder.mul(index, _LONG(4))), ir.FloatType(), 4)
            factor = instructions.broadcast(builder, one, ROWS)
            for column in range(0, size, ROWS):
                at = builder.add(sums, builder.add(builder.mul(index, _LONG(4 * size)), _LONG(4 * column)))
                value = builder.fmul(instructions.load(builder, at, _FLOATS, 4), factor)
                instructions.store(builder, value, at, 4)

        instructions.each(builder, _LONG(ROWS), row)
        return context.get_dummy_value()

    return types.none(dim, types.int64, types.int64), generate


@intrinsic
def _add_values(_context: Any, dim: Any, weights: Any, values: Any, sums: Any) -> Any:
    """Adds weights times arranged values of 64 positions to the sums, [16, dim]. Addresses."""
    if not isinstance(dim, types.IntegerLiteral):
        return None
    size = dim.literal_value
    columns = size // ROWS

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, weights, values, sums = args
        rows, spare = _MOST_SUMS, range(_MOST_SUMS + 1, 8)
        for first in range(0, columns, _MOST_SUMS):
            held = range(min(_MOST_SUMS, columns - first))
            at = [builder.add(sums, _LONG((first + tile) * ROW_BYTES)) for tile in held]
            for tile in held:
                amx.load(builder, tile, at[tile], _LONG(4 * size))
            for step in range(_STEPS):
                amx.load(builder, rows, builder.add(weights, _LONG(step * TILE_BYTES)), _LONG(ROW_BYTES))
                for tile in held:
                    column = spare[tile % len(spare)]
                    shift = _LONG((step * columns + first + tile) * TILE_BYTES)
                    amx.load(builder, column, builder.add(values, shift), _LONG(ROW_BYTES))
                    amx.multiply(builder, amx.PRODUCT["bfloat16"], tile, rows, column)
            for tile in held:
                amx.store(builder, tile, at[tile], _LONG(4 * size))
        return context.get_dummy_value()

    return types.none(dim, *([types.int64] * 3)), generate


@cache
def make_attend(head_dim: int, block_size: int) -> TaskKernel:
    """The kernel for one shape, whose pool is bfloat16. Its numbers are those of `paged.make_attend`."""
    amx.require("bfloat16")
    D, C, U = head_dim, block_size, np.uint64
    QUERY, SUMS = _query_floats(head_dim), ROWS * head_dim  # floats of a group's arranged queries, and of its sums
    STATE, VALUES = _state_floats(head_dim), _tile_floats(head_dim)
    KEY_BYTES = ROWS * 2 * D  # of 16 keys
    HALF_TILE, VALUE_STEP, SCORE_BYTES = TILE_BYTES // 2, D // ROWS * TILE_BYTES, 4 * KEYS * ROWS

    def attend(task_at: Any) -> None:
        q, out = carray(pointer(task_at[3], FLOAT32), ANY), carray(pointer(task_at[6], FLOAT32), ANY)
        data = task_at[4]
        tables = carray(pointer(task_at[7], INT32), ANY)
        tasks = carray(pointer(task_at[8], INT64), (task_at[2], TASK_FIELDS))
        num_heads, num_kv_heads, pool_heads = task_at[9], task_at[10], task_at[11]
        block_stride, layer_start, window = task_at[12], task_at[13], task_at[16]
        scale, softcap = np.int64(task_at[17]).view(np.float64), np.int64(task_at[18]).view(np.float64)
        scratch_at = task_at[19] + 4 * take(task_at, 1) * task_at[20]
        keys_at, values_at, weight_at = scratch_at, scratch_at + 4 * VALUES, scratch_at + 8 * VALUES
        factor_at = weight_at + _STEPS * TILE_BYTES
        scores_at = factor_at + ROW_BYTES
        G = num_heads // num_kv_heads
        state_at = scores_at + 2 * SCORE_BYTES
        stride, part = 2 * pool_heads * D, 2 * C * pool_heads * D  # bytes of a position, and of a block's keys
        q_scale, cap = np.float32(scale) * _LOG2_E, np.float32(softcap) * _LOG2_E
        rows = np.empty((ROWS, D), np.uint16)
        rows_at = np.int64(rows.ctypes.data)
        configure()
        task = take(task_at, 0)
        while task < task_at[2]:
            table, start, first_query, num_queries = tasks[task, 0], tasks[task, 1], tasks[task, 2], tasks[task, 3]
            head_from, head_to = tasks[task, 4], tasks[task, 5]
            R = num_queries * G
            num_groups = (R + ROWS - 1) // ROWS
            for h in range(head_from, head_to):
                query = g = np.int64(0)  # of a row
                for group in range(num_groups):
                    at = state_at + 4 * STATE * ((h - head_from) * num_groups + group)
                    limits = carray(pointer(at + 4 * (QUERY + SUMS + 2 * ROWS), INT32), (2 * ROWS,))
                    for i in range(ROWS):
                        position = start + min(query, num_queries - 1)
                        limits[i] = 0 if window == 0 else max(0, position - window + 1)
                        limits[ROWS + i] = position
                        if query < num_queries:
                            source = U(((first_query + query) * num_heads + h * G + g) * D)
                            for d in range(U(D)):
                                rows[i, d] = narrow(q[source + d] * q_scale)
                        else:
                            for d in range(U(D)):
                                rows[i, d] = np.uint16(0)
                        g += 1
                        if g == G:
                            query, g = query + 1, np.int64(0)
                    _arrange_queries(D, rows_at, at)
                    state = carray(pointer(at + 4 * QUERY, FLOAT32), (SUMS + 2 * ROWS,))
                    for i in range(U(SUMS + ROWS)):
                        state[i] = np.float32(0)  # the sums of values, then those of weights
                    for i in range(U(SUMS + ROWS), U(SUMS + 2 * ROWS)):
                        state[i] = _UNSEEN  # the largest scores
            last = start + num_queries - 1
            earliest, latest = 0 if window == 0 else max(0, start - window + 1), last // ROWS * ROWS
            for key in range(earliest // KEYS * KEYS, last + 1, KEYS):
                # Positions that no query sees have weight 0. Others are read in their place.
                p0, p1 = max(key, earliest // ROWS * ROWS), max(key + ROWS, earliest // ROWS * ROWS)
                p2, p3 = max(key + 2 * ROWS, earliest // ROWS * ROWS), key + 3 * ROWS
                p1, p2, p3 = min(p1, latest), min(p2, latest), min(p3, latest)
                a0 = data + 2 * (np.int64(tables[table + p0 // C]) * block_stride + layer_start) + p0 % C * stride
                a1 = data + 2 * (np.int64(tables[table + p1 // C]) * block_stride + layer_start) + p1 % C * stride
                a2 = data + 2 * (np.int64(tables[table + p2 // C]) * block_stride + layer_start) + p2 % C * stride
                a3 = data + 2 * (np.int64(tables[table + p3 // C]) * block_stride + layer_start) + p3 % C * stride
                for h in range(head_from, head_to):
                    head = 2 * h * D
                    _arrange_values(D, a0 + part + head, stride, values_at)
                    _arrange_values(D, a1 + part + head, stride, values_at + HALF_TILE)
                    _arrange_values(D, a2 + part + head, stride, values_at + VALUE_STEP)
                    _arrange_values(D, a3 + part + head, stride, values_at + VALUE_STEP + HALF_TILE)
                    # The groups with a query that sees a position of the tile.
                    first_group, end_group = max(0, key - start) * G // ROWS, num_groups
                    if window != 0:
                        end_group = (min(R, (key + KEYS + window - 1 - start) * G) + ROWS - 1) // ROWS
                    k0, k1, k2, k3, key_stride = a0 + head, a1 + head, a2 + head, a3 + head, stride
                    if num_groups > 1:
                        _copy_keys(D, k0, stride, keys_at)
                        _copy_keys(D, k1, stride, keys_at + KEY_BYTES)
                        _copy_keys(D, k2, stride, keys_at + 2 * KEY_BYTES)
                        _copy_keys(D, k3, stride, keys_at + 3 * KEY_BYTES)
                        k0, k1, k2, k3 = keys_at, keys_at + KEY_BYTES, keys_at + 2 * KEY_BYTES, keys_at + 3 * KEY_BYTES
                        key_stride = np.int64(2 * D)
                    states_at = state_at + 4 * STATE * (h - head_from) * num_groups
                    for turn in range(first_group, end_group + 1):
                        # The next group's scores are multiplied while this group's softmax is computed.
                        if turn < end_group:
                            at, score_at = states_at + 4 * STATE * turn, scores_at + turn % 2 * SCORE_BYTES
                            _scores(D, k0, k1, k2, k3, key_stride, at, score_at)
                        if turn == first_group:
                            continue
                        group = turn - 1
                        first_seen, last_seen = start + group * ROWS // G, start + (min(turn * ROWS, R) - 1) // G
                        at, score_at = states_at + 4 * STATE * group, scores_at + group % 2 * SCORE_BYTES
                        sums_at = at + 4 * QUERY
                        total_at = sums_at + 4 * SUMS
                        most_at, limits_at = total_at + ROW_BYTES, total_at + 2 * ROW_BYTES
                        if cap > 0:
                            score = carray(pointer(score_at, FLOAT32), (KEYS * ROWS,))
                            for i in range(U(KEYS * ROWS)):
                                # cap * tanh(x / cap), by 2^y, y <= 0; x carries the factor log2(e), and so does cap
                                small = exp2(-abs(score[i]) * _TWO * _LOG2_E / cap)
                                bounded = cap * (_ONE - small) / (_ONE + small)
                                score[i] = -bounded if score[i] < 0 else bounded
                        is_whole = key + KEYS - 1 <= first_seen and (window == 0 or key > last_seen - window)
                        if is_whole:
                            is_changed = softmax(0, score_at, weight_at, most_at, total_at, factor_at, limits_at, key)
                        else:
                            is_changed = softmax(1, score_at, weight_at, most_at, total_at, factor_at, limits_at, key)
                        if is_changed != 0:
                            _scale(D, sums_at, factor_at)
                        _add_values(D, weight_at, values_at, sums_at)
            for h in range(head_from, head_to):
                query = g = np.int64(0)
                for r in range(R):
                    at = state_at + 4 * STATE * ((h - head_from) * num_groups + r // ROWS) + 4 * QUERY
                    state = carray(pointer(at, FLOAT32), (SUMS + ROWS,))
                    inverse = _ONE / state[SUMS + r % ROWS]
                    target, source = U(((first_query + query) * num_heads + h * G + g) * D), U(r % ROWS * D)
                    for d in range(U(D)):
                        out[target + d] = state[source + d] * inverse
                    g += 1
                    if g == G:
                        query, g = query + 1, np.int64(0)
            task = take(task_at, 0)
        release()
        rows[0, 0] = 0  # numba frees an array after its last use by name

    return TaskKernel(attend, f"attend-tiles-{D}-{C}", least=LEAST_WORK)


def _query_floats(head_dim: int) -> int:
    return ROWS * head_dim // 2


def _tile_floats(head_dim: int) -> int:
    """Of 64 keys or values of a head."""
    return KEYS * head_dim // 2


def _state_floats(head_dim: int) -> int:
    """Of a group: its arranged queries, its sums of values and of weights, its largest scores, and its limits."""
    return _query_floats(head_dim) + ROWS * head_dim + 4 * ROWS


def scratch_floats(head_dim: int, num_heads: int, num_kv_heads: int) -> int:
    """Scratch memory of one thread: keys, arranged values, weights, factors, scores of two groups, and the states of
    all groups of a task."""
    num_groups = num_kv_heads * -(-MAX_QUERIES * (num_heads // num_kv_heads) // ROWS)
    fixed = 2 * _tile_floats(head_dim) + _STEPS * TILE_BYTES // 4 + ROWS + 2 * KEYS * ROWS
    return fixed + num_groups * _state_floats(head_dim)
