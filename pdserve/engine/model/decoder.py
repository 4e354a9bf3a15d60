"""The decoder. Llama, Mistral, Mixtral, Qwen and Gemma share this code; they differ in a few numbers of the config and
in which parameters exist.

Prefill chunks and decode rows are multiplied in one packed batch; only attention treats them differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.cpu import ops as cpu_ops
from pdserve.engine.cpu.ops import Ops
from pdserve.engine.model.attention import AttentionBackend, Heads
from pdserve.engine.model.config import ExpertsConfig, ModelConfig
from pdserve.engine.model.linear import Addend, Addends, LayerAddends, Linear, PlainLinear, Products
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
        self.products = Products(ops, config.norm_eps, config.activation)  # on a GPU, by a switch, another class
        shards = () if ranks is None else (Shard(rank, ranks.shard.size) for rank in range(ranks.shard.size))
        # Whether the product of the head is the logits, and can be written to given memory.
        self._writes_logits = ranks is None and config.logit_softcap is None and isinstance(weights.head, PlainLinear)
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

    def hidden(self, attention: AttentionBackend, addends: Addends | None = None) -> Tensor:
        """Writes the KV of all tokens; returns the states, after the last norm, of the tokens that are needed, [U, E].

        `addends` add to the products of the batch. A recorded step (load/cpu_engine.py) has none.

        Ranks synchronise before the first store, between layers and after the last store, so no rank clears, stores or
        reads a block while another one is in an earlier or later step.
        """
        return self.through_layers(self.embed(attention.token_T), attention, addends)

    def through_layers(self, x_TE: Tensor, attention: AttentionBackend, addends: Addends | None = None) -> Tensor:
        """`hidden` of embedded tokens, which it may overwrite."""
        delta_TE: Tensor | None = None  # output of the previous sublayer, to be added
        added, products = LayerAddends(), self.products
        for index, layer in enumerate(self._weights.layers):
            if addends is not None:
                added = addends.layer(index)
            x_TE, qkv_TN = products.normed(layer.qkv, x_TE, delta_TE, layer.attention_norm_E, added.qkv)
            qkv_TND = qkv_TN.view(len(x_TE), -1, self._config.head_dim)
            attended_TN = attention.forward(index, layer, qkv_TND)
            if index == self._config.num_layers - 1 and attention.read_U is not None:
                # After the last layer's attention, only positions whose logits are needed continue: for a prompt, the
                # last token.
                if not len(attention.read_U):
                    self._sum(x_TE.new_zeros(1))
                    return x_TE[:0]
                x_TE, attended_TN = x_TE[attention.read_U], attended_TN[attention.read_U]
                if addends is not None:
                    added = addends.take(attention.read_U).layer(index)
            delta_TE = self._sum(products.plain(layer.o, attended_TN, added.o))
            if layer.attention_post_norm_E is not None:
                delta_TE = products.norm(delta_TE, None, layer.attention_post_norm_E)
            x_TE, mlp_TE = self._mlp(layer.mlp, x_TE, delta_TE, layer.mlp_norm_E, added)
            delta_TE = self._sum(mlp_TE)
            if layer.mlp_post_norm_E is not None:
                delta_TE = products.norm(delta_TE, None, layer.mlp_post_norm_E)
        return products.norm(x_TE, delta_TE, self._weights.norm_E)

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of `logits` with `out_TV`: that of the head's product, unless more is computed from it in float32."""
        return self.dtype if self._writes_logits else torch.float32

    def logits(self, x_TE: Tensor, out_TV: Tensor | None = None, addend: Addend | None = None) -> Tensor:
        """Logits of states that `hidden` returned, [T, V]: float32, or of `logits_dtype` in `out_TV`. `addend` is the
        head's, of these states."""
        if out_TV is not None and self._writes_logits:
            return self.products.plain(self._weights.head, x_TE, addend, out_TV)
        logits_TV = self.products.plain(self._weights.head, x_TE, addend)
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

    def _mlp(
        self,
        mlp: MlpWeights | ExpertWeights,
        x_TE: Tensor,
        delta_TE: Tensor,
        norm_E: Tensor,
        added: LayerAddends,
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the mlp of its norm. The sum may be in x's memory."""
        if isinstance(mlp, MlpWeights):
            return self.products.mlp(mlp.gate_up, mlp.down, x_TE, delta_TE, norm_E, added)
        assert self._config.experts is not None
        if added.gate_up is not None or added.down is not None:
            raise InternalError("experts have no place for an addend")
        normed_TE = self.products.norm(x_TE, delta_TE, norm_E)
        return x_TE, apply_experts(self._config.experts, mlp, self.products.gated, normed_TE)
