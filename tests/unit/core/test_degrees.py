"""Tensor-parallel degrees of a profile: listed ones unchanged, derived ones marked and near published costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.core.cost.profile import DERIVED_CAPACITY, DERIVED_COST, profiles_by_degree
from pdserve.core.errors import ConfigError
from pdserve.profiles import FOLDER, load_degrees, load_profile

H100 = "h100-sxm.llama-3.1-8b.bf16"
A100 = "a100-80g.opt-13b.fp16"


def data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def test_listed_degrees_are_used_unchanged() -> None:
    found = load_degrees(A100)
    assert list(found) == [1, 2, 4]
    assert found[1] == load_profile(f"{A100}:tp1")
    assert (found[2].cost, found[2].degree, found[2].derived) == (load_profile(f"{A100}:tp2").cost, 2, "")


def test_a_missing_capacity_is_interpolated() -> None:
    found = load_degrees(A100)[4]
    assert found.kv_capacity_tokens == 163_008 + 2 * (163_008 - 66_144)
    assert found.derived == DERIVED_CAPACITY
    assert found.cost.decode_base_s == pytest.approx(10.256232e-3)


def test_degrees_are_derived_only_on_request() -> None:
    assert load_degrees(H100) == {1: load_profile(H100)}
    assert list(load_degrees(f"{A100}:tp2")) == [2]


def test_a_derived_degree_divides_arithmetic_and_adds_all_reduces() -> None:
    one, two = load_degrees(H100, (2, 1)).values()
    assert (two.degree, two.derived, two.name) == (2, DERIVED_COST, f"{H100}:tp2")
    all_reduces_s = 2 * 32 * 2 * 2e-5  # Two per layer, each with two steps of 20 us.
    assert two.cost.decode_base_s == pytest.approx(one.cost.decode_base_s / 2 + all_reduces_s)
    assert two.cost.prefill_base_s == pytest.approx(one.cost.prefill_base_s / 2 + all_reduces_s)
    token_s = 2 * 32 * 4096 * 2 / 3e11  # Each GPU sends a token's activations once per all-reduce.
    assert two.cost.prefill_per_token_s == pytest.approx(one.cost.prefill_per_token_s / 2 + token_s)
    assert two.cost.decode_per_row_s == pytest.approx(one.cost.decode_per_row_s / 2 + token_s)
    assert two.cost.prefill_per_token_context_s == one.cost.prefill_per_token_context_s / 2
    assert two.cost.decode_per_context_token_s == one.cost.decode_per_context_token_s / 2
    # A second GPU stores half of the weights, so the memory of the other half is free for KV.
    assert two.kv_capacity_tokens == (2 * 400_000 * 131_072 + 16_060_522_496) // 131_072


def test_derived_costs_match_published_ones() -> None:
    """OPT-13B: derived from one A100, and published for two."""
    published = load_degrees(A100)
    row = data(A100) | {"tensor_parallel": {"1": data(A100)["tensor_parallel"]["1"]}}
    row["model_shape"] = {"num_layers": 40, "hidden_size": 5120, "num_kv_heads": 40, "weights_bytes": 26_000_000_000}
    derived = profiles_by_degree(row, (2,))[2]
    assert derived.cost.decode_base_s == pytest.approx(published[2].cost.decode_base_s, rel=0.02)
    assert derived.cost.prefill_per_token_s == pytest.approx(published[2].cost.prefill_per_token_s, rel=0.25)
    assert derived.kv_capacity_tokens == pytest.approx(published[2].kv_capacity_tokens, rel=0.02)


@pytest.mark.parametrize(
    ("name", "degree", "said"),
    [(A100, 8, "one of 1, 2, 4"), (H100, 3, "divisor of the model's 8 KV heads"), (H100, 16, "divisor")],
)
def test_a_degree_that_cannot_be_derived_is_refused(name: str, degree: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load_degrees(name, (degree,))
    assert raised.value.field == "degrees"


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_kv_heads", "weights_bytes"])
def test_a_wrong_shape_is_named(field: str) -> None:
    row = data(H100)
    row["model_shape"][field] = 0
    with pytest.raises(ConfigError, match=rf"model_shape\.{field}"):
        profiles_by_degree(row)


@pytest.mark.parametrize("key", ["0", "x", "65"])
def test_a_wrong_degree_in_a_profile_is_named(key: str) -> None:
    row = data(A100)
    row["tensor_parallel"][key] = row["tensor_parallel"]["4"]
    with pytest.raises(ConfigError, match=rf"tensor_parallel\.{key}"):
        profiles_by_degree(row)
