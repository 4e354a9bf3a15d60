"""Profiles of one kind of GPU at several tensor-parallel degrees: listed ones, and derived ones, which are marked.
Pure.

Costs that a profile lists for a degree are used unchanged. If a listed degree lacks its KV capacity, that is derived
from two degrees that have one: n GPUs of memory g have n * g - weights bytes for KV, which is linear in n.

If a profile has only the costs of one GPU, and a `model_shape`, other degrees can be derived on request:

    cost(n)     = cost(1) / n + all_reduces
    all_reduces = 2 * layers * 2 * (n - 1) * (latency + tokens * hidden * 2 bytes / n / bandwidth)

with two all-reduces per layer (Megatron-LM, arXiv 1909.08053, section 3), each a ring of 2 * (n - 1) steps (alpha-beta
model; Thakur, Rabenseifner and Gropp 2005), over the fastest of the profile's links. This is an estimate, not a
measurement. With 20 us per step it gives 13.2 ms for the decode base of OPT-13B on two A100s, whose published value is
13.3 ms; on four it gives 14.6 ms instead of 10.3 ms, so it is too pessimistic there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pdserve.core.errors import ConfigError
from pdserve.core.latency import CostPrior
from pdserve.core.profile import DEGREES, ModelShape, Profile, parse_profile

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
