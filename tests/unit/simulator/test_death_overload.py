"""A decode worker dies while both are busy: its requests must be resumed while new requests arrive."""

from __future__ import annotations

import pytest

from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.state.interface import RouterSettings
from simulator.cluster.world import simulate
from simulator.metrics import summarise
from simulator.model import SimConfig, WorkerFault, WorkerFaultKind
from simulator.search.layouts import make_workers
from simulator.traces.workloads import make_workload


@pytest.mark.parametrize(("seed", "least"), [(0, 0.85), (3, 0.97)])
def test_resumed_answers_meet_their_targets(seed: int, least: float) -> None:
    """Judged by their first token, resumed answers all counted as late: each took the worker that was free, not the one
    with its prefix, in order of arrival, and with seed 3 93.5 % of the requests met their targets. With seed 0, 80 %
    did while the other decode worker was filled to 86 % of its TPOT target, because its cost model was new.
    """
    trace = make_workload("chat", rate_rps=64.0, duration_s=5.0, seed=seed)
    config = SimConfig(
        workers=make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 2, 2, link="nvlink"),
        slo=Slo(ttft_s=1.0, tpot_s=0.02),
        router=RouterSettings(policy="goodput", is_strict=True),
        block_size=trace.block_tokens or 64,
        seed=seed,
        faults=(WorkerFault(at_s=2.0, worker_id="d0", kind=WorkerFaultKind.DIE, for_s=1.0),),
    )
    result = simulate(trace, config)
    assert sum(row.attempts > 1 for row in result.requests) > 10
    assert summarise(result).attainment > least
