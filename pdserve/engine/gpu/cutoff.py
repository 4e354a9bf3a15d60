"""min_p, top_k and top_p as one number per row: how deep below the best a token may lie and still be drawn.

The depth of a token is (best - logit) / temperature, in float32 as truncation.py computes it; the bits of a float32
that is not negative are ordered as integers, so depths are searched bit by bit, without sorting. The rule is that of
truncation.py: min_p, then top_k, then top_p, each on what the one before has left; equal depths stay or go together.
Counts and comparisons are exact. Masses add float32 exponentials in float64 in another order than torch: a row may
keep a token more or less where the mass before it is within 1e-6 of top_p.

One program per row. A first look finds a depth below which nothing can be kept; the few tokens above it are copied
out, and searched 31 times.
"""

# Shapes: B rows, V vocabulary, G groups of tokens.

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128  # tokens whose best is known beforehand
EVERYTHING = tl.constexpr(0x7FFFFFFE)  # no depth is deeper

_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_SLACK_LN_2 = tl.constexpr(0.6931471805599453 * 1.001)  # float32 computes the bound


@triton.jit
def depth_key(logit, best, temperature):
    """The order of the depth as an int32. NaN is deeper than infinity."""
    depth = tl.div_rn(best - logit, temperature + tl.zeros_like(logit))
    return depth.to(tl.int32, bitcast=True) & EVERYTHING


@triton.jit
def _weight(key):
    return tl.exp2(key.to(tl.float32, bitcast=True) * _MINUS_LOG2_E)


@triton.jit
def _sum_above(keys, count, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the first `count` keys are below `limit`, or what they weigh: float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < count, other=EVERYTHING)
        amount = tl.where(key < limit, 1.0, 0.0)
        if WEIGHTED:
            amount = tl.where(key < limit, _weight(key), 0.0)
        total += amount.to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def _deepest(keys, count, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number below which the keys are fewer, or weigh less, than `target`."""
    found = 0
    for step in range(31):
        bigger = found | (1 << (30 - step))
        if _sum_above(keys, count, bigger, WEIGHTED, BLOCK) < target:
            found = bigger
    return found


@triton.jit
def find_cutoff(
    logits,  # the row's
    best,
    temperature,
    top_k,
    top_p,
    floor,  # the deepest that min_p allows, as a key
    group_best,  # the row's, one for each GROUP of tokens
    keys,  # int32 [V]: the row's scratch
    group_keys,  # int32 [G]: likewise
    size,
    num_groups,
    BLOCK: tl.constexpr,
):
    """The deepest key that is kept."""
    bound = floor
    mass = top_p * 0.0
    if (top_k > 0) & (top_k < num_groups):
        # The k-th best of the groups' best is no better than the k-th best of all.
        for first in range(0, num_groups, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = depth_key(tl.load(group_best + at, mask=at < num_groups, other=float("-inf")), best, temperature)
            tl.store(group_keys + at, key, mask=at < num_groups)
        tl.debug_barrier()
        bound = tl.minimum(bound, _deepest(group_keys, num_groups, top_k.to(tl.float64), False, BLOCK))
    elif (top_k == 0) & (top_p < 1.0):
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            logit = tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32)
            key = depth_key(logit, best, temperature)
            total += tl.where((at < size) & (key <= floor), _weight(key), 0.0).to(tl.float64)
        mass = tl.sum(total, axis=0)
        # All tokens deeper than this together weigh less than what top_p drops.
        dropped = ((1.0 - top_p) * mass).to(tl.float32)
        deep = tl.maximum(tl.log2(size.to(tl.float32)) - tl.log2(dropped), 0.0) * _SLACK_LN_2
        bound = tl.minimum(bound, deep.to(tl.int32, bitcast=True) & EVERYTHING)

    count = 0
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + at, mask=at < size, other=float("-inf")).to(tl.float32)
        key = depth_key(logit, best, temperature)
        is_candidate = ((at < size) & (key <= bound)).to(tl.int32)
        tl.store(keys + count + tl.cumsum(is_candidate, axis=0) - 1, key, mask=is_candidate > 0)
        count += tl.sum(is_candidate, axis=0)
    tl.debug_barrier()

    cutoff = floor
    if top_k > 0:
        kth = _deepest(keys, count, top_k.to(tl.float64), False, BLOCK)
        if kth <= floor:
            cutoff = kth
            # Of the tokens as deep as the k-th only so many were counted as to make k.
            num_equal = top_k.to(tl.float64) - _sum_above(keys, count, kth, False, BLOCK)
            mass = _sum_above(keys, count, kth, True, BLOCK) + num_equal * _weight(kth).to(tl.float64)
        else:
            mass = _sum_above(keys, count, floor + 1, True, BLOCK)
    if top_p < 1.0:
        cutoff = tl.minimum(cutoff, _deepest(keys, count, top_p * mass, True, BLOCK))
    return cutoff
