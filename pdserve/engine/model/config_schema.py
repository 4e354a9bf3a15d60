"""What config.json may say: a reader that rejects fields that were not read, and FAMILIES, how the supported
architectures differ. Pure.

An unknown field may change the mathematics, so it is rejected by name. HARMLESS and NEUTRAL list the fields that do not
(checked against the configurations that transformers 4 and 5 write, and those on the Hub).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from pdserve.core.errors import ModelError
from pdserve.core.setting import LARGEST_COUNT

# These do not change the logits with any value.
_HARMLESS_NAMES: Final = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attention_dropout attn_implementation attn_pdrop begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout
    id2label initializer_range keys_to_ignore_at_inference label2id length_penalty max_length max_sequence_length
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
"""
HARMLESS: Final = frozenset(_HARMLESS_NAMES.split())

# These do not change the logits if they have the given value, or null.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),  # for families without it; a family that has it reads it
    "attn_logit_softcapping": (0, 0.0),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


LARGEST_NUMBER: Final = 1e15


@final
class Fields:
    """One JSON object; `path` is the prefix of names in errors. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """True even if the value is null, because null has a meaning for some fields."""
        return name in self._values

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST_COUNT) -> int:
        value = self._present(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._present(name, default)
        if type(value) not in (int, float) or not above < value <= LARGEST_NUMBER:
            raise self.error(name, value, f"a number above {above:g}, at most {LARGEST_NUMBER:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self._present(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, value, "one of " + ", ".join(choices))
        return value

    def refuse_unread(self) -> None:
        """Raises ModelError for the first field that was not read and is not known to be harmless."""
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or value is None:
                continue
            if name in NEUTRAL:
                if value in NEUTRAL[name]:
                    continue
                raise self.error(name, value, f"{NEUTRAL[name][0]}, the only value that this architecture can serve")
            raise self.error(name, value, "no such field: it may change the mathematics and is not implemented")

    def error(self, name: str, seen: object, expected: str) -> ModelError:
        return ModelError(self._path + name, seen, expected)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "nothing", "a value: this field is required")
        return value


# --- the supported architectures ------------------------------------------------------------------------------
# Names of fields and their defaults, which are those of transformers. Data only. A new architecture that needs no new
# mathematics is a new row of FAMILIES.

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
