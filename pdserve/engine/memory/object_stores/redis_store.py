"""A shared store in Redis."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.installation import advice
from pdserve.core.urls import hide_password
from pdserve.engine.memory.object_stores.interface import CALL_S, FULL, ROOT, without_credentials

LIFETIME_S: Final = 7 * 86_400  # of an object that nobody reads
BATCH_BYTES: Final = 4 * 2**20  # in one answer
MOST_REMOVED: Final = 1000  # by one call


@final
class RedisStore:
    """Strings, and a sorted set of their names by the time of the last use. All have a lifetime."""

    def __init__(self, url: str, room: str, object_bytes: int, most_bytes: int) -> None:
        """Raises ConfigError on an invalid URL, or if the client is not installed."""
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.exceptions import OutOfMemoryError, RedisError
            from redis.retry import Retry
        except ImportError:
            raise ConfigError("kv_store", hide_password(url), f"the package redis; {advice('server')}") from None
        self._object_bytes = object_bytes
        self._most = max(1, most_bytes // object_bytes)
        self._prefix = f"{ROOT}:{room}:"
        self._ages = f"{self._prefix}ages"
        self._errors: tuple[type[Exception], ...] = (RedisError, OSError)
        self._full_error: type[Exception] = OutOfMemoryError
        self._is_full = False
        self._url = url
        try:
            self._client: Any = Redis.from_url(
                url,
                socket_timeout=CALL_S,
                socket_connect_timeout=CALL_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            expected = f"redis://HOST:PORT/DB or unix:///path/to/socket ({without_credentials(str(error), url)})"
            raise ConfigError("kv_store", hide_password(url), expected) from None

    @property
    def most_got(self) -> int:
        return max(1, BATCH_BYTES // self._object_bytes)

    def num_found(self, names: Sequence[str]) -> int:
        return next((at for at, one in enumerate(self.are_there(names)) if not one), len(names))

    def are_there(self, names: Sequence[str]) -> list[bool]:
        lengths = self._call([("STRLEN", self._prefix + name) for name in names])
        return [length == self._object_bytes for length in lengths]

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        keys = [self._prefix + name for name in names]
        # Not GET: what another program has written may be far larger.
        commands: list[tuple[Any, ...]] = [("GETRANGE", key, 0, self._object_bytes) for key in keys]
        commands += [("EXPIRE", key, LIFETIME_S) for key in keys]
        ages = [part for name in names for part in (time.time(), name)]
        found = self._call([*commands, ("ZADD", self._ages, "XX", *ages)])[: len(keys)]
        return [one if len(one) == self._object_bytes else None for one in found]

    def put(self, objects: Sequence[tuple[str, bytes]]) -> None:
        # Its age first: an object without one would not be counted.
        ages = [part for name, _ in objects for part in (time.time(), name)]
        commands: list[tuple[Any, ...]] = [("ZADD", self._ages, *ages), ("EXPIRE", self._ages, 2 * LIFETIME_S)]
        commands += [("SET", self._prefix + name, contents, "EX", LIFETIME_S) for name, contents in objects]
        try:
            self._call(commands)
        except OSError as error:
            if error.errno in FULL:
                self._is_full = True
                self.delete(name for name, _ in objects)  # some may be there without an age
            raise

    def make_room(self) -> None:
        [count] = self._call([("ZCARD", self._ages)])
        excess = max(count - self._most, count // 8 + 1 if self._is_full else 0)
        while excess > 0:
            [oldest] = self._call([("ZRANGE", self._ages, 0, min(excess, MOST_REMOVED) - 1)])
            if not oldest:
                break
            self.delete(name.decode() for name in oldest)
            excess -= len(oldest)
        self._is_full = False

    def delete(self, names: Iterable[str]) -> None:
        listed = list(names)
        self._call(
            [("UNLINK", *(self._prefix + name for name in listed)), ("ZREM", self._ages, *listed)] if listed else []
        )

    def close(self) -> None:
        with contextlib.suppress(*self._errors):
            self._client.close()

    def _call(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers, of one round trip."""
        if not commands:
            return []
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return list(pipeline.execute())
        except self._full_error as error:
            raise OSError(errno.ENOSPC, without_credentials(str(error), self._url)) from None
        except self._errors as error:
            raise OSError(without_credentials(str(error), self._url)) from None
