"""Layouts of GPUs: every one uses all GPUs, and only workers whose memory fits the requests."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from pdserve.core.cost.profile import Profile
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from pdserve.profiles import load_degrees, load_profile
from simulator.model import NetworkLink, SimConfig, TraceRequest
from simulator.search.layouts import Layout, all_layouts, by_degrees, make_link, make_workers, usable_layouts

PROFILES = load_degrees("a100-80g.opt-13b.fp16")


def requests(*lengths: int) -> list[TraceRequest]:
    return [TraceRequest(arrival_s=float(n), prompt_tokens=one, output_tokens=10) for n, one in enumerate(lengths)]


def test_three_gpus_of_degrees_one_and_two() -> None:
    assert [one.text for one in all_layouts(3, [1, 2], [1, 2])] == [
        "3 x tp1",
        "1 x tp1 prefill + 2 x tp1 decode",
        "2 x tp1 prefill + 1 x tp1 decode",
        "1 x tp1 prefill + 1 x tp2 decode",
        "1 x tp2 prefill + 1 x tp1 decode",
    ]


@pytest.mark.parametrize("gpus", [1, 2, 7, 8, 32])
def test_each_layout_is_named_once_and_uses_every_gpu(gpus: int) -> None:
    found = all_layouts(gpus, [4, 1, 2], [1, 4, 2])
    assert len(found) == len(set(found))
    assert {one.gpus for one in found} == {gpus}
    assert [one for group in by_degrees(found) for one in group] == found


@pytest.mark.parametrize("gpus", [0, -1, 257])
def test_the_number_of_gpus_is_bounded(gpus: int) -> None:
    with pytest.raises(ConfigError, match="gpus"):
        all_layouts(gpus, [1], [1])


def test_a_worker_without_memory_for_most_requests_is_left_out() -> None:
    found = usable_layouts(4, PROFILES, requests(*[100_000] * 10), 64)
    assert {one.decode_degree for one in found} == {one.prefill_degree for one in found} == {2, 4}
    one_in_twenty = requests(*[1_000] * 19, 100_000)
    assert Layout(prefill_degree=1, decode_degree=1, prefill=0, decode=4) in usable_layouts(
        4, PROFILES, one_in_twenty, 64
    )


def test_a_prefill_worker_needs_memory_for_the_prompt_only() -> None:
    small: dict[int, Profile] = {1: replace(PROFILES[1], kv_capacity_tokens=1_000), 2: PROFILES[2]}
    found = usable_layouts(4, small, requests(*[960] * 10), 64)
    assert {(one.prefill_degree, one.decode_degree) for one in found} == {(2, 2), (1, 2)}


def test_requests_that_fit_nowhere_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"356736 tokens per worker at its largest \(tp4\), expected at least 400010"):
        usable_layouts(4, PROFILES, requests(*[400_000] * 10), 64)


def test_too_few_gpus_for_the_degree_that_fits_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"gpus: got 1, expected a multiple of a degree .* 2, 4"):
        usable_layouts(1, PROFILES, requests(*[100_000] * 10), 64)


# --- workers from a profile -----------------------------------------------------------------------------------

PROFILE = load_profile("h100-sxm.llama-3.1-8b.bf16")


def test_workers_have_the_profiles_costs_and_link() -> None:
    workers = make_workers(PROFILE, 1, 2, link="eth25")
    assert [(one.worker_id, one.role) for one in workers] == [
        ("p0", Role.PREFILL),
        ("d0", Role.DECODE),
        ("d1", Role.DECODE),
    ]
    assert {one.cost for one in workers} == {PROFILE.cost}
    assert {one.kv_capacity_tokens for one in workers} == {PROFILE.kv_capacity_tokens}
    assert {one.link for one in workers} == {NetworkLink(latency_s=2e-4, bytes_per_s=2.5e9)}
    assert make_link(PROFILE) == NetworkLink(latency_s=2e-5, bytes_per_s=3e11)


@pytest.mark.parametrize(
    ("prefill", "decode", "field"), [(2, 0, "decode"), (0, 0, "decode"), (-1, 2, "prefill"), (2, 10**9, "decode")]
)
def test_unusable_worker_counts_are_rejected(prefill: int, decode: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_workers(PROFILE, prefill, decode)
    assert caught.value.field == field


def test_an_unknown_link_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"carrier.*one of nvlink, ib400, eth25"):
        make_workers(PROFILE, 1, 1, link="carrier")


def test_decode_steps_that_take_no_time_are_rejected() -> None:
    free = dataclasses.replace(PROFILE.cost, decode_base_s=0.0, decode_per_row_s=0.0)
    workers = make_workers(dataclasses.replace(PROFILE, cost=free), 1, 1)
    with pytest.raises(ConfigError, match="decode steps of d0 that take no time"):
        SimConfig(workers=workers, slo=Slo())
