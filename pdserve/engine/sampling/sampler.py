"""Samples one token per row from its logits.

Order, as in vLLM: grammars, bans and logit_bias (BANS) -> repetition, presence and frequency penalties ->
top_n_sigma -> (greedy: the most likely token, the lowest id among equals) -> temperature -> min_p -> top_k -> top_p ->
draw. Each filter sees the distribution that the previous one has left (`cutoffs`).

The sampled token is the argmax of logits plus Gumbel noise keyed by (seed, position). Rows are independent, so the
token depends only on the row's logits. Their last bits depend on the batch, because matrix products round differently
at different batch sizes. In float32 a logit differs by 7e-7 on average (bundled model, 16 rows against one). A seeded
token then changes only if the two best scores, or a token and the edge of top_p or min_p, are that close: about one
sampled token in a million. In bfloat16 a logit may differ by 2^-8 of its size, and some percent of the sampled tokens
may change: a retry on another worker then keeps the distribution, but not always the tokens. The same holds for greedy
near-ties.

Logprobs are the model's: the log-softmax of the raw logits, before bans, penalties, temperature and filters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.cpu.ops import argmax

# Shapes: B rows, R those of them under a grammar, V vocabulary, N token ids or bytes of a bit mask.

# --- bans -----------------------------------------------------------------------------------------------------
# Bans tokens and adds bias to the others. Logits are masked only here.
#
# BANS are ordered from the strongest to the weakest. A ban that would leave no token after the stronger ones is
# skipped: min_tokens yields to a finished grammar, and bad words yield to the last allowed token. So there is always a
# token to sample, and never a NaN. If it is known in advance that no token is left, admission rejects the request.
#
# Each ban is a function of the row's own content (its sampling and its tokens so far). So a token is banned at a
# position or not on every worker, also after preemption, migration or recovery, and after drafts.

_KEPT_LISTS: Final = 64  # id lists that stay on the device, as tensors


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling of one row; the sampled token will be at position len(history)."""

    sampling: Sampling
    history: Sequence[int]
    prompt_len: int
    # mask of the row's grammar: one bit per token, little-endian (grammars.py)
    allowed: bytes | memoryview | None = None

    @property
    def num_output(self) -> int:
        return len(self.history) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Ban:
    """`applies` is called for every row of every step, so it must be cheap. `ban` sets logits to -inf in place."""

    applies: Callable[[Draw], bool]
    ban: Callable[[Tensor, Draw, Sequence[int]], None]  # logits_V, draw, eos_token_ids


