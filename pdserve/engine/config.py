"""Reads config.json of a Hugging Face folder into the facts that the decoder needs. Pure but for reading files.

Our own reader, because a default that is taken silently (a rope base, a window) gives fluent wrong text. FAMILIES
says how the architectures that we serve differ; where config.json is silent they take the defaults of
transformers. Everything unknown is refused with a ModelError that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pdserve.core.errors import ModelError
from pdserve.engine.config_fields import Fields
from pdserve.engine.quantisation_config import PLAIN, Quantisation, read_quantisation
from pdserve.engine.rope_config import RopeConfig, read_rope

CHECKPOINT_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    model_type: str
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    attention_bias: Literal["none", "qkv", "field"] = "none"  # field: attention_bias puts one on q, k, v and o
    has_mlp_bias_field: bool = False
    has_qk_norm: bool = False
    window: Literal["none", "every_layer", "by_layer"] = "none"


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(model_type="llama", attention_bias="field", has_mlp_bias_field=True),
    "MistralForCausalLM": Family(model_type="mistral", default_kv_heads=8, window="every_layer"),
    "Qwen2ForCausalLM": Family(model_type="qwen2", default_kv_heads=32, attention_bias="qkv", window="by_layer"),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        default_kv_heads=32,
        default_head_dim=128,
        attention_bias="field",
        has_qk_norm=True,
        window="by_layer",
    ),
}
_DEFAULT_WINDOW: Final = 4096  # of Mistral and Qwen where the field is absent
_DEFAULT_FULL_LAYERS: Final = 28  # Qwen's max_window_layers


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
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: how many last positions it sees, its own included; None: all
    is_tied: bool  # the output head is the embedding
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint
    quantisation: Quantisation = PLAIN  # which of its matrices are stored in eight bits


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelError, naming the field, where the model is not one that we serve exactly."""
    if not folder.is_dir():
        raise ModelError("model", folder, "the folder of a Hugging Face checkpoint")
    values = _read_object(folder / "config.json")
    if values is None:
        raise ModelError("config.json", f"nothing in {folder}", "the model's configuration")
    return parse_config(values, _read_object(folder / "generation_config.json") or {})


def parse_config(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields.choice("hidden_act", ("silu",), "silu")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", family.default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    head_dim = fields.integer("head_dim", family.default_head_dim or hidden_size // num_heads or None, low=2)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number: rotation works on pairs")
    num_layers, vocab_size = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    has_attention_bias = family.attention_bias == "field" and fields.flag("attention_bias", False)
    rope, max_context_tokens = read_rope(fields, fields.integer("max_position_embeddings"))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        mlp_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(fields, family, num_layers),
        is_tied=fields.flag("tie_word_embeddings", False),
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
    return config


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures") or []
    model_type = fields.get("model_type")
    if not names:  # written by hand, or by a tool that keeps only model_type
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type] or [model_type]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise fields.error("architectures", names, "one of " + ", ".join(FAMILIES))
    if model_type not in (None, FAMILIES[names[0]].model_type):
        raise fields.error("model_type", model_type, f"{FAMILIES[names[0]].model_type}, as {names[0]} has")
    return str(names[0])


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.window == "none":
        return (None,) * num_layers
    is_absent = "sliding_window" not in fields
    window = _DEFAULT_WINDOW if is_absent else fields.optional_integer("sliding_window")
    if family.window == "every_layer":
        return (window,) * num_layers
    is_used = fields.flag("use_sliding_window", False)
    num_full = fields.integer("max_window_layers", _DEFAULT_FULL_LAYERS, low=0)
    kinds = fields.get("layer_types")
    if kinds is None:
        is_sliding = [is_used and window is not None and layer >= num_full for layer in range(num_layers)]
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise fields.error("layer_types", kinds, f"{num_layers} times full_attention or sliding_attention")
        is_sliding = [known[kind] for kind in kinds]
    if any(is_sliding) and (window is None or not is_used):
        raise fields.error("layer_types", "sliding_attention", "use_sliding_window and a sliding_window beside it")
    return tuple(window if sliding else None for sliding in is_sliding)


def _eos_token_ids(fields: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """Those of config.json and generation_config.json: chat models often name the turn's end only in the latter."""
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


def _read_object(path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(path.name, str(error), "a readable JSON file") from error
    if not isinstance(values, dict):
        raise ModelError(path.name, f"a {type(values).__name__}", "a JSON object")
    return values
