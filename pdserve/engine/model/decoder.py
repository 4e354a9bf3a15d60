"""The decoder. Llama, Mistral, Mixtral, Qwen and Gemma share this code; they differ in a few numbers of the config and
in which parameters exist.

Prefill chunks and decode rows are multiplied in one packed batch; only attention treats them differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu import ops as cpu_ops
from pdserve.engine.cpu.ops import Ops, RoundedOps
from pdserve.engine.model.attention import AttentionBackend, Heads
from pdserve.engine.model.config import ExpertsConfig, ModelConfig
from pdserve.engine.model.linear import FewRows, Linear, PlainLinear, RoundingLinear
from pdserve.engine.model.parameters import ExpertWeights, MlpWeights, Shard, Weights, rank_config

if TYPE_CHECKING:
    from pdserve.engine.model.collectives import Ranks


# --- experts --------------------------------------------------------------------------------------------------
# A router chooses a few of many small mlps for every token, and adds their weighted outputs.
#
# Tokens are sorted by expert, so that each chosen expert multiplies all its tokens at once. A token's outputs are added
# in the order of the experts' numbers, so the result does not depend on other tokens.

# Shapes: T tokens, E hidden size, X experts, C chosen per token, N = T * C choices, S tokens of one expert.


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


# --- decoder --------------------------------------------------------------------------------------------------

# Shapes: T tokens in the packed batch, E hidden size, F mlp size, H query heads, K kv heads, D head dim,
#         V vocabulary, B rows of a group, Q query tokens per row, R / 2 = rotated pairs, U tokens that are read.


@final
class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights, ranks: Ranks | None = None, ops: Ops = cpu_ops) -> None:
        """With `ranks`, `weights` are one rank's part, and every rank calls the same methods with the same batches."""
        self._ranks = ranks
        whole = config
        config = self._config = config if ranks is None else rank_config(config, ranks.shard)
        self._weights = weights
        self.heads = Heads.of(config, weights.norm_E)
        # Rounded to the compute dtype, as in training: 55.5 instead of 55.4256 in bfloat16.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))
        self._ops = ops
        self._gated = ops.silu_mul if config.activation == "silu" else ops.gelu_mul
        shards = () if ranks is None else (Shard(rank, ranks.shard.size) for rank in range(ranks.shard.size))
        head, is_plain = weights.head, ranks is None and config.logit_softcap is None
        self.few_rows: FewRows | None = None  # on a GPU, by a switch
        self._plain_head = head if is_plain and isinstance(head, PlainLinear) else None  # its product is the logits
        self._tokens_of = tuple(one.span(whole.vocab_size, whole.vocab_size) for one in shards)  # by rank

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples the tokens."""
        return self._ranks is None or self._ranks.shard.rank == 0

    def broadcast(self, x: Tensor) -> None:
        """Replaces every rank's tensor by the leader's."""
        if self._ranks is not None:
            self._ranks.broadcast(x)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self._weights.dtype

    @property
    def first_window(self) -> int | None:
        """Of the first layer's attention."""
        return self._weights.layers[0].window

    def hidden(self, attention: AttentionBackend) -> Tensor:
        """Writes the KV of all tokens; returns the states, after the last norm, of the tokens that are needed, [U, E].

        Ranks synchronise before the first store, between layers and after the last store, so no rank clears, stores or
        reads a block while another one is in an earlier or later step.
        """
        return self.through_layers(self.embed(attention.token_T), attention)

    def through_layers(self, x_TE: Tensor, attention: AttentionBackend) -> Tensor:
        """`hidden` of embedded tokens, which it may overwrite."""
        delta_TE: Tensor | None = None  # output of the previous sublayer, to be added
        for index, layer in enumerate(self._weights.layers):
            x_TE, qkv_TN = self._normed_product(layer.qkv, x_TE, delta_TE, layer.attention_norm_E)
            qkv_TND = qkv_TN.view(len(x_TE), -1, self._config.head_dim)
            attended_TN = attention.forward(index, layer, qkv_TND)
            if index == self._config.num_layers - 1 and attention.read_U is not None:
                # After the last layer's attention, only positions whose logits are needed continue: for a prompt, the
                # last token.
                if not len(attention.read_U):
                    self._sum(x_TE.new_zeros(1))
                    return x_TE[:0]
                x_TE, attended_TN = x_TE[attention.read_U], attended_TN[attention.read_U]
            delta_TE = self._sum(self._product(layer.o, attended_TN))
            if layer.attention_post_norm_E is not None:
                delta_TE = self._norm(delta_TE, layer.attention_post_norm_E)
            x_TE, mlp_TE = self._mlp(layer.mlp, x_TE, delta_TE, layer.mlp_norm_E)
            delta_TE = self._sum(mlp_TE)
            if layer.mlp_post_norm_E is not None:
                delta_TE = self._norm(delta_TE, layer.mlp_post_norm_E)
        return self._add_norm(x_TE, delta_TE, self._weights.norm_E)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of `logits` with `out_TV`: that of the head's product, unless more is computed from it in float32."""
        return torch.float32 if self._plain_head is None else self.dtype

    def logits(self, x_TE: Tensor, out_TV: Tensor | None = None) -> Tensor:
        """Logits of states that `hidden` returned, [T, V]: float32, or of `logits_dtype` in `out_TV`."""
        if out_TV is not None and self._plain_head is not None:
            few_rows = self._few_rows_of(self._plain_head, x_TE)
            if few_rows is not None:
                return few_rows.product(self._plain_head, x_TE, out_TV)
            return self._plain_head.into(x_TE, out_TV)
        logits_TV = self._product(self._weights.head, x_TE)
        if self._ranks is not None:
            logits_TV = self._ranks.concat_columns(logits_TV.float(), [end - begin for begin, end in self._tokens_of])
        logits_TV = logits_TV.float() if out_TV is None else out_TV.copy_(logits_TV)
        softcap = self._config.logit_softcap
        return logits_TV if softcap is None else logits_TV.div_(softcap).tanh_().mul_(softcap)

    def embed(self, token_T: Tensor) -> Tensor:
        x_TE = self._embed(token_T)
        return x_TE if self._embedding_scale == 1.0 else x_TE.mul_(self._embedding_scale)

    def _embed(self, token_T: Tensor) -> Tensor:
        table_VE, dtype = self._weights.embedding_VE, self._weights.dtype
        if self._ranks is None:
            return F.embedding(token_T, table_VE).to(dtype)
        begin, end = self._tokens_of[self._ranks.shard.rank]
        is_mine_T = (token_T >= begin) & (token_T < end)
        mine_TE = F.embedding(torch.where(is_mine_T, token_T - begin, 0), table_VE).to(dtype)
        return self._ranks.sum(mine_TE.mul_(is_mine_T[:, None]))  # zeros plus one row, which is exact

    def _sum(self, x_TE: Tensor) -> Tensor:
        return x_TE if self._ranks is None else self._ranks.sum(x_TE.to(self.dtype))

    def _few_rows_of(self, linear: Linear, x_TK: Tensor) -> FewRows | None:
        """What computes the product of so few rows; None: the product itself."""
        few_rows = self.few_rows
        is_few = few_rows is not None and isinstance(linear, PlainLinear) and len(x_TK) <= few_rows.most_rows
        return few_rows if is_few else None

    def _product(self, linear: Linear, x_TK: Tensor) -> Tensor:
        few_rows = self._few_rows_of(linear, x_TK)
        return linear(x_TK) if few_rows is None else few_rows.product(cast(PlainLinear, linear), x_TK)

    def _mlp(
        self, mlp: MlpWeights | ExpertWeights, x_TE: Tensor, delta_TE: Tensor, norm_E: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the mlp of its norm. The sum may be in x's memory."""
        if isinstance(mlp, MlpWeights):
            few_rows = self._few_rows_of(mlp.gate_up, x_TE)
            if few_rows is not None:
                gate_up, activation = cast(PlainLinear, mlp.gate_up), self._config.activation
                x_TE, gated = few_rows.gated(gate_up, x_TE, delta_TE, norm_E, self._config.norm_eps, activation)
                return x_TE, self._product(mlp.down, gated)
            x_TE, gate_up_TN = self._normed_product(mlp.gate_up, x_TE, delta_TE, norm_E)
            rounded = self._rounded(mlp.down)
            if rounded is None:
                return x_TE, self._product(mlp.down, self._gated(gate_up_TN))
            round_gated = rounded.silu_mul if self._config.activation == "silu" else rounded.gelu_mul
            return x_TE, cast(RoundingLinear, mlp.down).product(*round_gated(gate_up_TN))
        assert self._config.experts is not None
        normed_TE = self._add_norm(x_TE, delta_TE, norm_E)
        return x_TE, apply_experts(self._config.experts, mlp, self._gated, normed_TE)

    def _normed_product(
        self, linear: Linear, x_TE: Tensor, delta_TE: Tensor | None, norm_E: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + delta, which may be in x's memory, and `linear` of its norm. For a product that rounds its inputs, the
        norm is rounded in the same operation."""
        rounded, eps = self._rounded(linear), self._config.norm_eps
        few_rows = self._few_rows_of(linear, x_TE)
        if few_rows is not None:
            return few_rows.normed(cast(PlainLinear, linear), x_TE, delta_TE, norm_E, eps)
        if rounded is None:
            return x_TE, linear(self._add_norm(x_TE, delta_TE, norm_E))
        product = cast(RoundingLinear, linear).product
        if delta_TE is None:
            return x_TE, product(*rounded.rms_norm(x_TE, norm_E, eps))
        return x_TE, product(*rounded.add_rms_norm(x_TE, delta_TE, norm_E, eps))

    def _rounded(self, linear: Linear) -> RoundedOps | None:
        """The operations whose results this product takes."""
        return self._ops.ROUNDED.get(getattr(linear, "rounding", ""))

    def _add_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor) -> Tensor:
        """The norm of x after `delta_TE`, if any, is added to it in place."""
        if delta_TE is None:
            return self._norm(x_TE, weight_E)
        return self._ops.add_rms_norm(x_TE, delta_TE, weight_E, self._config.norm_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self._config.norm_eps)
