"""The parts of a predicted TTFT: the rest of a step, messages, chunks. In the simulator, where steps take exactly the
predicted time, only the router's own calculation can be wrong."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest

from pdserve.core.types import Role, Slo
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.model import SimConfig, TraceRequest
from tests.unit.router.small_worker import shape


def requests(rate_rps: float, seconds: float) -> Iterator[TraceRequest]:
    """A mix of short and long prompts, as in benchmarks.goodput."""
    rng = random.Random(1)
    at_s = rng.expovariate(rate_rps)
    while at_s < seconds:
        tokens = rng.randint(400, 1000) if rng.random() < 0.25 else rng.randint(24, 160)
        yield TraceRequest(arrival_s=at_s, prompt_tokens=tokens, output_tokens=rng.randint(16, 64))
        at_s += rng.expovariate(rate_rps)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (0, 2)])
def test_simulated_first_tokens_match_predictions(prefill: int, decode: int) -> None:
    workers = [shape(f"p{n}", Role.PREFILL) for n in range(prefill)]
    workers += [shape(f"d{n}", Role.DECODE) for n in range(decode)]
    config = SimConfig(
        workers=tuple(workers),
        slo=Slo(ttft_s=0.5, tpot_s=0.05),
        router=RouterSettings(policy="goodput"),
        block_size=16,
        message_s=1e-3,
    )
    rows = [row for row in simulate(list(requests(8.0, 40.0)), config).requests if row.arrival_s > 10.0]
    errors = [abs(row.predicted_ttft_s / row.ttft_s - 1.0) for row in rows if row.predicted_ttft_s and row.ttft_s]
    assert len(errors) > 100
    assert statistics.median(errors) < 0.1
    tpot = [abs(row.predicted_tpot_s / row.tpot_s - 1.0) for row in rows if row.predicted_tpot_s and row.tpot_s]
    assert statistics.median(tpot) < 0.1
