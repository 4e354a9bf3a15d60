"""The same suite of requests against Ray actors, and what Ray is for: actors that come back."""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster import suite
from tests.cluster.cluster import Cluster
from tests.cluster.faults import a_decode_worker_dies_in_mid_stream, a_prefill_worker_dies_while_it_prefills

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--model", "toy", "--ray", "--prefill", "2", "--decode", "2", "--set", "worker.toy_step_s=0.01")
    with Cluster(*flags, start_s=150) as cluster:
        yield cluster


@pytest.mark.parametrize("requests", suite.ALL)
def test_two_prefill_and_two_decode_actors(cluster: Cluster, requests: Callable[[Cluster], None]) -> None:
    requests(cluster)


def test_a_killed_decode_actor_costs_no_token_and_comes_back(cluster: Cluster) -> None:
    a_decode_worker_dies_in_mid_stream(cluster)


def test_a_killed_prefill_actor_costs_no_token_and_comes_back(cluster: Cluster) -> None:
    a_prefill_worker_dies_while_it_prefills(cluster)
