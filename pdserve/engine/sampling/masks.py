"""Bans tokens and adds bias to the others. Logits are masked only here.

BANS are ordered from the strongest to the weakest. A ban that would leave no token after the stronger ones is skipped:
min_tokens yields to a finished grammar, and bad words yield to the last allowed token. So there is always a token to
sample, and never a NaN. If it is known in advance that no token is left, admission rejects the request.

Each ban is a function of the row's own content (its sampling and its tokens so far). So a token is banned at a position
or not on every worker, also after preemption, migration or recovery, and after drafts.
"""

# Shapes: B rows, R those of them under a grammar, V vocabulary, N token ids or bytes of a bit mask.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.types import Sampling

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
