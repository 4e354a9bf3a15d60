"""Logprobs of the prompt's own tokens, each given the tokens before it.

Logits are computed for a few positions at a time: for a whole chunk they would be [2048, 128k] float32, 1 GB.
"""

# Shapes: T positions of one row, C of them at a time, E hidden size, V vocabulary, K most likely tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from pdserve.core.types import TokenOut

MAX_LOGITS: Final = 2**24  # at a time: 64 MB in float32


def score(
    project: Callable[[Tensor], Tensor], x_TE: Tensor, targets: Sequence[int], num_top: int, vocab_size: int
) -> tuple[TokenOut, ...]:
    """`targets[t]` is the token that follows position t; `project` turns hidden states into float32 logits."""
    scored: list[TokenOut] = []
    size = max(1, MAX_LOGITS // vocab_size)
    for first in range(0, len(targets), size):
        target_C = torch.tensor(targets[first : first + size], device=x_TE.device)
        logits_CV = project(x_TE[first : first + len(target_C)])
        norm_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        own_C = (logits_CV.gather(1, target_C[:, None]) - norm_C1)[:, 0]
        top_CK = logits_CV.topk(min(num_top, vocab_size), dim=-1)
        ids, values = top_CK.indices.tolist(), (top_CK.values - norm_C1).tolist()
        for token_id, own, top_ids, top_values in zip(target_C.tolist(), own_C.tolist(), ids, values, strict=True):
            top = tuple(zip(top_ids, top_values, strict=True))
            scored.append(TokenOut(token_id=token_id, logprob=own, top=top))
    return tuple(scored)
