"""Draws one token per row from its logits.

Order, as in vLLM: min_tokens bans ends -> repetition, presence and frequency penalties -> (greedy: the most likely
token, the lowest id among equals) -> temperature -> min_p -> top_k -> top_p -> draw. Each filter sees the
distribution that the one before has left; top_k and top_p keep the lower ids among equals.

The draw is the argmax of logits plus Gumbel noise keyed by (seed, position): see noise.py. Rows never mix, so what
is drawn depends on the row's logits alone. Those do depend on company in their last bits: matrix products round
differently at different batch sizes. In float32 that moves a logit by about 1e-6, and a seeded draw can change
only if the two best scores are that close, or a token sits that close to the edge of top_p or min_p: about one
draw in 10^5. In bfloat16 it is one in some hundreds: there a retry on another worker keeps the law, and not
always the tokens. The same holds for greedy near-ties.

Logprobs are those of the model: log-softmax of the raw logits, before bans, penalties, temperature and filters.
"""

# Shapes: B sampled rows, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.core.types import Sampling, TokenOut
from pdserve.engine.noise import gumbel, stream

LEAST_TEMPERATURE: Final = 1e-5  # below it only ties are drawn; float32 would divide by zero in the end


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row asks for; the drawn token will stand at position len(history)."""

    sampling: Sampling
    history: Sequence[int]
    prompt_len: int


def sample(logits_BV: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> list[TokenOut]:
    """`logits_BV` is float32 and is not changed."""
    adjusted_BV = logits_BV
    for row, draw in enumerate(draws):
        if is_plain(draw):
            continue
        if adjusted_BV is logits_BV:
            adjusted_BV = logits_BV.clone()
        ban_ends(adjusted_BV[row], draw, eos_token_ids)
        penalise(adjusted_BV[row], draw)
    chosen = adjusted_BV.argmax(dim=-1).tolist()  # documented to be the first of equal maxima
    random = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if random:
        drawn = _draw(_rows(adjusted_BV, random), [draws[row] for row in random])
        for row, token in zip(random, drawn, strict=True):
            chosen[row] = token
    return _with_logprobs(logits_BV, draws, chosen)


def is_plain(draw: Draw) -> bool:
    """True where no ban and no penalty applies."""
    sampling = draw.sampling
    return (
        len(draw.history) - draw.prompt_len >= sampling.min_tokens
        and sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
    )


def ban_ends(logits_V: Tensor, draw: Draw, eos_token_ids: Sequence[int]) -> None:
    if len(draw.history) - draw.prompt_len < draw.sampling.min_tokens:
        size = logits_V.shape[0]
        ends = [token for token in (*eos_token_ids, *draw.sampling.stop_token_ids) if 0 <= token < size]
        if ends:
            logits_V[torch.tensor(ends, device=logits_V.device)] = -math.inf


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


def _draw(logits_BV: Tensor, draws: Sequence[Draw]) -> list[int]:
    temperatures = [max(draw.sampling.temperature, LEAST_TEMPERATURE) for draw in draws]
    temperature_B = torch.tensor(temperatures, device=logits_BV.device)
    scaled_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature_B[
        :, None
    ]  # the best is 0: no overflow
    for applies, keep in _FILTERS:
        rows = [row for row, draw in enumerate(draws) if applies(draw.sampling)]
        if rows:
            part = _rows(scaled_BV, rows)
            keep(part, [draws[row].sampling for row in rows])
            if part is not scaled_BV:
                scaled_BV[torch.tensor(rows, device=scaled_BV.device)] = part
    token_1V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)[None]
    noise_BV = gumbel([stream(draw.sampling.seed, len(draw.history)) for draw in draws], token_1V)
    drawn: list[int] = (scaled_BV + noise_BV).argmax(dim=-1).tolist()
    return drawn


def _keep_min_p(scaled_BV: Tensor, samplings: Sequence[Sampling]) -> None:
    """Keeps tokens at least min_p times as likely as the best, whose scaled logit is 0."""
    floor_B = torch.tensor([math.log(one.min_p) for one in samplings], device=scaled_BV.device)
    scaled_BV.masked_fill_(scaled_BV < floor_B[:, None], -math.inf)


def _keep_top_k_top_p(scaled_BV: Tensor, samplings: Sequence[Sampling]) -> None:
    size = scaled_BV.shape[1]
    value_BV, token_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    top_k_B = torch.tensor([min(one.top_k or size, size) for one in samplings], device=scaled_BV.device)
    value_BV.masked_fill_(torch.arange(size, device=scaled_BV.device) >= top_k_B[:, None], -math.inf)
    top_p_B = torch.tensor([one.top_p for one in samplings], device=scaled_BV.device)
    share_BV = value_BV.softmax(dim=-1)
    mass_before_BV = share_BV.cumsum(dim=-1) - share_BV
    is_cut_BV = (mass_before_BV >= top_p_B[:, None]) & (top_p_B < 1.0)[:, None]
    is_cut_BV[:, 0] = False
    scaled_BV.scatter_(1, token_BV, value_BV.masked_fill(is_cut_BV, -math.inf))


# (whether it applies, what it leaves), in order.
_FILTERS: tuple[tuple[Callable[[Sampling], bool], Callable[[Tensor, Sequence[Sampling]], None]], ...] = (
    (lambda sampling: sampling.min_p > 0.0, _keep_min_p),
    (lambda sampling: sampling.top_k > 0 or sampling.top_p < 1.0, _keep_top_k_top_p),
)


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
