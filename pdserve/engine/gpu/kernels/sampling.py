"""Samples one token per row from its logits on the device, like engine/sampling/sampler.py for rows without bans or
penalties.

Greedy rows take the lowest of the most likely tokens. Other rows add the noise of (seed, position) to the scaled logits
that cutoff.py leaves, and take the best, so a token does not depend on the worker, the time or the batch. For equal
logits it is the CPU's token, except for the float64 logarithms of the noise and the mass of cutoff.py; the best and the
scaled logits have the same float32 bits. Logprobs are the log-softmax of the raw logits.

Three launches. The first computes statistics of parts of the vocabulary. The second computes, for rows with noise, each
part's best score or, with top_k or top_p, its candidates (cutoff.py). The third merges the parts of each row, or finds
the cutoff and the best candidate. Results do not depend on the number of parts, except for the last bits of the
logprob.
"""

from __future__ import annotations

from typing import Final, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.gpu.kernels.cutoff import GROUP, bound_of, candidate, depth_key, find_cutoff, mass_of
from pdserve.engine.gpu.kernels.samplings import Draws
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.sampling.sampler import LEAST_TEMPERATURE

# --- noise ----------------------------------------------------------------------------------------------------
# The Gumbel noise of engine/sampling/sampler.py in a kernel: the same bits for (seed, position, token), on any device.
#
# The 64-bit hash and the uniform number are integers and exact products, so they are equal bit for bit. The two float64
# logarithms come from CUDA's library here and from torch's vector library there, each within one unit in the last
# place. The noise agrees to about 4e-16 of its size (at most 1e-14), so a sampled token could differ only if two
# tokens' scores are that close.

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)


@triton.jit
def stream(seed, position):
    """Like sampler.stream: the state that all tokens of one sampled position share. Both int64; the seed's bits count
    as unsigned."""
    state = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    return _mix(state + (position.to(tl.uint64, bitcast=True) + 1) * _GOLDEN)


