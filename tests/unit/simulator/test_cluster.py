"""Workers from a profile."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from pdserve.profiles import load_profile
from simulator.model import NetworkLink, SimConfig
from simulator.search.layouts import make_link, make_workers

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
