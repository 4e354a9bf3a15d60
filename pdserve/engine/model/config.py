"""Reads the facts that the decoder needs from config.json of a Hugging Face folder. Pure, except that it reads files.

It is a reader of our own, because a wrong default (a rope base, a window) would silently give fluent wrong text.
config_schema.py lists how the supported architectures differ. Every unknown field is rejected with a ModelError that
names it. The windows and experts of layers, and the frequencies of the rotation, have a section each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.bounded_file import read_json_object
from pdserve.core.errors import ModelError
from pdserve.core.setting import LARGEST_COUNT
from pdserve.engine.model.config_schema import FAMILIES, Activation, ExpertFamily, ExpertNames, Family, Fields
from pdserve.engine.model.quantisation import PLAIN, Quantisation, read_quantisation

# --- which layers have an attention window, and which have experts --------------------------------------------

MAX_LAYER_EXPERTS: Final = 2**14
_COUNTS: Final = "num_experts", "num_local_experts"
_DEFAULT_FULL_LAYERS: Final = 28  # Qwen's max_window_layers
_KINDS: Final = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    names: ExpertNames
    num_experts: int
    num_chosen: int  # per token
    mlp_size: int  # of each expert
    is_renormalised: bool  # the weights of a token's experts are normalised to 1
    layers: frozenset[int]  # the others have one mlp for all tokens
    count_field: str = dataclasses.field(compare=False)  # of config.json, which says num_experts
    size_field: str  # of config.json, which says mlp_size


def read_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Per layer: the attention window in positions, its own included; None: no window."""
    if family.window == "none":
        return (None,) * num_layers
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields else family.default_window
    if family.window == "unused":
        fields.get("max_window_layers")
        return (None,) * num_layers
    if family.window == "every_layer":
        return (window,) * num_layers
    if family.window == "by_flag":
        is_used = fields.flag("use_sliding_window", False)
        num_full = fields.integer("max_window_layers", _DEFAULT_FULL_LAYERS, low=0)
        is_sliding = [is_used and window is not None and layer >= num_full for layer in range(num_layers)]
    else:
        is_used, pattern = True, _alias(fields, ("sliding_window_pattern", "_sliding_window_pattern"))
        is_sliding = [(layer + 1) % (pattern or family.default_pattern) != 0 for layer in range(num_layers)]
    kinds = fields.get("layer_types")
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) == num_layers
        if not is_list or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
            raise fields.error("layer_types", kinds, f"{num_layers} times full_attention or sliding_attention")
        is_sliding = [_KINDS[kind] for kind in kinds]
    if any(is_sliding) and (window is None or not is_used):
        needed = "a sliding_window" if is_used else "use_sliding_window and a sliding_window"
        raise fields.error("layer_types", "sliding_attention", f"{needed} beside it")
    return tuple(window if sliding else None for sliding in is_sliding)


def read_experts(fields: Fields, family: ExpertFamily, dense_mlp_size: int, num_layers: int) -> ExpertsConfig:
    num_experts = _alias(fields, _COUNTS) or family.default_num_experts
    count_field = next((name for name in _COUNTS if fields.get(name) is not None), _COUNTS[0])
    num_chosen = fields.integer("num_experts_per_tok", family.default_num_chosen)
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", num_chosen, f"at most {num_experts}, the number of experts")
    if num_experts > MAX_LAYER_EXPERTS:
        raise fields.error(count_field, num_experts, f"at most {MAX_LAYER_EXPERTS}")
    size_field, mlp_size, is_renormalised = "intermediate_size", dense_mlp_size, family.is_renormalised
    if family.default_mlp_size is not None:
        size_field = "moe_intermediate_size"
        mlp_size = fields.integer(size_field, family.default_mlp_size, high=2**20)
    if is_renormalised is None:
        is_renormalised = fields.flag("norm_topk_prob", False)
    return ExpertsConfig(
        names=family.names,
        num_experts=num_experts,
        num_chosen=num_chosen,
        mlp_size=mlp_size,
        is_renormalised=is_renormalised,
        layers=_expert_layers(fields, num_layers) if family.has_dense_layers else frozenset(range(num_layers)),
        count_field=count_field,
        size_field=size_field,
    )


def _expert_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    step = fields.integer("decoder_sparse_step", 1)
    dense: Any = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise fields.error("mlp_only_layers", dense, f"a list of layers below {num_layers}")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


def _alias(fields: Fields, names: tuple[str, ...]) -> int | None:
    """A field whose name depends on the version that wrote it."""
    seen = {name: fields.integer(name) for name in names if fields.get(name) is not None}
    if len(set(seen.values())) > 1:
        first, second = names
        raise fields.error(second, seen[second], f"{seen[first]}, as {first} says")
    return next(iter(seen.values()), None)


