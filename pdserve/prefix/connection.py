"""Connections to Redis that fail fast; retries are made by the callers, never inside the library."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final, final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.core.errors import ConfigError
from pdserve.core.urls import hide_password

# Errors of a failing Redis: its own, the socket's, and our timeouts.
TROUBLE: Final = (RedisError, OSError, TimeoutError, EOFError)


def connect(url: str, *, timeout_s: float, max_connections: int) -> Any:
    """A client that has not connected yet. Raises ConfigError on an invalid URL."""
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=max_connections,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigError("redis", hide_password(url), "redis://HOST:PORT/DB or unix:///path/to/socket") from error


def heed_cancellation() -> None:
    """Raises CancelledError if this task was cancelled and a library has swallowed the cancellation.

    redis-py sends under asyncio.wait_for, which in Python 3.11 returns normally if the cancellation coincides with the
    end of the sending. A loop without this check would then never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@final
class Backoff:
    """Waiting times between attempts: doubled each time, with full jitter so that many workers do not retry
    together."""

    def __init__(self, low_s: float, high_s: float) -> None:
        self._low_s, self._high_s = low_s, high_s
        self._next_s = low_s
        self._random = random.Random()

    def next_s(self) -> float:
        bound_s, self._next_s = self._next_s, min(self._high_s, 2.0 * self._next_s)
        return self._low_s / 2 + self._random.random() * bound_s

    def reset(self) -> None:
        self._next_s = self._low_s
