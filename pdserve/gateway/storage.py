"""What is stored in Redis for each tenant, its limits, and calls to Redis. Responses and conversations share both.

Off unless `store_bytes` is set. Each tenant has its own keys, so that no id of another tenant is ever found. The
records of a tenant are limited in bytes and number; the one whose lifetime ends first leaves first, but a conversation
never leaves for its own items and responses. Scripts keep the sums exact, whichever gateway stores, and rebuild a table
that Redis has evicted. A Redis that is slow or gone fails only the calls that need it, with Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, final

from pdserve.config import GatewayConfig
from pdserve.core.access.shares import COUNT_WEIGHT, Shares
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.urls import hide_password
from pdserve.gateway.door import Caller
from pdserve.outage_log import PeerLog

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.0
MAX_CALLS: Final = 16  # at the same time, of which each tenant has its share
MAX_LARGE_CALLS: Final = 4  # with more than LARGE_BYTES, in addition
WRITES: Final = 3  # attempts to make room for a record and to write it
MAX_PURGED: Final = 256  # records that leave in one script, during which Redis serves no other client
LARGE_BYTES: Final = 65_536  # larger ones are encoded and decoded in a thread

# The beginning of each script. KEYS: ids by the time when they end, and their sizes, with the sum of these as one more
# field. ARGV: prefix of the keys of records, id of the script's record, id of a record that does not leave for it, most
# bytes and most records of the tenant, lifetime in ms. Redis may evict the tables, because all have an end.
RECORDS: Final = """
local id, spared, key = ARGV[2], ARGV[3], ARGV[1] .. ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function drop(one)
  redis.call('UNLINK', ARGV[1] .. one)
  redis.call('ZREM', KEYS[1], one)
  local size = redis.call('HGET', KEYS[2], one)
  if size then
    redis.call('HDEL', KEYS[2], one)
    redis.call('HINCRBY', KEYS[2], 'sum', -size)
  end
end
local function rebuild()
  local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
  if #ids == 0 then ids = redis.call('HKEYS', KEYS[2]) end
  local sum = 0
  redis.call('UNLINK', KEYS[1], KEYS[2])
  for _, one in ipairs(ids) do
    local left = redis.call('PTTL', ARGV[1] .. one)
    if left > 0 then
      local size = redis.call('HSTRLEN', ARGV[1] .. one, 'response') + redis.call('HSTRLEN', ARGV[1] .. one, 'items')
        + tonumber(redis.call('HGET', ARGV[1] .. one, 'bytes') or '0')
      redis.call('HSET', KEYS[2], one, size)
      redis.call('ZADD', KEYS[1], now + left, one)
      sum = sum + size
    end
  end
  if sum > 0 then redis.call('HSET', KEYS[2], 'sum', sum) end
end
local function check_tables()
  if redis.call('EXISTS', KEYS[1]) ~= redis.call('EXISTS', KEYS[2]) then rebuild() end
end
local function keep_tables()
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  for i = 1, 2 do if last then redis.call('PEXPIREAT', KEYS[i], string.format('%.0f', last)) end end
end
local function has_room(size)
  local listed = redis.call('HGET', KEYS[2], id)
  local others = tonumber(redis.call('HGET', KEYS[2], 'sum') or '0') - tonumber(listed or '0')
  local count = redis.call('ZCARD', KEYS[1]) - (listed and 1 or 0)
  return count < tonumber(ARGV[5]) and others + size <= tonumber(ARGV[4])
end
-- For the record, which then has `size` bytes. Returns 'made', 'some' if more must leave, or 'none' if no more can.
local function make_room(size)
  check_tables()
  for _, one in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, PURGED)) do
    if one ~= spared then drop(one) end
  end
  local told = 'some'
  for _ = 1, PURGED do
    if has_room(size) then break end
    local first = redis.call('ZRANGE', KEYS[1], 0, 1)
    local oldest = first[1] ~= spared and first[1] or first[2]
    if not oldest then
      told = 'none'
      break
    end
    drop(oldest)
  end
  keep_tables()
  return has_room(size) and 'made' or told
end
-- Lists the record, which now has `size` bytes, and begins its lifetime.
local function list(size)
  local before = tonumber(redis.call('HGET', KEYS[2], id) or '0')
  redis.call('PEXPIRE', key, ARGV[6])
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[6]), id)
  redis.call('HSET', KEYS[2], id, size)
  redis.call('HINCRBY', KEYS[2], 'sum', size - before)
  keep_tables()