@triton.jit
def gumbel(state, token):
    """Like sampler.gumbel: float64 for each int32 token."""
    bits = _mix(state + (token.to(tl.uint64) + 1) * _GOLDEN) >> 11
    uniform = (bits.to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * _UNIT
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


# --- sampling -------------------------------------------------------------------------------------------------

# Shapes: B rows, V vocabulary, S parts, G groups of tokens.

_BLOCK: Final = 1024
_CANDIDATES: Final = 1024  # tokens of a row processed together
_MOST_PARTS: Final = 64

_LEAST = tl.constexpr(LEAST_TEMPERATURE)
_GROUP = tl.constexpr(GROUP)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _part_length(size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    return tl.cdiv(tl.cdiv(size, BLOCK), PARTS) * BLOCK


@triton.jit
def _part(size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """First and end of this program's tokens."""
    length = _part_length(size, PARTS, BLOCK)
    begin = tl.program_id(1) * length
    return begin, tl.minimum(begin + length, size)


@triton.jit
def _look(
    logits,
    best_out,
    sum_out,
    token_out,
    group_out,
    stride,
    group_stride,
    size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For a part: the largest logit, its first token, the sum of exponentials relative to it, and each group's
    largest."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _part(size, PARTS, BLOCK)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    token = tl.zeros([1], tl.int32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
        group = tl.max(tl.reshape(logit, [BLOCK // _GROUP, _GROUP]), axis=1)
        group_at = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
        tl.store(group_out + row * group_stride + group_at, group, mask=group_at * _GROUP < end)
        here = tl.max(logit, axis=0, keep_dims=True)
        first_token = tl.min(tl.where(logit == here, at, size - 1), axis=0, keep_dims=True)
        token = tl.where(here > best, first_token, token)
        higher = tl.maximum(best, here)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((best - anchor) * _LOG2_E)
        total += tl.sum(tl.exp2((logit - anchor) * _LOG2_E), axis=0, keep_dims=True)
        best = higher
    at = row * PARTS + tl.program_id(1) + tl.arange(0, 1)
    tl.store(best_out + at, best)
    tl.store(sum_out + at, total)
    tl.store(token_out + at, token)


@triton.jit
def _sift(
    logits,
    best_in,
    group_best,
    seed_of,
    position_of,
    temperature_of,
    top_k_of,
    top_p_of,
    floor_of,
    score_out,
    token_out,
    candidates,
    count_out,
    mass_out,
    stride,
    group_stride,
    size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For a part of a row with noise: the best score and its first token; if the row is truncated, the candidates,
    their number, and the mass of all tokens that the floor keeps."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_of + row)
    if temperature <= 0.0:
        return
    temperature = tl.maximum(temperature, _LEAST)
    best_logit = tl.max(tl.load(best_in + row * PARTS + tl.arange(0, PARTS)), axis=0)
    top_k, top_p, floor = tl.load(top_k_of + row), tl.load(top_p_of + row), tl.load(floor_of + row)
    begin, end = _part(size, PARTS, BLOCK)
    out = row * PARTS + tl.program_id(1) + tl.arange(0, 1)
    if (top_k > 0) | (top_p < 1.0):
        groups = group_best + row * group_stride
        bound = bound_of(groups, best_logit, temperature, top_k, top_p, floor, size, group_stride, BLOCK)
        count = 0
        mass = tl.zeros([BLOCK], tl.int64)
        for first in range(begin, end, BLOCK):
            group = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
            group_logit = tl.load(groups + group, mask=group < group_stride, other=float("-inf"))
            has_candidates = tl.min(depth_key(group_logit, best_logit, temperature), axis=0) <= bound
            if has_candidates | (top_k == 0):  # without top_k, every token counts in the mass
                at = first + tl.arange(0, BLOCK)
                logit = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
                key = depth_key(logit, best_logit, temperature)
                mass += tl.where((at < end) & (key <= floor), mass_of(key), 0)
                is_candidate = ((at < end) & (key <= bound)).to(tl.int32)
                place = begin + count + tl.cumsum(is_candidate, axis=0) - 1
                tl.store(candidates + row * size + place, at, mask=is_candidate > 0)
                count += tl.sum(is_candidate, axis=0)
        tl.store(count_out + out, count + tl.zeros([1], tl.int32))
        tl.store(mass_out + out, tl.sum(mass, axis=0, keep_dims=True))
    else:
        state = stream(tl.load(seed_of + row), tl.load(position_of + row))
        best = tl.full([1], float("-inf"), tl.float64)
        token = tl.zeros([1], tl.int32)
        for first in range(begin, end, BLOCK):
            at = first + tl.arange(0, BLOCK)
            logit = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf")).to(tl.float32)
            key = depth_key(logit, best_logit, temperature)
            is_kept = (at < end) & (key <= floor)
            if tl.max(is_kept.to(tl.int32), axis=0) > 0:  # with min_p most blocks keep no token
                depth = key.to(tl.float32, bitcast=True)
                score = tl.where(is_kept, gumbel(state, at) - depth.to(tl.float64), float("-inf"))
                here = tl.max(score, axis=0, keep_dims=True)
                first_token = tl.min(tl.where(score == here, at, size - 1), axis=0, keep_dims=True)
                token = tl.where(here > best, first_token, token)
                best = tl.maximum(best, here)
        tl.store(score_out + out, best)
        tl.store(token_out + out, token)


@triton.jit
def _settle(
    logits,
    best_in,
    sum_in,
    greedy_in,
    score_in,
    sampled_in,
    candidates,
    count_in,
    mass_in,
    seed_of,
    position_of,
    temperature_of,
    top_k_of,
    top_p_of,
    floor_of,
    token_out,
    logprob_out,
    stride,
    size,
    PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best_S = tl.load(best_in + row * PARTS + part)
    best = tl.max(best_S, axis=0)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.load(sum_in + row * PARTS + part) * tl.exp2((best_S - anchor) * _LOG2_E), axis=0)
    temperature = tl.load(temperature_of + row)
    top_k, top_p = tl.load(top_k_of + row), tl.load(top_p_of + row)
    if temperature <= 0.0:
        # Parts are in the order of tokens, so the first part with the best has the lowest token.
        first_part = tl.min(tl.where(best_S == best, part, PARTS - 1), axis=0)
        token = tl.load(greedy_in + row * PARTS + first_part)
    elif (top_k > 0) | (top_p < 1.0):
        temperature = tl.maximum(temperature, _LEAST)
        row_logits, row_candidates = logits + row * stride, candidates + row * size
        counts = count_in + row * PARTS
        length = _part_length(size, PARTS, PART_BLOCK)
        cutoff = find_cutoff(
            row_logits,
            row_candidates,
            counts,
            best,
            temperature,
            top_k,
            top_p,
            tl.load(floor_of + row),
            tl.sum(tl.load(mass_in + row * PARTS + part), axis=0),
            length,
            PARTS,
            BLOCK,
        )
        state = stream(tl.load(seed_of + row), tl.load(position_of + row))
        best_score = tl.full([], float("-inf"), tl.float64)
        token = 0
        for first in range(0, tl.sum(tl.load(counts + part), axis=0), BLOCK):
            at, exists = candidate(row_candidates, counts, first, length, PARTS, BLOCK)
            logit = tl.load(row_logits + at, mask=exists, other=float("-inf")).to(tl.float32)
            key = depth_key(logit, best, temperature)
            depth = key.to(tl.float32, bitcast=True)
            score = tl.where(exists & (key <= cutoff), gumbel(state, at) - depth.to(tl.float64), float("-inf"))
            here = tl.max(score, axis=0)
            first_token = tl.min(tl.where(score == here, at, size - 1), axis=0)
            token = tl.where(here > best_score, first_token, token)
            best_score = tl.maximum(best_score, here)
    else:
        score_S = tl.load(score_in + row * PARTS + part)
        first_part = tl.min(tl.where(score_S == tl.max(score_S, axis=0), part, PARTS - 1), axis=0)
        token = tl.load(sampled_in + row * PARTS + first_part)
    logit = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(token_out + row, token.to(tl.int64))
    tl.store(logprob_out + row, logit - anchor - tl.log2(total) * _LN_2)


@final
class Sampler:
    """Scratch for up to `most_rows` rows; one for all graphs of a stream."""

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device, num_processors: int = 132) -> None:
        self._most_rows = most_rows
        self._size = vocab_size
        self._is_argmax = gpu_switches().sampler == "argmax"
        self._num_groups = -(-vocab_size // GROUP)
        self._num_processors = num_processors

        def scratch(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._best = scratch(torch.float32, most_rows, _MOST_PARTS)
        self._sum = scratch(torch.float32, most_rows, _MOST_PARTS)
        self._greedy = scratch(torch.int32, most_rows, _MOST_PARTS)
        self._score = scratch(torch.float64, most_rows, _MOST_PARTS)
        self._sampled = scratch(torch.int32, most_rows, _MOST_PARTS)
        self._candidates = scratch(torch.int32, most_rows, vocab_size)
        self._count = scratch(torch.int32, most_rows, _MOST_PARTS)
        self._mass = scratch(torch.int64, most_rows, _MOST_PARTS)
        self._group_best = scratch(torch.float32, most_rows, self._num_groups)

    @property
    def most_parts(self) -> int:
        """Of one row."""
        return num_parts(1, self._size, self._num_processors)

    def draw(
        self,
        logits_BV: Tensor,
        draws: Draws,
        out: tuple[Tensor, Tensor] | None = None,
        *,
        parts: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens (int64) and their logprobs (float32), [B] each, in `out` if given. Logits may have any float dtype,
        and are not changed.

        `parts` of the vocabulary, each number of which needs its own kernel; None: as fits the number of rows.
        """
        num_rows, size = logits_BV.shape
        if num_rows > self._most_rows or size != self._size:
            raise InternalError(f"logits {num_rows} x {size}: the sampler is for {self._most_rows} x {self._size}")
        token_B, logprob_B = out or (
            torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device),
            torch.empty(num_rows, dtype=torch.float32, device=logits_BV.device),
        )
        if not num_rows:
            return token_B, logprob_B
        if self._is_argmax:  # every row is greedy
            token_B.copy_(logits_BV.argmax(-1))
            logprob_B.copy_(logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0])
            return token_B, logprob_B
        parts = parts or num_parts(num_rows, size, self._num_processors)
        stride, grid = logits_BV.stride(0), (num_rows, parts)
        _look[grid](
            logits_BV,
            self._best,
            self._sum,
            self._greedy,
            self._group_best,
            stride,
            self._num_groups,
            size,
            PARTS=parts,
            BLOCK=_BLOCK,
        )
        _sift[grid](
            logits_BV,
            self._best,
            self._group_best,
            draws.seed,
            draws.position,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.floor,
            self._score,
            self._sampled,
            self._candidates,
            self._count,
            self._mass,
            stride,
            self._num_groups,
            size,
            PARTS=parts,
            BLOCK=_BLOCK,
        )
        _settle[(num_rows,)](
            logits_BV,
            self._best,
            self._sum,
            self._greedy,
            self._score,
            self._sampled,
            self._candidates,
            self._count,
            self._mass,
            draws.seed,
            draws.position,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.floor,
            token_B,
            logprob_B,
            stride,
            size,
            PARTS=parts,
            PART_BLOCK=_BLOCK,
            BLOCK=_CANDIDATES,
            num_warps=16,
        )
        return token_B, logprob_B


def num_parts(num_rows: int, vocab_size: int, num_processors: int) -> int:
    """A power of two that fills the device twice, with some blocks in each part."""
    wanted = min(_MOST_PARTS, 2 * num_processors / num_rows, vocab_size / _BLOCK)
    parts = 1
    while parts * 2 <= wanted:
        parts *= 2
    return parts
