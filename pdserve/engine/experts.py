"""A layer of experts: a router chooses a few of many small mlps for every token, and adds their weighted outputs.

Tokens are sorted by expert, so that each chosen expert multiplies all its tokens at once. A token's outputs are added
in the order of the experts' numbers, so the result does not depend on other tokens.
"""

# Shapes: T tokens, E hidden size, X experts, C chosen per token, N = T * C choices, S tokens of one expert.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.engine.layers_config import ExpertsConfig
from pdserve.engine.linear import Linear
from pdserve.engine.parameters import ExpertWeights


def apply_experts(
    config: ExpertsConfig, weights: ExpertWeights, gated: Callable[[Tensor], Tensor], x_TE: Tensor
) -> Tensor:
    """`gated` is the activation of gate and up."""
    expert_TC, weight_TC = choose(config, weights.router, x_TE)
    sorted_N, choice_N = expert_TC.flatten().sort(stable=True)
    token_N, weight_N1 = choice_N // config.num_chosen, weight_TC.flatten()[choice_N, None]
    counts = torch.bincount(sorted_N, minlength=config.num_experts).tolist()
    out_TE, first = torch.zeros_like(x_TE, dtype=torch.float32), 0
    for expert, count in zip(weights.experts, counts, strict=True):
        if count:
            token_S, weight_S1 = token_N[first : first + count], weight_N1[first : first + count]
            answer_SE = expert.down(gated(expert.gate_up(x_TE[token_S])))
            out_TE.index_add_(0, token_S, answer_SE * weight_S1)
            first += count
    return out_TE.to(x_TE.dtype)


def choose(config: ExpertsConfig, router: Linear, x_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, [T, C]; in float32, since rounding may choose another expert."""
    share_TX = router(x_TE.float()).softmax(dim=-1)
    weight_TC, expert_TC = share_TX.topk(config.num_chosen, dim=-1)
    if config.is_renormalised:
        weight_TC = weight_TC / weight_TC.sum(dim=-1, keepdim=True)
    return expert_TC, weight_TC
