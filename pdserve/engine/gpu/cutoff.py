"""min_p, top_k and top_p as one number per row: how deep below the best a token may lie and still be drawn.

The depth of a token is (best - logit) / temperature, in float32 as truncation.py computes it; the bits of a float32
that is not negative are ordered as integers, so depths are searched as numbers, without sorting. The rule is that of
truncation.py: min_p, then top_k, then top_p, each on what the one before has left; equal depths stay or go together.
Masses are sums of float32 exponentials in units of 2**-40, as integers: they do not depend on the order of tokens or
on how many programs add them. torch adds in float64, so a row may keep a token more or less where the mass before it
is within 1e-6 of top_p.

First a bound below which nothing can be kept, from the best token of each group. Programs for parts of the vocabulary
list the tokens above it: the candidates. One program for each row then finds the cutoff among these few in eight
rounds, each of which tries sixteen depths at once.
"""

# Shapes: W tries of a round, G groups of tokens.

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128  # tokens whose best is known beforehand
EVERYTHING = tl.constexpr(0x7FFFFFFE)  # no depth is deeper

_DIGIT = tl.constexpr(4)  # bits of a depth that a round finds
_TRIES = tl.constexpr(16)
_ROUNDS = tl.constexpr(8)
_UNIT = tl.constexpr(float(2**40))
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_SLACK_LN_2 = tl.constexpr(0.6931471805599453 * 1.001)  # float32 computes the bound


@triton.jit
def depth_key(logit, best, temperature):
    """The order of the depth as an int32. NaN is deeper than infinity."""
    depth = tl.div_rn(best - logit, temperature + tl.zeros_like(logit))
    return depth.to(tl.int32, bitcast=True) & EVERYTHING


@triton.jit
def mass_of(key):
    """What a token of that depth weighs beside the best: an int64 in units of 2**-40."""
    return (tl.exp2(key.to(tl.float32, bitcast=True) * _MINUS_LOG2_E) * _UNIT).to(tl.int64)


@triton.jit
def bound_of(
    group_best,  # the row's, one for each GROUP of tokens
    best,
    temperature,
    top_k,
    top_p,
    floor,  # the deepest that min_p allows, as a key
    size,
    num_groups,
    BLOCK: tl.constexpr,
):
    """A key that no kept token exceeds. `top_k` or `top_p` is on."""
    bound = floor
    if top_k > 0:
        if top_k < num_groups:
            # The k-th best of the groups' best is no better than the k-th best of all.
            found = 0
            for step in range(_ROUNDS):
                below = tl.zeros([_TRIES], tl.int64)
                for first in range(0, num_groups, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    logit = tl.load(group_best + at, mask=at < num_groups, other=float("-inf"))
                    key = tl.where(at < num_groups, depth_key(logit, best, temperature), EVERYTHING + 1)
                    below += tl.sum((key[:, None] < _tries(found, step)[None, :]).to(tl.int64), axis=0)
                found = _deepest(found, step, below.to(tl.float64) < top_k)
            bound = tl.minimum(bound, found)
    else:
        mass = tl.zeros([BLOCK], tl.int64)
        for first in range(0, num_groups, BLOCK):
            at = first + tl.arange(0, BLOCK)
            logit = tl.load(group_best + at, mask=at < num_groups, other=float("-inf"))
            key = depth_key(logit, best, temperature)
            mass += tl.where((at < num_groups) & (key <= floor), mass_of(key), 0)
        # All tokens deeper than this together weigh less than what top_p drops of the groups' best alone.
        dropped = ((1.0 - top_p) * tl.sum(mass, axis=0).to(tl.float64) / _UNIT).to(tl.float32)
        deep = tl.maximum(tl.log2(size.to(tl.float32)) - tl.log2(dropped), 0.0) * _SLACK_LN_2
        bound = tl.minimum(bound, deep.to(tl.int32, bitcast=True) & EVERYTHING)
    return bound


@triton.jit
def find_cutoff(
    logits,  # the row's
    candidates,  # the row's: tokens, a run in each part's place
    counts,  # of the candidates of each part
    best,
    temperature,
    top_k,
    top_p,
    floor,
    mass,  # of all tokens that the floor keeps
    length,  # of a part
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The deepest key that is kept."""
    cutoff = floor
    if top_k > 0:
        kth = 0
        for step in range(_ROUNDS):
            below, _ = _below(logits, candidates, counts, best, temperature, _tries(kth, step), length, PARTS, BLOCK)
            kth = _deepest(kth, step, below.to(tl.float64) < top_k)
        tries = tl.full([_TRIES], 0, tl.int32) + tl.minimum(kth, floor + 1)
        below, masses = _below(logits, candidates, counts, best, temperature, tries, length, PARTS, BLOCK)
        mass = tl.max(masses, axis=0)
        if kth <= floor:
            cutoff = kth
            # Of the tokens as deep as the k-th only so many were counted as to make k.
            mass += (top_k - tl.max(below, axis=0)) * mass_of(kth)
    if top_p < 1.0:
        found = 0
        for step in range(_ROUNDS):
            _, masses = _below(logits, candidates, counts, best, temperature, _tries(found, step), length, PARTS, BLOCK)
            found = _deepest(found, step, masses.to(tl.float64) < top_p * mass.to(tl.float64))
        cutoff = tl.minimum(cutoff, found)
    return cutoff


@triton.jit
def candidate(candidates, counts, first, length, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens number `first` and on of the row's candidates, in the order of the vocabulary, and whether they exist."""
    number = first + tl.arange(0, BLOCK)
    place = number
    end = 0
    for part in range(PARTS):
        count = tl.load(counts + part)
        end += count
        place += tl.where(number >= end, length - count, 0)  # it lies in a later part
    exists = number < end
    return tl.load(candidates + place, mask=exists, other=0), exists


@triton.jit
def _below(
    logits,
    candidates,
    counts,
    best,
    temperature,
    tries,
    length,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each try, how many candidates' keys are below it, and their mass: int64 [W] each."""
    below = tl.zeros([_TRIES], tl.int64)
    masses = tl.zeros([_TRIES], tl.int64)
    num_candidates = tl.sum(tl.load(counts + tl.arange(0, PARTS)), axis=0)
    for first in range(0, num_candidates, BLOCK):
        token, exists = candidate(candidates, counts, first, length, PARTS, BLOCK)
        logit = tl.load(logits + token, mask=exists, other=float("-inf")).to(tl.float32)
        key = depth_key(logit, best, temperature)
        is_below = exists[:, None] & (key[:, None] < tries[None, :])
        below += tl.sum(is_below.to(tl.int64), axis=0)
        masses += tl.sum(tl.where(is_below, mass_of(key)[:, None], 0), axis=0)
    return below, masses


@triton.jit
def _tries(found, step):
    """The depths that a round tries: `found`, whose upper digits are known, with each digit in the round's place.

    A depth has 31 bits: of the first round's tries the upper half would be negative, and are never chosen."""
    return found | (tl.arange(0, _TRIES) << (_DIGIT * (_ROUNDS - 1 - step)))


@triton.jit
def _deepest(found, step, is_short):
    """`found` with the round's digit: the largest number below which too little lies."""
    return tl.max(tl.where(is_short & (_tries(found, step) >= 0), _tries(found, step), 0), axis=0)
