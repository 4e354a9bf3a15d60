"""Reads how a checkpoint turns positions into rotation frequencies. Pure; rope.py does the arithmetic.

Checkpoints specify it as `rope_theta` and `rope_scaling` (transformers 4) or as `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.core.errors import ModelError
from pdserve.core.setting import LARGEST_COUNT
from pdserve.engine.config_fields import Fields

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
