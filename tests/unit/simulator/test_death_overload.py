"""A decode worker dies while both are busy: what it held must be resumed, beside the traffic that goes on."""

from __future__ import annotations

from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.settings import RouterSettings
from simulator.cluster import make_workers
from simulator.metrics import summarise
from simulator.model import Disturbance, DisturbanceKind, SimConfig
from simulator.workloads import make_workload
from simulator.world import simulate


def test_resumed_answers_meet_their_targets_where_the_other_worker_has_the_time() -> None:
    """53 answers are resumed. Judged by their first token they all counted as late: each took the worker that was
    free, not the one with its prefix, in order of arrival, and 93.5 % of the targets were met.
    """
    trace = make_workload("chat", rate_rps=64.0, duration_s=5.0, seed=3)
    config = SimConfig(
        workers=make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 2, 2, link="nvlink"),
        slo=Slo(ttft_s=1.0, tpot_s=0.02),
        router=RouterSettings(policy="goodput", is_strict=True),
        block_size=trace.block_tokens or 64,
        seed=3,
        disturbances=(Disturbance(at_s=2.0, worker_id="d0", kind=DisturbanceKind.DIE, for_s=1.0),),
    )
    result = simulate(trace, config)
    assert sum(row.attempts > 1 for row in result.requests) > 30
    assert summarise(result).attainment > 0.98
