"""Parts of admission control, with values that tests of a whole cluster do not reach."""

from __future__ import annotations

import pytest

from router.policy.interface import Candidate, Choice, Decision, UnloadedEstimate
from router.state import rejection
from router.state.cluster_state import ClusterState
from router.state.rejection import delay_if_late
from tests.unit.router.test_rejection import cluster as make_cluster
from tests.unit.router.test_rejection import short

SURE = UnloadedEstimate(ttft_s=1.0, band_s=0.5, is_sure=True, tpot_s=0.1, work_s=1.0)


@pytest.fixture
def cluster() -> ClusterState:
    """A request of 0.6 s runs, and one of 0.3 s has waited for 0.25 s."""
    world = make_cluster()
    world.run([(0.0, short("runs", 600)), (0.01, short("waits", 300))], 0.31)
    found = world.routers[0]._cluster
    assert list(found.queue) == ["waits"]
    return found


def about_to_be_placed(ttft_s: float) -> Decision:
    one = Candidate("p0", "d0", ttft_s=ttft_s, tpot_s=0.01, slack=0.0, is_feasible=True)
    return Decision(choice=Choice.REMOTE, prefill_worker="p0", decode_worker="d0", candidates=(one,))


@pytest.mark.parametrize(("ttft_s", "is_late"), [(0.7, False), (0.8, True)])
def test_time_spent_in_the_queue_counts_when_a_request_is_placed(
    cluster: ClusterState, ttft_s: float, is_late: bool
) -> None:
    request = cluster.requests["waits"]
    assert cluster.now_s - request.arrived_s == pytest.approx(0.25, abs=0.02)
    assert not delay_if_late(cluster, request, about_to_be_placed(ttft_s))
    assert cluster.queue.is_late("waits") is is_late


@pytest.mark.parametrize(("tpot_s", "misses"), [(0.0499, True), (0.05, False)])
def test_a_tpot_target_is_missed_by_more_than_the_error(tpot_s: float, misses: bool) -> None:
    """By the cost model, the request takes at least half of 0.1 s."""
    assert rejection._misses_tpot(SURE, tpot_s) is misses
