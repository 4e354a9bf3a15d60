"""Reads how the layers of one model differ: which have an attention window, and which have experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pdserve.engine.config_fields import Fields
from pdserve.engine.families import ExpertFamily, ExpertNames, Family

MAX_LAYER_EXPERTS: Final = 2**14
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
    num_experts = _alias(fields, ("num_experts", "num_local_experts")) or family.default_num_experts
    num_chosen = fields.integer("num_experts_per_tok", family.default_num_chosen)
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", num_chosen, f"at most {num_experts}, the number of experts")
    if num_experts > MAX_LAYER_EXPERTS:
        raise fields.error("num_experts", num_experts, f"at most {MAX_LAYER_EXPERTS}")
    mlp_size, is_renormalised = dense_mlp_size, family.is_renormalised
    if family.default_mlp_size is not None:
        mlp_size = fields.integer("moe_intermediate_size", family.default_mlp_size, high=2**20)
    if is_renormalised is None:
        is_renormalised = fields.flag("norm_topk_prob", False)
    return ExpertsConfig(
        names=family.names,
        num_experts=num_experts,
        num_chosen=num_chosen,
        mlp_size=mlp_size,
        is_renormalised=is_renormalised,
        layers=_expert_layers(fields, num_layers) if family.has_dense_layers else frozenset(range(num_layers)),
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
