"""A real Redis server per test module, emptied between tests, and one that a test may kill."""

from collections.abc import Iterator

import pytest
import redis

from pdserve.prefix import embedded, publisher, redis_index, registry
from pdserve.prefix.embedded import EmbeddedRedis


@pytest.fixture(scope="module", autouse=True)
def _long_timeouts() -> Iterator[None]:
    """No call of Redis fails because the machine is busy. A test of a timeout sets its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "START_S", 60.0)
        patch.setattr(publisher, "STOP_S", 60.0)
        for module in (publisher, redis_index, registry):
            patch.setattr(module, "REDIS_TIMEOUT_S", 60.0)
        yield


@pytest.fixture(scope="module")
def module_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture
def url(module_server: EmbeddedRedis) -> Iterator[str]:
    yield module_server.url
    with redis.Redis.from_url(module_server.url) as client:
        client.flushall()


@pytest.fixture
def mortal() -> Iterator[EmbeddedRedis]:
    """Its own, so that a test may kill it."""
    with EmbeddedRedis.start() as server:
        yield server
