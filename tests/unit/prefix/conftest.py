"""A real Redis server per test module, emptied between tests, and one that a test may kill."""

from collections.abc import Iterator

import pytest
import redis

from pdserve.prefix.embedded import EmbeddedRedis


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
