"""The simulated network and the router's prices follow the closed form of overlap."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.core.cost.latency import LinkModel
from pdserve.core.cost.overlap import exposed_s
from pdserve.core.types import Path
from simulator.model import NetworkLink, SimConfig
from tests.unit.simulator.small import BLOCK_BYTES, COST, asked, cluster, run

CHUNK, BLOCK = 2048, 512


def one_pair(bytes_per_s: float) -> SimConfig:
    """Every chunk after the first takes 1e-4 s per token and 1e-8 s per token of context."""
    link = NetworkLink(latency_s=1e-3, bytes_per_s=bytes_per_s)
    cost = dataclasses.replace(COST, prefill_per_token_context_s=1e-8)
    config = cluster(policy="goodput")
    workers = tuple(dataclasses.replace(one, link=link, cost=cost) for one in config.workers)
    return dataclasses.replace(config, workers=workers)


def parts_of(prompt: int, held: int = 0) -> list[tuple[float, float]]:
    """The parts of a prompt whose first `held` blocks both workers have."""
    parts, ready_s = [], 0.0
    for start in range(held * BLOCK, prompt, CHUNK):
        end = min(start + CHUNK, prompt)
        ready_s += 0.01 + 1e-4 * (end - start) + 1e-8 * (end - start) * (start + end) / 2
        done = -(-end // BLOCK) if end == prompt else end // BLOCK
        parts.append((ready_s, (done - start // BLOCK) * BLOCK_BYTES))
    return parts


@pytest.mark.parametrize("prompt", [512, 2048, 2049, 5000, 9000, 20_000, 40_001])
@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9, 3e9, 1e11])
def test_the_network_matches_the_closed_form(prompt: int, bytes_per_s: float) -> None:
    _, [row] = run([asked(0.0, prompt, 100)], one_pair(bytes_per_s))
    if row.path is not Path.REMOTE:
        pytest.fail("the request went local")
    link = LinkModel(1e-3, bytes_per_s)
    # The sender learns of the arrival one latency later.
    assert row.transfer_exposed_s == pytest.approx(exposed_s(parts_of(prompt), link) + link.latency_s)


@pytest.mark.parametrize("prompt", [512, 2048, 3000, 5000, 9000, 20_000, 40_001])
def test_router_and_network_agree(prompt: int) -> None:
    """With two tokens the predicted time per token is the exposed part, and one and a half steps."""
    _, [row] = run([asked(0.0, prompt, 2)], dataclasses.replace(one_pair(1e9), max_tokens=2))
    step_s = 0.01 + 1e-3 + 1e-6 * (prompt + 1)
    late_s = exposed_s(parts_of(prompt), LinkModel(1e-3, 1e9))
    assert row.tpot_s == pytest.approx(late_s + step_s, rel=1e-3)
    assert row.predicted_tpot_s == pytest.approx(late_s + 1.5 * step_s, rel=0.02)


def test_a_prefix_that_both_have_costs_nothing() -> None:
    config = dataclasses.replace(one_pair(1e9), max_tokens=2)
    first = asked(0.0, 20_480, 2, block_ids=tuple(range(40)))
    second = asked(60.0, 20_480, 2, block_ids=(*range(8), *range(50, 82)))
    _, rows = run([first, second], config, block_tokens=BLOCK)
    late_s = exposed_s(parts_of(20_480, held=8), LinkModel(1e-3, 1e9))
    assert rows[1].transfer_bytes == 32 * BLOCK_BYTES
    assert rows[1].transfer_exposed_s == pytest.approx(late_s + 1e-3)
    step_s = 0.01 + 1e-3 + 1e-6 * 20_481
    assert rows[1].predicted_tpot_s == pytest.approx(late_s + 1.5 * step_s, rel=0.05), "by what was learnt of the link"
