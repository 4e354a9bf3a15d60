"""Reads quantization_config of config.json: which matrices are stored rounded, and how; and, for 4 bits, how integers,
scales and zeros are packed (`PackedScheme`). Pure.

Weights of 8 bits with one positive scale per group are supported, and weights of 4 bits in groups of inputs. A recipe
that also rounds activations with scales found at run time is served with unrounded activations, which is closer to the
trained model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pdserve.core.errors import ModelError

# --- how GPTQ, AWQ and compressed-tensors pack 4-bit weights --------------------------------------------------
#     w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g]         0 <= q <= 15; g is the group of input k
#
# Eight integers are packed in an int32, the first one in its lowest bits. K inputs, N outputs, S inputs of a group:
#
#     format           weights       scales        zeros
#     gptq             [K / 8, N]    [K / S, N]    [K / S, N / 8], reduced by 1 modulo 16
#     gptq_v2          the same      the same      [K / S, N / 8]
#     awq              [K, N / 8]    the same      [K / S, N / 8]; eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
#     pack-quantized   [N, K / 8]    [N, K / S]    [N / 8, K / S]; none if symmetric, then 8

PackedFormat = Literal["gptq", "gptq_v2", "awq", "pack-quantized"]
PER_WORD: Final = 8  # integers of an int32


@dataclass(frozen=True, slots=True)
class Axis:
    """One stored element for `count` outputs or inputs; None: for all."""

    along: Literal["outputs", "inputs"]
    count: int | None

    def length(self, total: int) -> int:
        return 1 if self.count is None else -(-total // self.count)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    suffix: str  # of its name, after that of the module
    dtypes: tuple[str, ...]
    rows: Axis
    columns: Axis


@dataclass(frozen=True, slots=True)
class PackedScheme:
    format: PackedFormat
    group: int | None  # inputs that share a scale; None: all
    has_zeros: bool = True

    def tensors(self) -> tuple[PackedTensor, ...]:
        """The packed weights, the scales, and the zeros if any."""
        groups, words, floats = Axis("inputs", self.group), ("I32",), ("F16", "BF16", "F32")
        if self.format == "pack-quantized":
            outputs, packed = Axis("outputs", 1), Axis("outputs", PER_WORD)
            found = (
                PackedTensor("weight_packed", words, outputs, Axis("inputs", PER_WORD)),
                PackedTensor("weight_scale", floats, outputs, groups),
                PackedTensor("weight_zero_point", words, packed, groups),
            )
            return found if self.has_zeros else found[:2]
        is_awq = self.format == "awq"
        inputs, outputs = Axis("inputs", 1 if is_awq else PER_WORD), Axis("outputs", PER_WORD if is_awq else 1)
        return (
            PackedTensor("qweight", words, inputs, outputs),
            PackedTensor("scales", floats, groups, Axis("outputs", 1)),
            PackedTensor("qzeros", words, groups, Axis("outputs", PER_WORD)),
        )

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of stored tensors that add nothing: the groups of neighbouring inputs, the shape, and the zeros that
        AutoGPTQ writes as the bias of a matrix without one."""
        if self.format == "pack-quantized":
            return ("weight_shape",)
        return () if self.format == "awq" else ("g_idx", "bias")

    def shape(self, tensor: PackedTensor, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        totals = {"outputs": num_outputs, "inputs": num_inputs}
        return tensor.rows.length(totals[tensor.rows.along]), tensor.columns.length(totals[tensor.columns.along])


# --- quantization_config --------------------------------------------------------------------------------------

SUPPORTED: Final = (
    "fp8 (e4m3 per tensor or block), fbgemm_fp8, gptq or awq (4 bits), or compressed-tensors with format "
    "float-quantized, int-quantized or naive-quantized (8 bits, symmetric, weights per tensor, channel, group or "
    "block) or pack-quantized (4 bits, weights per channel or group)"
)
_FIELD: Final = "quantization_config"
_STORED: Final[Mapping[str, str]] = {"float": "F8_E4M3", "int": "I8"}
_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_LEAST_GROUP: Final = 32  # inputs that share a scale of 4-bit weights


@dataclass(frozen=True, slots=True)
class Scheme:
    """w = stored * scale; `block` is the numbers of outputs and inputs that share a scale (None: all)."""

    stored: Literal["F8_E4M3", "I8"]
    scale_name: str  # weight_scale or weight_scale_inv, beside the weight
    block: tuple[int | None, int | None]

    def scale_counts(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        rows, columns = self.block
        return -(-num_outputs // (rows or num_outputs)), -(-num_inputs // (columns or num_inputs))

    def scale_shapes(self, num_outputs: int, num_inputs: int) -> tuple[tuple[int, ...], ...]:
        """The stored shapes: [N, 1] or [N] per channel; [], [1] or [1, 1] per tensor."""
        counts = self.scale_counts(num_outputs, num_inputs)
        is_per_tensor, is_flat = self.block == (None, None), self.block[1] is None
        return (counts, *(((counts[0],),) if is_flat else ()), *(((),) if is_per_tensor else ()))


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """Matches a module name, its end or beginning, `Linear` for all, or a pattern after `re:`."""

    text: str

    def matches(self, module: str) -> bool:
        if self.text.startswith("re:"):
            return re.match(self.text[3:], module) is not None
        return self.text == "Linear" or f".{self.text}." in f".{module}."


@dataclass(frozen=True, slots=True)
class Quantisation:
    groups: tuple[tuple[tuple[ModuleRule, ...], Scheme | PackedScheme], ...]
    ignored: tuple[ModuleRule, ...]

    @property
    def is_4_bit(self) -> bool:
        return any(isinstance(scheme, PackedScheme) for _, scheme in self.groups)

    def scheme(self, module: str) -> Scheme | PackedScheme | None:
        """None: not quantised."""
        if any(rule.matches(module) for rule in self.ignored):
            return None
        return next((scheme for rules, scheme in self.groups if any(rule.matches(module) for rule in rules)), None)


PLAIN: Final = Quantisation((), ())


def read_quantisation(value: Any) -> Quantisation:
    """`value` is quantization_config, or None. Raises ModelError naming the scheme."""
    if value is None:
        return PLAIN
    if not isinstance(value, dict):
        raise ModelError(_FIELD, f"a {type(value).__name__}", "an object")
    method = value.get("quant_method")
    if method == "fp8":
        return _fp8(value)
    if method == "fbgemm_fp8":
        rules = _rules(value, "modules_to_not_convert")
        scheme = Scheme("F8_E4M3", "weight_scale", (1, None))
        return Quantisation((((ModuleRule("Linear"),), scheme),), (*rules, ModuleRule("lm_head")))
    if method == "compressed-tensors":
        return _compressed_tensors(value)
    if method == "gptq":
        return _gptq(value)
    if method == "awq":
        return _awq(value)
    raise ModelError(f"{_FIELD}.quant_method", method, SUPPORTED)


def _fp8(value: Mapping[str, Any]) -> Quantisation:
    _choice(value, "activation_scheme", ("dynamic", None))
    _choice(value, "fmt", ("e4m3", "float8_e4m3fn", None))
    block = value.get("weight_block_size")
    if block is None:
        scheme = Scheme("F8_E4M3", "weight_scale", (None, None))
    else:
        scheme = Scheme("F8_E4M3", "weight_scale_inv", _block(block, "weight_block_size"))
    ignored = _rules(value, "modules_to_not_convert") + _rules(value, "ignored_layers")
    return Quantisation((((ModuleRule("Linear"),), scheme),), (*ignored, ModuleRule("lm_head")))


def _gptq(value: Mapping[str, Any]) -> Quantisation:
    _choice(value, "bits", (4,))
    _choice(value, "desc_act", (False, None))  # otherwise neighbouring inputs are in different groups
    _choice(value, "checkpoint_format", ("gptq", "gptq_v2", None))
    _choice(value, "dynamic", (None, {}))  # other settings for some modules
    form: PackedFormat = "gptq_v2" if value.get("checkpoint_format") == "gptq_v2" else "gptq"
    scheme = PackedScheme(form, _group(value.get("group_size"), f"{_FIELD}.group_size"))
    inside = value.get("modules_in_block_to_quantize")
    if inside is None:
        rules: tuple[ModuleRule, ...] = (ModuleRule("Linear"),)
    else:  # lists of modules that are quantised together
        lists = inside if isinstance(inside, list) else [inside]
        flat = [name for one in lists for name in (one if isinstance(one, list) else [one])]
        rules = _rules({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")
    if value.get("lm_head") is True:
        return Quantisation((((*rules, ModuleRule("lm_head")), scheme),), ())
    return Quantisation(((rules, scheme),), (ModuleRule("lm_head"),))


def _awq(value: Mapping[str, Any]) -> Quantisation:
    for name in ("bits", "w_bit") if "bits" in value or "w_bit" not in value else ("w_bit",):
        if name == "bits" or name in value:
            _choice(value, name, (4,))
    _choice(value, "version", ("gemm", "GEMM", None))  # others order the integers differently
    _choice(value, "zero_point", (True, None))
    size = "q_group_size" if "q_group_size" in value else "group_size"
    scheme = PackedScheme("awq", _group(value.get(size), f"{_FIELD}.{size}"))
    ignored = (*_rules(value, "modules_to_not_convert"), ModuleRule("lm_head"))
    return Quantisation((((ModuleRule("Linear"),), scheme),), ignored)


def _group(size: Any, at: str) -> int | None:
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < _LEAST_GROUP or size % PER_WORD:
        raise ModelError(at, size, f"-1 (all inputs), or a multiple of {PER_WORD} from {_LEAST_GROUP} on")
    return size


def _compressed_tensors(value: Mapping[str, Any]) -> Quantisation:
    _choice(value, "quantization_status", ("compressed", "frozen", None))
    if value.get("kv_cache_scheme") is not None:
        raise ModelError(f"{_FIELD}.kv_cache_scheme", "a scheme for the KV cache", "null")
    for name in ("sparsity_config", "transform_config"):
        inner = value.get(name) or {}
        if inner and not (name == "sparsity_config" and isinstance(inner, dict) and inner.get("format") == "dense"):
            raise ModelError(f"{_FIELD}.{name}", inner, "none: weights are stored dense and as they are multiplied")
    groups = value.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"{_FIELD}.config_groups", groups, "an object of groups, each with targets and weights")
    found: list[tuple[tuple[ModuleRule, ...], Scheme | PackedScheme]] = []
    for name, group in groups.items():
        at = f"{_FIELD}.config_groups.{name}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ModelError(at, group, "an object with targets and weights")
        form = group.get("format") or value.get("format")
        if form not in _FORMATS:
            raise ModelError(f"{_FIELD}.format", form, SUPPORTED)
        _check_activations(group.get("input_activations"), f"{at}.input_activations")
        _check_activations(group.get("output_activations"), f"{at}.output_activations")
        scheme_of = _packed_scheme if form == "pack-quantized" else _weights_scheme
        found.append((_rules(group, "targets"), scheme_of(group["weights"], f"{at}.weights")))
    return Quantisation(tuple(found), _rules(value, "ignore"))


def _check_activations(value: Any, at: str) -> None:
    if value is not None and (not isinstance(value, dict) or value.get("dynamic") not in (True, "local")):
        raise ModelError(at, "static scales of activations", "null, or dynamic: true")


def _weights_scheme(weights: Mapping[str, Any], at: str) -> Scheme:
    kind = weights.get("type")
    if not isinstance(kind, str) or kind not in _STORED or weights.get("num_bits") != 8:
        raise ModelError(at, f"{kind} of {weights.get('num_bits')} bits", SUPPORTED)
    if weights.get("symmetric") is not True:
        raise ModelError(f"{at}.symmetric", weights.get("symmetric"), "true: zero points are not served")
    _check_order(weights, at)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    block: tuple[int | None, int | None]
    if strategy == "tensor":
        block = (None, None)
    elif strategy == "channel":
        block = (1, None)
    elif strategy == "group" and isinstance(size, int) and not isinstance(size, bool) and size > 0:
        block = (1, size)
    elif strategy == "block":
        block = _block(weights.get("block_structure"), f"{at}.block_structure")
    else:
        raise ModelError(f"{at}.strategy", strategy, "tensor, channel, block, or group with a group_size")
    return Scheme("F8_E4M3" if kind == "float" else "I8", "weight_scale", block)


def _packed_scheme(weights: Mapping[str, Any], at: str) -> PackedScheme:
    if weights.get("type") != "int" or weights.get("num_bits") != 4:
        raise ModelError(at, f"{weights.get('type')} of {weights.get('num_bits')} bits", SUPPORTED)
    _check_order(weights, at)
    strategy, is_symmetric = weights.get("strategy"), weights.get("symmetric")
    if strategy not in ("channel", "group"):
        raise ModelError(f"{at}.strategy", strategy, "channel or group")
    if not isinstance(is_symmetric, bool):
        raise ModelError(f"{at}.symmetric", is_symmetric, "true or false")
    size = _group(weights.get("group_size"), f"{at}.group_size") if strategy == "group" else None
    return PackedScheme("pack-quantized", size, has_zeros=not is_symmetric)


def _check_order(weights: Mapping[str, Any], at: str) -> None:
    if weights.get("actorder") not in (None, "static", "weight"):
        raise ModelError(f"{at}.actorder", weights.get("actorder"), "null: groups of neighbouring inputs")


def _block(value: Any, at: str) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in value):
        raise ModelError(at, value, "two positive integers: outputs and inputs that share a scale")
    return value[0], value[1]


def _rules(value: Mapping[str, Any], name: str) -> tuple[ModuleRule, ...]:
    texts: Sequence[Any] = value.get(name) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ModelError(f"{_FIELD}.{name}", texts, "a list of module names")
    for text in texts:
        try:
            re.compile(text.removeprefix("re:") if text.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"{_FIELD}.{name}", text, f"a regular expression after re: ({error})") from error
    return tuple(ModuleRule(text) for text in texts)


def _choice(value: Mapping[str, Any], name: str, choices: Sequence[Any]) -> None:
    seen = value.get(name)
    if seen not in choices:
        expected = " or ".join("none" if one is None else str(one) for one in choices)
        raise ModelError(f"{_FIELD}.{name}", seen, expected)
