"""How the supported architectures differ: the fields of config.json, and their defaults. Data only.

Defaults are those of transformers. A new architecture that needs no new mathematics is a new row of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a layer's router and experts in a checkpoint: `{block}.gate`, `{block}.experts.{index}.{part}`."""

    block: str
    parts: tuple[str, str, str]  # gate, up, down


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    names: ExpertNames
    default_num_experts: int
    default_num_chosen: int
    default_mlp_size: int | None = None  # of moe_intermediate_size; None: experts are as wide as intermediate_size
    # whether the chosen experts' weights are normalised to 1; None: see norm_topk_prob
    is_renormalised: bool | None = None
    has_dense_layers: bool = False  # decoder_sparse_step and mlp_only_layers select the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    model_type: str
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_norm_eps: float = 1e-6
    default_theta: float = 10_000.0
    default_local_theta: float | None = None  # None: layers with a window use the same rope
    default_is_tied: bool = False
    attention_bias: Literal["none", "qkv", "field"] = "none"  # field: attention_bias puts one on q, k, v and o
    has_mlp_bias_field: bool = False
    has_qk_norm: bool = False
    # unused: checkpoints contain one but do not use it
    window: Literal["none", "unused", "every_layer", "by_flag", "by_pattern"] = "none"
    default_window: int | None = 4096
    default_pattern: int = 1  # by_pattern: one layer in so many has no window
    activation_field: str = "hidden_act"
    activation: Activation = "silu"
    is_gemma: bool = False  # norms of 1 + w, before and after each sublayer; a scaled embedding; query_pre_attn_scalar
    has_attention_softcap: bool = False
    default_attention_softcap: float | None = None
    default_logit_softcap: float | None = None
    experts: ExpertFamily | None = None


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(model_type="llama", attention_bias="field", has_mlp_bias_field=True),
    "MistralForCausalLM": Family(model_type="mistral", default_kv_heads=8, window="every_layer"),
    "Qwen2ForCausalLM": Family(model_type="qwen2", default_kv_heads=32, attention_bias="qkv", window="by_flag"),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        default_kv_heads=32,
        default_head_dim=128,
        attention_bias="field",
        has_qk_norm=True,
        window="by_flag",
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        default_kv_heads=4,
        attention_bias="field",
        has_qk_norm=True,
        window="unused",
        experts=ExpertFamily(
            names=ExpertNames(block="mlp", parts=("gate_proj", "up_proj", "down_proj")),
            default_num_experts=128,
            default_num_chosen=8,
            default_mlp_size=768,
            has_dense_layers=True,
        ),
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        default_kv_heads=8,
        default_norm_eps=1e-5,
        default_theta=1e6,
        window="every_layer",
        default_window=None,
        experts=ExpertFamily(
            names=ExpertNames(block="block_sparse_moe", parts=("w1", "w3", "w2")),
            default_num_experts=8,
            default_num_chosen=2,
            is_renormalised=True,
        ),
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        default_kv_heads=4,
        default_head_dim=256,
        default_is_tied=True,
        attention_bias="field",
        window="by_pattern",
        default_pattern=2,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        is_gemma=True,
        has_attention_softcap=True,
        default_attention_softcap=50.0,
        default_logit_softcap=30.0,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        default_kv_heads=4,
        default_head_dim=256,
        default_theta=1e6,
        default_local_theta=10_000.0,
        default_is_tied=True,
        attention_bias="field",
        has_qk_norm=True,
        window="by_pattern",
        default_pattern=6,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        is_gemma=True,
    ),
}