def forbid(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Masks all rows with grammars at once, in a copy; returns the logits themselves if no row has a grammar.

    Grammars are applied before the bans and are stronger than all of them, because a grammar always allows some token.
    """
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    if not rows:
        return logits_BV
    size = logits_BV.shape[1]
    byte_RN = np.frombuffer(b"".join(draws[row].allowed or b"" for row in rows), np.uint8).reshape(len(rows), -1)
    is_banned_RV = torch.from_numpy(np.unpackbits(byte_RN, axis=1, count=size, bitorder="little") == 0)
    is_banned_RV = is_banned_RV.to(logits_BV.device)
    if len(rows) == len(draws):
        return logits_BV.masked_fill(is_banned_RV, -math.inf)
    row_R = torch.tensor(rows, device=logits_BV.device)
    return logits_BV.index_copy(0, row_R, logits_BV[row_R].masked_fill_(is_banned_RV, -math.inf))


def may_ban(sampling: Sampling) -> bool:
    """Whether a ban can apply to any row of the sampling."""
    return bool(sampling.allowed_token_ids or sampling.bad_token_ids or sampling.min_tokens)


def is_masked(draw: Draw) -> bool:
    """Whether any ban or bias applies to the row."""
    for one in BANS:
        if one.applies(draw):
            return True
    return bool(draw.sampling.logit_bias)


def mask(logits_BV: Tensor, raw_BV: Tensor, draws: Mapping[int, Draw], eos_token_ids: Sequence[int]) -> None:
    """Applies bans, then bias, in place, in the rows of `draws`. `raw_BV` holds the same logits and is only read."""
    bans_of = {row: [one.ban for one in BANS if one.applies(draw)] for row, draw in draws.items()}
    banned = [row for row, bans in bans_of.items() if bans]
    for row in banned:
        for ban in bans_of[row]:
            ban(logits_BV[row], draws[row], eos_token_ids)
    if banned:
        # together, to wait for the device only once
        best = torch.stack([logits_BV[row].amax() for row in banned]).tolist()
        for row, value in zip(banned, best, strict=True):
            if value == -math.inf:
                logits_BV[row] = _unless_all_banned(raw_BV[row], bans_of[row], draws[row], eos_token_ids)
    for row, draw in draws.items():
        if draw.sampling.logit_bias:
            token_N, bias_N = _bias(draw.sampling.logit_bias, logits_BV.device)
            logits_BV[row, token_N] += bias_N


def _unless_all_banned(
    raw_V: Tensor, bans: Sequence[Callable[[Tensor, Draw, Sequence[int]], None]], draw: Draw, ends: Sequence[int]
) -> Tensor:
    for ban in bans:
        tried_V = raw_V.clone()
        ban(tried_V, draw, ends)
        if tried_V.amax() > -math.inf:
            raw_V = tried_V
    return raw_V


def _ban_all_but_allowed(logits_V: Tensor, draw: Draw, _ends: Sequence[int]) -> None:
    token_N = _index(draw.sampling.allowed_token_ids, logits_V.device)
    allowed_N = logits_V[token_N]
    logits_V.fill_(-math.inf)
    logits_V[token_N] = allowed_N


def _ban_bad_words(logits_V: Tensor, draw: Draw, _ends: Sequence[int]) -> None:
    """The last token of each bad word of which the output so far contains all other tokens, as in vLLM."""
    history, num_output = draw.history, draw.num_output
    newest = history[-1] if num_output else None
    last = []
    for word in draw.sampling.bad_token_ids:
        before = len(word) - 1
        if before > 0:
            if word[-2] != newest or before > num_output:  # the usual case
                continue
            if tuple(history[len(history) - before :]) != word[:-1]:
                continue
        last.append(word[-1])
    if last:
        logits_V[torch.tensor(last, device=logits_V.device)] = -math.inf


def _ban_ends(logits_V: Tensor, draw: Draw, eos_token_ids: Sequence[int]) -> None:
    size = logits_V.shape[0]
    ends = [token for token in (*eos_token_ids, *draw.sampling.stop_token_ids) if 0 <= token < size]
    if ends:
        logits_V[torch.tensor(ends, device=logits_V.device)] = -math.inf


BANS: Final = (
    Ban(lambda draw: bool(draw.sampling.allowed_token_ids), _ban_all_but_allowed),
    Ban(lambda draw: bool(draw.sampling.bad_token_ids), _ban_bad_words),
    Ban(lambda draw: draw.num_output < draw.sampling.min_tokens, _ban_ends),
)


@functools.lru_cache(maxsize=_KEPT_LISTS)
def _index(token_ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(token_ids, device=device)


@functools.lru_cache(maxsize=_KEPT_LISTS)
def _bias(biases: tuple[tuple[int, float], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    token_ids, values = zip(*biases, strict=True)
    return torch.tensor(token_ids, device=device), torch.tensor(values, device=device)


# --- noise ----------------------------------------------------------------------------------------------------
# Each number depends only on (seed, position, token), and needs no state. So every worker samples the same token, in
# any batch, before and after preemption, migration or a retry. The hash is splitmix64's finaliser (Steele, Lea, Flood
# 2014), applied to seed, position and token in turn.

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 2**64 - 1


def stream(seed: int, position: int) -> int:
    """The 64-bit state that all tokens of one sampled position share."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def streams(draws: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The states of (seed, position) pairs, as int64 with the same bits."""
    return torch.tensor([_signed(stream(seed, position)) for seed, position in draws], device=device)


def gumbel(state: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for each token id under each state (int64 both, broadcast together).

    float64, because the largest values decide the result, and float32 uniforms would cut them off at 2^-24.
    """
    bits = _mix_tensor(state + (token + 1) * _signed(_GOLDEN))
    uniform = _shift(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)  # in (0, 1), without both ends
    return uniform.log_().neg_().log_().neg_()


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(value: Tensor) -> Tensor:
    """Like _mix: int64 products wrap around, which is arithmetic modulo 2^64."""
    value = (_shift(value, 30).bitwise_xor_(value)).mul_(_signed(_MIX_1))
    value = (_shift(value, 27).bitwise_xor_(value)).mul_(_signed(_MIX_2))
    return _shift(value, 31).bitwise_xor_(value)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's shift is arithmetic."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# --- sampling -------------------------------------------------------------------------------------------------

# Shapes: B sampled rows, V vocabulary, N tokens that are left over all rows, K most likely tokens of a row.

__all__ = ["Draw", "sample"]

LEAST_TEMPERATURE: Final = 1e-5  # below it only ties are sampled, and float32 would divide by zero
_TIERS: Final = (256, 4096)  # number of tokens considered first: few rows need more, and sorting all is slow


def sample(logits_BV: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> list[TokenOut]:
    """`logits_BV` is float32 and is not changed."""
    allowed_BV = adjusted_BV = forbid(logits_BV, draws)
    adjusted = {row: draw for row, draw in enumerate(draws) if not is_plain(draw)}
    if adjusted:
        adjusted_BV = allowed_BV.clone()
        mask(adjusted_BV, allowed_BV, adjusted, eos_token_ids)
        for row, draw in adjusted.items():
            penalise(adjusted_BV[row], draw)
        if limited := [row for row in adjusted if draws[row].sampling.top_n_sigma > 0.0]:
            sigma_B = torch.tensor([draws[row].sampling.top_n_sigma for row in limited], device=logits_BV.device)
            adjusted_BV[limited] = keep_top_sigma(adjusted_BV[limited], sigma_B)
    chosen = argmax(adjusted_BV)
    random = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if random:
        sampled = _draw(_rows(adjusted_BV, random), [draws[row] for row in random])
        for row, token in zip(random, sampled, strict=True):
            chosen[row] = token
    return _with_logprobs(logits_BV, draws, chosen)


def is_plain(draw: Draw) -> bool:
    """True if no ban and no change of the logits applies."""
    return not draw.sampling.adjusts_logits and not is_masked(draw)


def penalise(logits_V: Tensor, draw: Draw) -> None:
    """Repetition over prompt and output (arXiv 1909.05858), presence and frequency over the output (OpenAI)."""
    sampling, device = draw.sampling, logits_V.device
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(draw.history)), device=device)
        value = logits_V[seen]
        factor = sampling.repetition_penalty
        logits_V[seen] = torch.where(value > 0, value / factor, value * factor)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        output = torch.tensor(draw.history[draw.prompt_len :], device=device, dtype=torch.int64)
        token, count = output.unique(return_counts=True)
        logits_V[token] -= sampling.presence_penalty + sampling.frequency_penalty * count.to(logits_V.dtype)


def keep_top_sigma(logits_BV: Tensor, sigma_B: Tensor) -> Tensor:
    """The logits, with -inf for those more than `sigma_B` standard deviations below the best of their row.

    Top-n-sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", arXiv 2411.07641), with llama.cpp's choices: the
    population standard deviation of the logits that are not banned. The best is always kept.
    """
    is_banned_BV = logits_BV == -math.inf
    num_left_B1 = (~is_banned_BV).sum(dim=-1, keepdim=True)
    value_BV = logits_BV.masked_fill(is_banned_BV, 0.0)
    value_BV -= value_BV.sum(dim=-1, keepdim=True, dtype=torch.float64) / num_left_B1
    square_BV = value_BV.masked_fill_(is_banned_BV, 0.0).square_()
    deviation_B1 = (square_BV.sum(dim=-1, keepdim=True, dtype=torch.float64) / num_left_B1).sqrt()
    least_B1 = logits_BV.amax(dim=-1, keepdim=True) - sigma_B[:, None] * deviation_B1
    return logits_BV.masked_fill(logits_BV < least_B1.to(logits_BV.dtype), -math.inf)


def _draw(logits_BV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Rows without truncation are sampled together; truncated rows need noise for few tokens only."""
    temperatures = [max(draw.sampling.temperature, LEAST_TEMPERATURE) for draw in draws]
    temperature_B1 = torch.tensor(temperatures, device=logits_BV.device)[:, None]
    # The best logit becomes 0, so that nothing overflows.
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature_B1
    state_B = streams([(draw.sampling.seed, len(draw.history)) for draw in draws], logits_BV.device)
    few = [row for row, draw in enumerate(draws) if is_truncated(draw.sampling)]
    any_of = [row for row, draw in enumerate(draws) if not is_truncated(draw.sampling)]
    sampled = [0] * len(draws)
    for rows, tokens in (
        (any_of, _draw_from_all(_rows(scaled_BV, any_of), _rows(state_B, any_of)) if any_of else []),
        (few, _draw_from_few(_rows(scaled_BV, few), _rows(state_B, few), [draws[row] for row in few]) if few else []),
    ):
        for row, token in zip(rows, tokens, strict=True):
            sampled[row] = token
    return sampled


def _draw_from_all(scaled_BV: Tensor, state_B: Tensor) -> list[int]:
    token_V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
    return argmax(gumbel(state_B[:, None], token_V).add_(scaled_BV))


def _draw_from_few(scaled_BV: Tensor, state_B: Tensor, draws: Sequence[Draw]) -> list[int]:
    cutoff_B = cutoffs(scaled_BV, [draw.sampling for draw in draws])
    is_kept_BV = scaled_BV >= cutoff_B[:, None]
    row_N, token_N = is_kept_BV.nonzero(as_tuple=True)
    score_N = gumbel(state_B[row_N], token_N).add_(scaled_BV[row_N, token_N])
    counts: list[int] = is_kept_BV.sum(dim=-1).tolist()
    best = [int(part.argmax()) for part in score_N.split(counts)]
    firsts = accumulate(counts, initial=0)
    tokens: list[int] = token_N[[first + at for first, at in zip(firsts, best, strict=False)]].tolist()
    return tokens


def is_truncated(sampling: Sampling) -> bool:
    return sampling.min_p > 0.0 or sampling.top_k > 0 or sampling.top_p < 1.0


def cutoffs(scaled_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Tokens whose scaled logit (the best of each row is 0) is at least the row's cutoff [B] may be sampled.

    min_p comes first, then top_k, then top_p: each sees the distribution that the one before has left. Equal logits are
    kept or removed together. The number of tokens considered depends only on the row, not on the batch.
    """
    vocab_size = scaled_BV.shape[1]
    floors = [math.log(one.min_p) if one.min_p > 0.0 else -math.inf for one in samplings]
    cutoff_B = torch.tensor(floors, device=scaled_BV.device, dtype=scaled_BV.dtype)
    open_rows = [row for row, one in enumerate(samplings) if one.top_k > 0 or one.top_p < 1.0]
    for size in (*(tier for tier in _TIERS if tier < vocab_size), vocab_size):
        rows = [row for row in open_rows if min(samplings[row].top_k, vocab_size) <= size]
        if not rows:
            continue
        index = torch.tensor(rows, device=scaled_BV.device)
        found_B, is_sure_B = _look(scaled_BV[index], cutoff_B[index], [samplings[row] for row in rows], size)
        cutoff_B[index] = torch.where(is_sure_B, found_B, cutoff_B[index])
        sure = {row for row, is_sure in zip(rows, is_sure_B.tolist(), strict=True) if is_sure}
        open_rows = [row for row in open_rows if row not in sure]
    return cutoff_B


def _look(scaled_BV: Tensor, floor_B: Tensor, samplings: Sequence[Sampling], size: int) -> tuple[Tensor, Tensor]:
    """Cutoffs from the `size` most likely tokens, and whether these were enough."""
    device = scaled_BV.device
    top_k_B1 = torch.tensor([one.top_k for one in samplings], device=device)[:, None]
    top_p_B1 = torch.tensor([one.top_p for one in samplings], device=device, dtype=torch.float64)[:, None]
    value_BK = scaled_BV.topk(size, dim=-1).values
    rank_K = torch.arange(size, device=device)
    is_left_BK = (value_BK >= floor_B[:, None]) & ((rank_K < top_k_B1) | (top_k_B1 == 0))
    weight_BK = value_BK.double().exp() * is_left_BK
    of_all_B1 = (scaled_BV.exp() * (scaled_BV >= floor_B[:, None])).sum(dim=-1, keepdim=True, dtype=torch.float64)
    total_B1 = torch.where(top_k_B1 > 0, weight_BK.sum(dim=-1, keepdim=True), of_all_B1)
    mass_before_BK = weight_BK.cumsum(dim=-1) - weight_BK
    is_kept_BK = is_left_BK & ((mass_before_BK < top_p_B1 * total_B1) | (top_p_B1 >= 1.0))
    num_kept_B = is_kept_BK.sum(dim=-1).clamp(min=1)
    is_sure_B = (num_kept_B < size) | (top_k_B1[:, 0] > 0) | (size == scaled_BV.shape[1])
    return value_BK.gather(1, num_kept_B[:, None] - 1)[:, 0], is_sure_B


def _with_logprobs(logits_BV: Tensor, draws: Sequence[Draw], chosen: Sequence[int]) -> list[TokenOut]:
    outs = [TokenOut(token_id=token) for token in chosen]
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not wanted:
        return outs
    logprob_BV = _rows(logits_BV, wanted).log_softmax(dim=-1)
    most = max(draws[row].sampling.logprobs or 0 for row in wanted)
    top_BK = logprob_BV.topk(min(most, logprob_BV.shape[1]), dim=-1)
    values, tokens = top_BK.values.tolist(), top_BK.indices.tolist()
    for index, row in enumerate(wanted):
        count = draws[row].sampling.logprobs or 0
        outs[row] = TokenOut(
            token_id=chosen[row],
            logprob=float(logprob_BV[index, chosen[row]]),
            top=tuple(zip(tokens[index][:count], values[index][:count], strict=True)),
        )
    return outs


def _rows(x_BV: Tensor, rows: Sequence[int]) -> Tensor:
    """Those rows; the tensor itself where it is all of them."""
    return x_BV if len(rows) == x_BV.shape[0] else x_BV[torch.tensor(rows, device=x_BV.device)]