end
""".replace("PURGED", str(MAX_PURGED))
_ROOM: Final = RECORDS + "return make_room(tonumber(ARGV[7]))"
_DELETE: Final = RECORDS + "local found = redis.call('EXISTS', key); drop(id); return found"

#: Counts bytes for their caller before they are read. Raises Overloaded.
Hold = Callable[[int], None]


def tenant_of(caller: Caller) -> str:
    """An older router names no tenant: then each token has its own records."""
    tenant = caller.model.tenant
    return f"token {caller.key.hex()}" if tenant is None else f"tenant {tenant}"


@final
class Storage:
    """The tables and calls of all tenants. Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of one call, with the wait for a connection. Raises ConfigError."""
        # Here, because most gateways store nothing.
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self._trouble = (RedisError, OSError, TimeoutError, EOFError)
        if not config.redis:
            raise ConfigError("store_bytes", config.store_bytes, "0 without a Redis URL, where they are stored")
        try:
            self.redis: Any = Redis.from_url(
                config.redis,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                max_connections=MAX_CALLS + MAX_LARGE_CALLS,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError:
            url = hide_password(config.redis)
            raise ConfigError("redis", url, "redis://HOST:PORT/DB or unix:///path/to/socket") from None
        self.config = config
        self._timeout_s = timeout_s
        self._calls, self._large_calls = _Places(MAX_CALLS), _Places(MAX_LARGE_CALLS)
        self._lines = PeerLog(log)
        self._room, self._delete = self.script(_ROOM), self.script(_DELETE)

    def script(self, text: str) -> Any:
        return self.redis.register_script(text)

    def prefix(self, tenant: str) -> str:
        return f"pdserve:{self.config.cluster}:stored:{tenant}:"

    def tables(self, tenant: str) -> list[str]:
        return [f"pdserve:{self.config.cluster}:stored-{name}:{tenant}" for name in ("ends", "sizes")]

    async def write(
        self, tenant: str, script: Any, record_id: str, arguments: Sequence[Any], size: int, spared: str | None = None
    ) -> Any:
        """What the script returns, which is `full` and the size of the record where it found no room. `size`: of the
        arguments. Raises InvalidRequest if there is no room beside `spared`, and Unavailable."""
        for _ in range(WRITES):
            told = await self.run(tenant, script, record_id, *arguments, size=size, spared=spared)
            if told[0] != b"full":
                return told
            while (room := await self.run(tenant, self._room, record_id, told[1], spared=spared)) == b"some":
                pass
            if room == b"none":
                most = f"at most {self.config.store_bytes} bytes and {self.config.store_count} records, or false"
                raise InvalidRequest("store", f"a response of {told[1]} bytes beside its conversation", most)
        raise Unavailable("other calls of this tenant store too much at the same time", 1.0)

    async def delete(self, tenant: str, record_id: str) -> bool:
        """Whether it was there. Raises Unavailable."""
        return bool(await self.run(tenant, self._delete, record_id))

    async def run(
        self, tenant: str, script: Any, record_id: str, *arguments: Any, size: int = 0, spared: str | None = None
    ) -> Any:
        """A script that begins with RECORDS. `spared`: the record itself unless given. `size` as of `ask`. Raises
        Unavailable."""
        config = self.config
        limits = [config.store_bytes, config.store_count, int(config.store_s * 1000)]
        about = [self.prefix(tenant), record_id, record_id if spared is None else spared, *limits]
        return await self.ask(tenant, script, self.tables(tenant), [*about, *arguments], size=size)

    async def ask(self, tenant: str, call: Any, *arguments: Any, size: int = 0) -> Any:
        """`size`: bytes of its arguments and answer, if these may be many."""
        places = self._calls if size <= LARGE_BYTES else self._large_calls
        try:
            async with asyncio.timeout(self._timeout_s), places.one_of(tenant):
                return await call(*arguments)
        except self._trouble as error:
            self._lines.warning("what is stored cannot be reached", why=type(error).__name__)
            raise Unavailable("what is stored cannot be reached: Redis does not answer", 1.0) from None

    async def close(self) -> None:
        await self.redis.aclose()


@final
class _Places:
    """Limits calls at the same time. A call waits for its own tenant's share only."""

    def __init__(self, limit: int) -> None:
        self._shares = Shares(limit, COUNT_WEIGHT)
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def one_of(self, tenant: str) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._shares.fits(tenant, 1))
            self._shares.add(tenant, 1)
        try:
            yield
        finally:
            self._shares.add(tenant, -1)
            async with self._changed:
                self._changed.notify_all()


async def decoded(text: bytes) -> Any:
    return json.loads(text) if len(text) <= LARGE_BYTES else await asyncio.to_thread(json.loads, text)
