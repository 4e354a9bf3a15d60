"""Profiles: the shipped ones load and match their sources, and an invalid field is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.cost.profile import parse_profile
from pdserve.core.errors import ConfigError
from pdserve.profiles import FOLDER, known_profiles, load_profile

H100 = "h100-sxm.llama-3.1-8b.bf16"


def h100() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / f"{H100}.json").read_text())
    return data


def test_every_known_profile_loads_under_its_name() -> None:
    known = known_profiles()
    assert {H100, "h200-sxm.llama-3.1-8b.bf16", "a100-80g.opt-13b.fp16:tp1"} <= set(known)
    for name in known:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.cost == profile.cost.sane()
        assert profile.source, "a figure without a source is a guess"


def test_a_profile_has_cost_memory_and_links() -> None:
    profile = load_profile(H100)
    assert profile.cost == CostPrior(
        prefill_base_s=8.66e-4,
        prefill_per_token_s=1.759e-5,
        prefill_per_token_context_s=9.68e-10,
        decode_base_s=6.08e-3,
        decode_per_row_s=7.6e-6,
        decode_per_context_token_s=4.228e-8,
    )
    assert (profile.kv_bytes_per_token, profile.kv_capacity_tokens) == (131072, 400000)
    assert profile.links["ib400"] == (5e-5, 4e10)


def test_published_milliseconds_per_degree_become_the_closed_forms() -> None:
    model = CostModel(load_profile("a100-80g.opt-13b.fp16:tp1").cost)
    assert model.prefill_s(512) == pytest.approx((18.102546 + 0.10191226 * 512 + 7.1222643e-06 * 512**2) / 1000)
    assert model.decode_s(32, 32 * 512) == pytest.approx(
        (19.934703 + 0.00062693565 * 32 * 512 + 0.038506977 * 32) / 1e3
    )


@pytest.mark.parametrize("name", ["a100-80g.opt-13b.fp16", "a100-80g.opt-13b.fp16:tp4", f"{H100}:tp2"])
def test_a_degree_that_the_profile_lacks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="degree"):
        load_profile(name)


@pytest.mark.parametrize("name", ["", "h100", "../profiles/none", "none:tp1", "/nowhere.json"])
def test_an_unknown_profile_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=H100):
        load_profile(name)


def test_a_profile_is_read_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(h100() | {"name": "mine", "link": {}}))
    assert load_profile(str(path)).name == "mine"
    path.write_text("{")
    with pytest.raises(ConfigError, match="readable JSON"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 3),
        ("prefill_s", [1]),
        ("prefill_s", {"base": 1.0}),
        ("decode_s", None),
        ("kv_bytes_per_token", 0),
        ("kv_capacity_tokens", 1.5),
        ("kv_capacity_tokens", True),
        ("link", {"ib": {"latency_s": 1e-5, "bytes_per_s": 0.0}}),
        ("link", {"ib": {"latency_s": float("nan"), "bytes_per_s": 1e9}}),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        parse_profile(h100() | {field: value})


@pytest.mark.parametrize("value", [-1e-9, float("inf"), float("nan"), "1", None, True])
def test_a_coefficient_is_a_finite_number(value: object) -> None:
    data = h100()
    data["decode_s"]["per_row"] = value
    with pytest.raises(ConfigError, match=r"decode_s\.per_row"):
        parse_profile(data)


@pytest.mark.parametrize("row", [{}, {"prefill_ms": [1, 2], "decode_small_batch_ms": [1, 2, 3]}])
def test_a_wrong_row_of_a_degree_is_named(row: dict[str, Any]) -> None:
    data = {"name": "x", "kv_bytes_per_token": 1, "tensor_parallel": {"2": row | {"kv_capacity_tokens": 5}}}
    with pytest.raises(ConfigError, match=r"tensor_parallel\.2\.prefill_ms"):
        parse_profile(data, 2)


@pytest.mark.parametrize("value", [1, 2])
def test_the_least_counts_are_allowed(value: int) -> None:
    profile = parse_profile({**h100(), "kv_bytes_per_token": value, "kv_capacity_tokens": value})
    assert (profile.kv_bytes_per_token, profile.kv_capacity_tokens) == (value, value)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_an_invalid_count_is_named(value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_profile({**h100(), "kv_capacity_tokens": value})
    assert raised.value.field == "kv_capacity_tokens"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf")])
def test_a_link_has_a_rate(rate: float) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_profile({**h100(), "link": {"slow": {"latency_s": 0.0, "bytes_per_s": rate}}})
    assert raised.value.field == "link.slow.bytes_per_s"
    links = parse_profile({**h100(), "link": {"slow": {"latency_s": 0.0, "bytes_per_s": 0.5}}}).links
    assert links == {"slow": (0.0, 0.5)}
