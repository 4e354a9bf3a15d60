"""The suite of requests against plain processes."""

from collections.abc import Callable, Iterator

import pytest

from benchmarks.memory import measure
from benchmarks.memory_samples import COUNTS, rise_per_request
from pdserve import InvalidRequest
from pdserve.engine.toy import answer
from tests.cluster import suite
from tests.cluster.cluster import Cluster


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
    """Descriptors, threads and segments; the slope of memory needs the 20,000 requests of benchmarks.memory.

    Concurrent requests open connections to Redis, so a count may rise a little, but not in proportion to requests.
    """
    taken = measure(cluster.running, requests=200, warm_up=50, every=100, at_once=8, is_shown=False)
    assert {"router", "p0", "p1", "d0", "d1"} <= taken.keys()
    rising = {(name, count): rise_per_request(ones, count) for name, ones in taken.items() for count in COUNTS}
    assert max(rising.values()) < 0.1, rising
    cluster.wait_until_idle()
