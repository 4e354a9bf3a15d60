"""Parses a profile: the cost, memory and links of a kind of worker, known before it runs. Pure: reads no file.

    {"name": ..., "prefill_s": {"base", "per_token", "per_token_context"},
     "decode_s": {"base", "per_row", "per_context_token"}, "kv_bytes_per_token", "kv_capacity_tokens",
     "link": {NAME: {"latency_s", "bytes_per_s"}}}

A file with "tensor_parallel" has a set of coefficients for each degree, published in milliseconds as a + b * sum(L) + c
* sum(L^2). NAME:tp2 selects one of them. Its decode times are piecewise, with a break at batch 95. The piece for
smaller batches is used, so steps of larger batches are predicted too short.

"model_shape": {"num_layers", "hidden_size", "num_kv_heads", "weights_bytes"} is optional: with it, costs of other
tensor-parallel degrees can be derived (degrees.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.core.errors import ConfigError
from pdserve.core.fit import LONGEST_S
from pdserve.core.latency import CostPrior

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
