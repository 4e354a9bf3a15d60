"""The suite of requests against plain processes."""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster import suite
from tests.cluster.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("--model", "toy", "--prefill", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.mark.parametrize("requests", suite.ALL)
def test_two_prefill_and_two_decode_workers(cluster: Cluster, requests: Callable[[Cluster], None]) -> None:
    requests(cluster)
