"""The suite of requests against plain processes."""

from collections.abc import Callable, Iterator

import pytest

from pdserve import InvalidRequest
from pdserve.engine.toy import answer
from tests.cluster import suite
from tests.cluster.cluster import Cluster
from tests.cluster.memory import COUNTS, growing, measure, rise_per_request


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("--model", "toy", "--prefill", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.mark.parametrize("requests", suite.ALL)
def test_two_prefill_and_two_decode_workers(cluster: Cluster, requests: Callable[[Cluster], None]) -> None:
    requests(cluster)


def test_workers_with_different_memory_serve_together() -> None:
    """The decode worker prefills a prompt that only it can hold; the error for a longer one names the limit."""
    sizes = ("--set", "prefill_worker.kv_blocks=32", "--set", "decode_worker.kv_blocks=64")
    with Cluster("--model", "toy", *sizes) as uneven:
        assert uneven.client.model().max_context_tokens == 1024
        small = uneven.client.generate(suite.toy_prompt(200), max_tokens=4, temperature=0)
        large = uneven.client.generate(suite.toy_prompt(700), max_tokens=4, temperature=0)
        assert (small.timings.path, large.timings.path) == ("remote", "local")
        assert list(large.token_ids) == answer(suite.toy_prompt(700), 4)
        with pytest.raises(InvalidRequest, match="1024"):
            uneven.client.generate(suite.toy_prompt(1024), max_tokens=4)
        uneven.wait_until_idle()


def test_short_requests_leak_no_resources(cluster: Cluster) -> None:
    """Descriptors, threads and segments; the slope of memory needs more requests.

    Concurrent requests open connections to Redis, so a count may rise a little, but not in proportion to requests.
    """
    taken = measure(cluster.running, requests=200, warm_up=50, every=100, at_once=8)
    assert {"router", "p0", "p1", "d0", "d1"} <= taken.keys()
    rising = {(name, count): rise_per_request(ones, count) for name, ones in taken.items() for count in COUNTS}
    assert max(rising.values()) < 0.1, rising
    cluster.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_with_requests() -> None:
    flags = ("--model", "toy", "--set", "worker.kv_blocks=1024")  # the warm-up fills the prefix cache
    patient = ("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=10")  # also on a busy machine
    with Cluster(*flags, *patient) as fresh:
        assert growing(measure(fresh.running, requests=20_000, warm_up=8_000, every=500, at_once=16)) == []
