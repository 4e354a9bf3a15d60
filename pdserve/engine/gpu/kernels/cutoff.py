"""min_p, top_k and top_p as one number per row: how far below the best a token may be and still be sampled.

The depth of a token is (best - logit) / temperature, in float32 as in engine/sampling/sampler.py. The bits of a
non-negative float32 have the order of integers, so depths are searched by bits, without sorting. The rule is that of
sampler.py: min_p, then top_k, then top_p, each on what the previous one has left; equal depths are kept or removed
together. Masses are sums of float32 exponentials in integer units of 2**-40, so they do not depend on the order of
tokens or on the number of programs. torch adds in float64, so a row may keep one token more or less if the mass before
it is within 1e-6 of top_p.

First, the best token of each group gives a bound below which no token can be kept. Programs for parts of the vocabulary
list the tokens above it, the candidates. One program per row then finds the cutoff among these in eight rounds, each of
which tries sixteen depths at once.
"""

# Shapes: W tries of a round, G groups of tokens.

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 128  # tokens per group whose best is known in advance
EVERYTHING = tl.constexpr(0x7FFFFFFE)  # no depth is deeper

_DIGIT = tl.constexpr(4)  # bits of a depth that one round determines
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
    """The mass of a token of that depth relative to the best: an int64 in units of 2**-40."""
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
            # The k-th best of the groups' best tokens is not better than the k-th best of all tokens.
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
        # The total mass of all deeper tokens is less than the mass that top_p drops from the groups' best tokens alone.
        dropped = ((1.0 - top_p) * tl.sum(mass, axis=0).to(tl.float64) / _UNIT).to(tl.float32)
        deep = tl.maximum(tl.log2(size.to(tl.float32)) - tl.log2(dropped), 0.0) * _SLACK_LN_2
        bound = tl.minimum(bound, deep.to(tl.int32, bitcast=True) & EVERYTHING)
    return bound


@triton.jit
def find_cutoff(
    logits,  # the row's
    candidates,  # the row's tokens, one run per part
    counts,  # number of candidates of each part
    best,
    temperature,
    top_k,
    top_p,
    floor,
    mass,  # mass of all tokens that the floor keeps
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
            # Of the tokens as deep as the k-th, only as many as needed for k were counted.
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
    """The row's candidates from number `first` on, in the order of the vocabulary, and a mask of the existing ones."""
    number = first + tl.arange(0, BLOCK)
    place = number
    end = 0
    for part in range(PARTS):
        count = tl.load(counts + part)
        end += count
        place += tl.where(number >= end, length - count, 0)  # it is in a later part
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
    """For each tried depth, the number of candidates with keys below it, and their mass: int64 [W] each."""
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
    """The depths that a round tries: `found`, whose upper digits are known, with each possible digit of this round.

    A depth has 31 bits: the upper half of the first round's depths would be negative, and is never chosen."""
    return found | (tl.arange(0, _TRIES) << (_DIGIT * (_ROUNDS - 1 - step)))


@triton.jit
def _deepest(found, step, is_short):
    """`found` with the round's digit: the largest number below which there is too little mass or too few tokens."""
    return tl.max(tl.where(is_short & (_tries(found, step) >= 0), _tries(found, step), 0), axis=0)
