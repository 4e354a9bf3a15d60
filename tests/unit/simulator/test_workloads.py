"""The built-in workloads: rates, lengths, prefixes, and equal seeds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from pdserve.core.errors import ConfigError
from simulator.traces.workloads import LONGEST_PROMPT, WORKLOADS, Bursts, coding_agents, either, make_workload


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_workload_has_its_rate_and_is_in_order(name: str) -> None:
    requests = list(make_workload(name, rate_rps=20.0, duration_s=300.0, seed=1))
    arrivals_s = [one.arrival_s for one in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert len(requests) / 300.0 == pytest.approx(20.0, rel=0.2)
    assert min(one.prompt_tokens for one in requests) >= 1
    assert max(one.prompt_tokens for one in requests) <= LONGEST_PROMPT
    assert requests == list(make_workload(name, rate_rps=20.0, duration_s=300.0, seed=1))
    assert requests != list(make_workload(name, rate_rps=20.0, duration_s=300.0, seed=2))


def test_few_long_prompts_hold_half_of_the_tokens() -> None:
    prompts = [one.prompt_tokens for one in make_workload("long-tail", rate_rps=50.0, duration_s=200.0)]
    long = [one for one in prompts if one > 8_000]
    assert 0.01 < len(long) / len(prompts) < 0.03
    assert 0.35 < sum(long) / sum(prompts) < 0.65


def test_bursts_are_burstier_than_independent_arrivals() -> None:
    arrivals_s = [one.arrival_s for one in make_workload("bursts", rate_rps=20.0, duration_s=500.0)]
    gaps_s = [after - before for before, after in pairwise(arrivals_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert sum((one - mean_s) ** 2 for one in gaps_s) / len(gaps_s) > 4.0 * mean_s**2


def test_a_returning_agent_sends_its_whole_history() -> None:
    trace = make_workload("agents", rate_rps=20.0, duration_s=100.0)
    requests = list(trace)
    num_grown = num_subagents = 0
    for number, one in enumerate(requests):
        assert len(one.block_ids) == -(-one.prompt_tokens // trace.block_tokens)
        if one.follows is None:
            continue
        assert one.follows < number
        before = requests[one.follows]
        assert one.arrival_s >= before.arrival_s + one.pause_s - 1e-6
        if one.block_ids[: len(before.block_ids)] == before.block_ids and one.prompt_tokens > before.prompt_tokens:
            num_grown += 1
        else:
            num_subagents += 1  # begins with less, or its parent continues
    assert num_grown > 1000
    assert 0 < num_subagents < 0.2 * num_grown


def test_some_clients_say_that_a_session_has_ended() -> None:
    trace = coding_agents(rate_rps=10.0, duration_s=500.0, seed=3)
    silent = list(trace)
    assert not any(one.ends_session for one in silent)
    last = {one.session: number for number, one in enumerate(silent)}
    for share, low, high in ((0.5, 0.3, 0.7), (1.0, 1.0, 1.0)):
        told = list(replace(trace, ended_share=share))
        assert [replace(one, ends_session=False) for one in told] == silent
        ends = [number for number, one in enumerate(told) if one.ends_session]
        assert {*ends} <= {*last.values()}
        assert low <= len(ends) / len(last) <= high


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_coding_agents_have_the_published_shape(scale: float) -> None:
    """43 requests of a session, 142,000 tokens in, 444 out, over 96 % seen before (vllm issue 57103)."""
    requests = list(coding_agents(rate_rps=10.0, duration_s=1000.0, seed=3, scale=scale))
    sessions = sum(one.follows is None for one in requests)
    assert len(requests) / sessions == pytest.approx(43, rel=0.15)
    assert fmean(one.prompt_tokens for one in requests) == pytest.approx(142_000 * scale, rel=0.15)
    assert fmean(one.output_tokens for one in requests) == pytest.approx(444 * scale, rel=0.1)
    seen: set[int] = set()
    total = new = 0
    for one in requests:
        total += len(one.block_ids)
        new += sum(each not in seen for each in one.block_ids)
        seen.update(one.block_ids)
    assert 1 - new / total > 0.96


def test_a_wrong_workload_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="chat, long-tail, bursts, agents, short"):
        make_workload("nothing")
    for name in WORKLOADS:
        with pytest.raises(ConfigError, match="rate_rps"):
            make_workload(name, rate_rps=0.0)
        with pytest.raises(ConfigError, match="duration_s"):
            make_workload(name, duration_s=float("nan"))
    one = either(0.0, lambda rng: 1, lambda rng: 1)
    with pytest.raises(ConfigError, match="mean_size"):
        Bursts(rate_rps=1.0, duration_s=1.0, prompts=one, outputs=one, mean_size=0.5)
    with pytest.raises(ConfigError, match="mean_turns"):
        replace(coding_agents(rate_rps=1.0, duration_s=1.0), mean_turns=0.0)
    with pytest.raises(ConfigError, match="ended_share"):
        replace(coding_agents(rate_rps=1.0, duration_s=1.0), ended_share=1.5)
    with pytest.raises(ConfigError, match="share"):
        either(1.5, one, one)
