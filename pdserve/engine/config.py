"""Reads the facts that the decoder needs from config.json of a Hugging Face folder. Pure, except that it reads files.

It is a reader of our own, because a wrong default (a rope base, a window) would silently give fluent wrong text.
families.py lists how the supported architectures differ. Every unknown field is rejected with a ModelError that names
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import read_json_object
from pdserve.core.errors import ModelError
from pdserve.engine.config_fields import Fields
from pdserve.engine.families import FAMILIES, Activation, Family
from pdserve.engine.layers_config import ExpertsConfig, read_experts, read_windows
from pdserve.engine.quantisation_config import PLAIN, Quantisation, read_quantisation
from pdserve.engine.rope_config import RopeConfig, read_local_rope, read_rope

CONFIG: Final = "config.json"
# About ten times the largest known models.
MAX_LAYERS: Final = 2048
MAX_HEADS: Final = 4096  # also the largest head
MAX_WIDTH: Final = 2**20
MAX_VOCAB: Final = 2**24
MAX_EXPERTS: Final = 2**18  # in all layers
MAX_WEIGHTS: Final = 2**44
CHECKPOINT_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    ropes: tuple[RopeConfig, ...]  # per layer
    windows: tuple[int | None, ...]  # per layer: the attention window in positions, its own included; None: no window
    activation: Activation
    embedding_scale: float
    attention_scale: float  # scale of query times key
    attention_softcap: float | None  # softcap of scores and logits
    logit_softcap: float | None
    experts: ExpertsConfig | None
    is_tied: bool  # the output head is the embedding
    is_norm_offset: bool  # norms store their weights minus 1
    has_post_norms: bool  # the outputs of attention and mlp are normed before they are added
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint
    quantisation: Quantisation = PLAIN  # quantisation of the stored matrices

    @property
    def stored(self) -> str:
        """What `--dtype auto` goes by: int4, or the checkpoint's dtype."""
        return "int4" if self.quantisation.is_4_bit else self.dtype


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelError, naming the field, if the model cannot be served exactly."""
    if not folder.is_dir():
        raise ModelError("model", folder, "the folder of a Hugging Face checkpoint")
    values = read_json_object(folder / CONFIG)
    if values is None:
        raise ModelError(CONFIG, f"nothing in {folder}", "the model's configuration")
    return parse_config(values, read_json_object(folder / "generation_config.json") or {})


def parse_config(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", family.default_kv_heads or num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    head_dim = fields.integer(
        "head_dim", family.default_head_dim or hidden_size // num_heads or None, low=2, high=MAX_HEADS
    )
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number: rotation works on pairs")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = fields.integer("vocab_size", high=MAX_VOCAB)
    has_attention_bias = family.attention_bias == "field" and fields.flag("attention_bias", False)
    rope, max_context_tokens, local_rope = _ropes(fields, family)
    windows = read_windows(fields, family, num_layers)
    mlp_size = fields.integer("intermediate_size", high=MAX_WIDTH)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        mlp_size=mlp_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", family.default_norm_eps),
        ropes=tuple(rope if window is None else local_rope for window in windows),
        windows=windows,
        activation=_activation(fields, family),
        embedding_scale=hidden_size**0.5 if family.is_gemma else 1.0,
        attention_scale=(fields.number("query_pre_attn_scalar", 256.0) if family.is_gemma else head_dim) ** -0.5,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", family.default_attention_softcap)
        if family.has_attention_softcap
        else None,
        logit_softcap=_softcap(fields, "final_logit_softcapping", family.default_logit_softcap)
        if family.is_gemma
        else None,
        experts=read_experts(fields, family.experts, mlp_size, num_layers) if family.experts is not None else None,
        is_tied=fields.flag("tie_word_embeddings", family.default_is_tied),
        is_norm_offset=family.is_gemma,
        has_post_norms=family.is_gemma,
        has_qkv_bias=has_attention_bias or family.attention_bias == "qkv",
        has_o_bias=has_attention_bias,
        has_mlp_bias=family.has_mlp_bias_field and fields.flag("mlp_bias", False),
        has_qk_norm=family.has_qk_norm,
        max_context_tokens=max_context_tokens,
        eos_token_ids=_eos_token_ids(fields, Fields(generation, path="generation_config.json: "), vocab_size),
        dtype=_dtype(fields),
        quantisation=read_quantisation(fields.get("quantization_config")),
    )
    fields.refuse_unread()
    _check_size(config)
    return config


def _check_size(config: ModelConfig) -> None:
    """Raises ModelError if the sizes give a model that no host holds: every matrix is listed before it is read."""
    experts = config.experts
    sizes = [config.mlp_size] * config.num_layers
    if experts is not None:
        for layer in experts.layers:
            sizes[layer] = experts.num_experts * experts.mlp_size
        if experts.num_experts * len(experts.layers) > MAX_EXPERTS:
            seen = f"{experts.num_experts} experts in each of {len(experts.layers)} layers"
            raise ModelError("num_experts", seen, f"at most {MAX_EXPERTS} in all layers")
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    count = config.hidden_size * (config.num_layers * heads + 3 * sum(sizes) + 2 * config.vocab_size)
    if count > MAX_WEIGHTS:
        raise ModelError(CONFIG, f"sizes that give {count} weights", f"at most {MAX_WEIGHTS}")


def _architecture(fields: Fields) -> str:
    names, model_type = fields.get("architectures") or [], fields.get("model_type")
    for name, value in (("architectures", names), ("model_type", [model_type])):
        if not isinstance(value, list) or not all(one is None or isinstance(one, str) for one in value):
            raise fields.error(name, fields.get(name), "names of architectures")
    if not names:  # written by hand, or by a tool that keeps only model_type
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type] or [model_type]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise fields.error("architectures", names, "one of " + ", ".join(FAMILIES))
    if model_type not in (None, FAMILIES[names[0]].model_type):
        raise fields.error("model_type", model_type, f"{FAMILIES[names[0]].model_type}, as {names[0]} has")
    return str(names[0])


def _ropes(fields: Fields, family: Family) -> tuple[RopeConfig, int, RopeConfig]:
    """The rope of layers without a window, the longest context, and the rope of layers with a window."""
    max_positions, local_theta = fields.integer("max_position_embeddings"), family.default_local_theta
    if local_theta is None:
        rope, max_context_tokens = read_rope(fields, max_positions, family.default_theta)
        return rope, max_context_tokens, rope
    rope, _ = read_rope(fields, max_positions, family.default_theta, layer_type="full_attention")
    return rope, max_positions, read_local_rope(fields, max_positions, local_theta)


def _activation(fields: Fields, family: Family) -> Activation:
    for name in (family.activation_field, "hidden_act"):  # some files have both, with different values
        fields.choice(name, (family.activation,), family.activation)
    return family.activation


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    return fields.optional_number(name) if name in fields else default


def _eos_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and generation_config.json: chat models often list the end of a turn only
    in the latter."""
    ids: set[int] = set()
    for source in (fields, generation):
        value = source.get("eos_token_id")
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
                raise source.error("eos_token_id", one, f"token ids below {vocab_size}")
            ids.add(one)
    return tuple(sorted(ids))


def _dtype(fields: Fields) -> str:
    value = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in CHECKPOINT_DTYPES:
        raise fields.error("dtype", value, "one of " + ", ".join(CHECKPOINT_DTYPES))
    return name