# --- frequencies of the rotation ------------------------------------------------------------------------------
# Checkpoints specify them as `rope_theta` and `rope_scaling` (transformers 4) or as `rope_parameters` (transformers 5).
# model/attention.py does the arithmetic.

DEFAULT_THETA: Final = 10_000.0

# rope type -> the fields that it uses; other fields in the object are rejected.
ROPE_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        }
    ),
}
LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_COMMON: Final = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Frequencies are theta^(-2i/head_dim), then scaled according to `kind`."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_positions: int = 0  # context of the pretraining; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # scales cos and sin; yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn rounds its ramp to whole dimensions


def read_rope(
    config: Fields, max_positions: int, default_theta: float = DEFAULT_THETA, *, layer_type: str | None = None
) -> tuple[RopeConfig, int]:
    """Returns the rope and the longest context that it serves.

    linear and yarn stretch the context by their factor. `dynamic` (NTK) does not change the frequencies up to
    max_position_embeddings. Beyond it they depend on the current length, which is impossible with cached keys, so it is
    served as `default` up to that length. If layers have different ropes, `layer_type` selects one; transformers 4
    wrote that of full_attention.
    """
    name, values = _rope_object(config, layer_type)
    theta = config.number("rope_theta", default_theta, above=1.0)
    outer_original = config.optional_integer("original_max_position_embeddings")
    return _parse(name, values, theta, outer_original, max_positions)


def read_local_rope(config: Fields, max_positions: int, default_theta: float) -> RopeConfig:
    """The rope of layers with a window, if it differs: rope_local_base_freq, or a separate object."""
    theta = config.number("rope_local_base_freq", default_theta, above=1.0)
    parameters = config.get("rope_parameters")
    values = parameters.get("sliding_attention") if isinstance(parameters, dict) else None
    rope, _ = _parse("rope_parameters.sliding_attention", values or {}, theta, None, max_positions)
    return rope


def _parse(
    name: str, values: Mapping[str, Any], default_theta: float, outer_original: int | None, max_positions: int
) -> tuple[RopeConfig, int]:
    fields = Fields(values, path=name + ".")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ModelError(f"{name}.rope_type", kind, "one of " + ", ".join(ROPE_TYPES))
    for field in values:
        if field not in ROPE_TYPES[kind] | _COMMON and values[field] is not None:
            raise fields.error(field, values[field], f"no such field beside rope type {kind}")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", fields.get("partial_rotary_factor"), "1: whole heads rotate")
    theta = fields.number("rope_theta", default_theta, above=1.0)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta), max_positions
    if kind == "linear":
        factor = fields.number("factor")
        return RopeConfig(kind=kind, theta=theta, factor=factor), _stretched(fields, max_positions, factor)
    original = outer_original or fields.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", high, f"more than low_freq_factor, which is {low:g}")
        rope = RopeConfig(
            kind=kind,
            theta=theta,
            factor=fields.number("factor"),
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return rope, max_positions
    rope = _read_yarn(fields, theta, original, max_positions)
    return rope, max(max_positions, _stretched(fields, original, rope.factor))


def _stretched(fields: Fields, num_positions: int, factor: float) -> int:
    if not 1 <= num_positions * factor <= LARGEST_COUNT:
        raise fields.error("factor", factor, f"1 to {LARGEST_COUNT} positions; it stretches {num_positions}")
    return int(num_positions * factor)


def _rope_object(config: Fields, layer_type: str | None) -> tuple[str, Mapping[str, Any]]:
    """Its name and its fields. `rope_scaling` (transformers 4) takes precedence over `rope_parameters`."""
    for name in ("rope_scaling", "rope_parameters"):
        values = config.get(name)
        if values is None or values == {}:
            continue
        if not isinstance(values, dict):
            raise config.error(name, values, "an object")
        if name == "rope_parameters" and layer_type is not None:
            if not values.keys() <= LAYER_TYPES or not all(isinstance(one, dict) for one in values.values()):
                raise config.error(name, sorted(values), "an object for each of " + ", ".join(sorted(LAYER_TYPES)))
            return f"{name}.{layer_type}", values.get(layer_type, {})
        for field, value in values.items():
            if isinstance(value, dict):
                raise config.error(f"{name}.{field}", "an object", "one rope for all layers")
        return name, values
    return "rope_parameters", {}


def _read_yarn(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = fields.number("factor", max_positions / original)
    mscale, mscale_all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        if mscale is not None and mscale_all_dim is not None:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_positions=original,
        attention_factor=attention_factor,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        is_truncated=fields.flag("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Source: YaRN (arXiv 2309.00071), section 3.4."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


# --- the whole config -----------------------------------------------------------------------------------------

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
        eos_token_ids=read_eos_token_ids(fields, Fields(generation, path="generation_config.json: "), vocab_size),
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
            raise ModelError(experts.count_field, seen, f"at most {MAX_EXPERTS} in all layers")
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


def read_eos_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
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
