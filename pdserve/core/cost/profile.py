"""Parses a profile: the cost, memory and links of a kind of worker, known before it runs. Pure: reads no file.

    {"name": ..., "prefill_s": {"base", "per_token", "per_token_context"},
     "decode_s": {"base", "per_row", "per_context_token"}, "kv_bytes_per_token", "kv_capacity_tokens",
     "link": {NAME: {"latency_s", "bytes_per_s"}}, "is_gpu"}

A file with "tensor_parallel" has a set of coefficients for each degree, published in milliseconds as a + b * sum(L) + c
* sum(L^2). NAME:tp2 selects one of them. Its decode times are piecewise, with a break at batch 95. The piece for
smaller batches is used, so steps of larger batches are predicted too short.

"model_shape": {"num_layers", "hidden_size", "num_kv_heads", "weights_bytes"} is optional: with it, costs of other
tensor-parallel degrees can be derived (`profiles_by_degree`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pdserve.core.cost.latency import LONGEST_S, CostPrior
from pdserve.core.errors import ConfigError

MAX_DEGREE_DIGITS: Final = 4
DEGREES: Final = "tensor_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The values that determine the cost of tensor parallelism. `weights_bytes` is for the whole model."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    name: str
    cost: CostPrior
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    links: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # seconds of latency, bytes per second
    source: str = ""
    shape: ModelShape | None = None
    degree: int = 1  # GPUs per worker
    is_gpu: bool = False
    derived: str = ""  # the values that were derived from another degree instead of measured


def degrees(data: Mapping[str, Any]) -> list[int]:
    """The tensor-parallel degrees for which a profile can be parsed; none if it describes one kind of worker."""
    rows = data.get(DEGREES)
    rows = rows if isinstance(rows, Mapping) else {}
    named = {key: row for key, row in rows.items() if isinstance(row, Mapping) and "kv_capacity_tokens" in row}
    return sorted(int(key) for key in named if key.isascii() and key.isdecimal() and len(key) <= MAX_DEGREE_DIGITS)


def parse_profile(data: Mapping[str, Any], degree: int = 0) -> Profile:
    """Raises ConfigError with the name of an invalid field. If the profile has several tensor-parallel degrees,
    `degree` selects one."""
    root = _Node("", data)
    if DEGREES in root.data:
        return _per_degree(root, degree)
    if degree:
        raise ConfigError("profile", f"degree {degree}", "no degree, because the profile has only one")
    prefill, decode = root.node("prefill_s"), root.node("decode_s")
    return Profile(
        name=root.text("name"),
        cost=CostPrior(
            prefill_base_s=prefill.seconds("base"),
            prefill_per_token_s=prefill.seconds("per_token"),
            prefill_per_token_context_s=prefill.seconds("per_token_context"),
            decode_base_s=decode.seconds("base"),
            decode_per_row_s=decode.seconds("per_row"),
            decode_per_context_token_s=decode.seconds("per_context_token"),
        ),
        kv_bytes_per_token=root.count("kv_bytes_per_token"),
        kv_capacity_tokens=root.count("kv_capacity_tokens"),
        links=_links(root),
        source=str(data.get("source", "")),
        shape=_shape(root),
        is_gpu=root.data.get("is_gpu") is True,
    )


def _per_degree(root: _Node, degree: int) -> Profile:
    known = degrees(root.data)
    if degree not in known:
        expected = " or ".join(f":tp{one}" for one in known)
        raise ConfigError("profile", f"degree {degree}" if degree else "no degree", f"{expected} behind its name")
    row = root.node(DEGREES).node(str(degree))
    prefill, decode = row.milliseconds("prefill_ms"), row.milliseconds("decode_small_batch_ms")
    return Profile(
        name=f"{root.text('name')}:tp{degree}",
        cost=CostPrior(
            prefill_base_s=prefill[0],
            prefill_per_token_s=prefill[1],
            prefill_per_token_context_s=2.0 * prefill[2],  # c * L^2 is 2c * L * (L / 2)
            decode_base_s=decode[0],
            decode_per_row_s=decode[2],
            decode_per_context_token_s=decode[1],
        ),
        kv_bytes_per_token=root.count("kv_bytes_per_token"),
        kv_capacity_tokens=row.count("kv_capacity_tokens"),
        links=_links(root),
        source=str(root.data.get("source", "")),
        shape=_shape(root),
        degree=degree,
        is_gpu=root.data.get("is_gpu") is True,
    )


def _links(root: _Node) -> dict[str, tuple[float, float]]:
    if "link" not in root.data:
        return {}
    links = root.node("link")
    return {name: (links.node(name).seconds("latency_s"), links.node(name).rate("bytes_per_s")) for name in links.data}


def _shape(root: _Node) -> ModelShape | None:
    if "model_shape" not in root.data:
        return None
    node = root.node("model_shape")
    return ModelShape(
        num_layers=node.count("num_layers"),
        hidden_size=node.count("hidden_size"),
        num_kv_heads=node.count("num_kv_heads"),
        weights_bytes=node.count("weights_bytes"),
    )


class _Node:
    """A JSON object, and its path for error messages."""

    def __init__(self, at: str, data: object) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(at or "profile", data, "a JSON object")
        self.data: Mapping[str, Any] = data
        self._at = at

    def node(self, name: str) -> _Node:
        return _Node(self._path(name), self.data.get(name))

    def text(self, name: str) -> str:
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            raise ConfigError(self._path(name), value, "a text")
        return value

    def seconds(self, name: str) -> float:
        return self._seconds(self._path(name), self.data.get(name))

    def milliseconds(self, name: str) -> list[float]:
        values = self.data.get(name)
        if not isinstance(values, list) or len(values) != 3:
            raise ConfigError(self._path(name), values, "three numbers")
        return [self._seconds(self._path(name), one) / 1000.0 for one in values]

    def count(self, name: str) -> int:
        value = self.data.get(name)
        if type(value) is not int or not 1 <= value < 2**63:
            raise ConfigError(self._path(name), value, "a whole number from 1 to 2**63 - 1")
        return value

    def rate(self, name: str) -> float:
        value = self._seconds(self._path(name), self.data.get(name), most=sys.float_info.max)
        if value <= 0.0:
            raise ConfigError(self._path(name), value, "more than 0")
        return value

    def _path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name

    @staticmethod
    def _seconds(path: str, value: object, most: float = LONGEST_S) -> float:
        if type(value) not in (int, float) or not 0.0 <= value <= most:  # type: ignore[operator]
            raise ConfigError(path, value, f"a finite number from 0 to {most:g}")
        return float(value)  # type: ignore[arg-type]


# --- tensor-parallel degrees ----------------------------------------------------------------------------------
# Profiles of one kind of GPU at several degrees: listed ones, and derived ones, which are marked.
#
# Costs that a profile lists for a degree are used unchanged. If a listed degree lacks its KV capacity, that is derived
# from two degrees that have one: n GPUs of memory g have n * g - weights bytes for KV, which is linear in n.
#
# If a profile has only the costs of one GPU, and a `model_shape`, other degrees can be derived on request:
#
#     cost(n)     = cost(1) / n + all_reduces
#     all_reduces = 2 * layers * 2 * (n - 1) * (latency + tokens * hidden * 2 bytes / n / bandwidth)
#
# with two all-reduces per layer (Megatron-LM, arXiv 1909.08053, section 3), each a ring of 2 * (n - 1) steps
# (alpha-beta model; Thakur, Rabenseifner and Gropp 2005), over the fastest of the profile's links. This is an estimate,
# not a measurement. With 20 us per step it gives 13.2 ms for the decode base of OPT-13B on two A100s, whose published
# value is 13.3 ms; on four it gives 14.6 ms instead of 10.3 ms, so it is too pessimistic there.

MAX_DEGREE: Final = 64
ACTIVATION_BYTES: Final = 2
DERIVED_COST: Final = "cost and KV capacity"
DERIVED_CAPACITY: Final = "KV capacity"


def profiles_by_degree(data: Mapping[str, Any], wanted: Sequence[int] = ()) -> dict[int, Profile]:
    """The profile at each of the `wanted` degrees. If `wanted` is empty: at all degrees with listed costs.

    Raises ConfigError on a degree that is neither listed nor can be derived.
    """
    listed = _listed(data)
    if not wanted:
        return listed
    return {degree: listed[degree] if degree in listed else _derived(listed, degree) for degree in sorted(set(wanted))}


def _listed(data: Mapping[str, Any]) -> dict[int, Profile]:
    rows = data.get(DEGREES) if isinstance(data, Mapping) else None
    if not isinstance(rows, Mapping):
        return {1: replace(parse_profile(data), degree=1)}
    known = {
        int(key): row["kv_capacity_tokens"]
        for key, row in rows.items()
        if key.isdecimal() and isinstance(row, Mapping) and "kv_capacity_tokens" in row
    }
    found = {degree: parse_profile(data, degree) for degree in known}
    for key, row in rows.items():
        degree = int(key) if key.isdecimal() else 0
        if not 1 <= degree <= MAX_DEGREE:
            raise ConfigError(f"{DEGREES}.{key}", key, f"a degree from 1 to {MAX_DEGREE}")
        if degree in found or len(found) < 2:
            continue
        (low, small), (high, large) = sorted((one, found[one].kv_capacity_tokens) for one in known)[:2]
        capacity = round(small + (degree - low) * (large - small) / (high - low))
        filled = {**data, DEGREES: {**rows, key: {**row, "kv_capacity_tokens": max(1, capacity)}}}
        found[degree] = replace(parse_profile(filled, degree), derived=DERIVED_CAPACITY)
    return dict(sorted(found.items()))


def _derived(listed: Mapping[int, Profile], degree: int) -> Profile:
    one = listed.get(1)
    shape = one.shape if one is not None else None
    expected = "one of " + ", ".join(map(str, listed))
    if one is None or shape is None or not one.links:
        raise ConfigError("degrees", degree, f"{expected}; others need model_shape and link in the profile")
    if not 1 <= degree <= MAX_DEGREE or shape.num_kv_heads % degree:
        raise ConfigError("degrees", degree, f"a divisor of the model's {shape.num_kv_heads} KV heads")
    kv_bytes = degree * (one.kv_capacity_tokens * one.kv_bytes_per_token + shape.weights_bytes) - shape.weights_bytes
    return replace(
        one,
        name=f"{one.name}:tp{degree}",
        cost=_sharded(one.cost, degree, shape, max(one.links.values(), key=lambda link: link[1])),
        kv_capacity_tokens=kv_bytes // one.kv_bytes_per_token,
        degree=degree,
        derived=DERIVED_COST,
    )


def _sharded(cost: CostPrior, degree: int, shape: ModelShape, link: tuple[float, float]) -> CostPrior:
    latency_s, bytes_per_s = link
    ring_steps = 2 * shape.num_layers * 2 * (degree - 1)
    step_s = ring_steps * latency_s
    token_s = ring_steps * shape.hidden_size * ACTIVATION_BYTES / degree / bytes_per_s
    return CostPrior(
        prefill_base_s=cost.prefill_base_s / degree + step_s,
        prefill_per_token_s=cost.prefill_per_token_s / degree + token_s,
        prefill_per_token_context_s=cost.prefill_per_token_context_s / degree,
        decode_base_s=cost.decode_base_s / degree + step_s,
        decode_per_row_s=cost.decode_per_row_s / degree + token_s,
        decode_per_context_token_s=cost.decode_per_context_token_s / degree,
    )
