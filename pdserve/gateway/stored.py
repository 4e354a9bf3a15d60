"""Stored responses of /v1/responses in Redis: each with its own input and the id of the response before it.

Off unless `store_bytes` is set. Each tenant has its own keys, so that no id of another tenant is ever found. The
responses of a tenant are limited in bytes and number; the oldest leaves first, and each has a lifetime. Scripts keep
the sums exact, whichever gateway stores, and rebuild a table that Redis has evicted. A Redis that is slow or gone fails
only the calls that need it, with Unavailable.

A response is a hash of `response`, `items` (its own input and its output without logprobs, all that a later response
needs), `inputs` (the number of the items that are input) and `previous` (the id of the response before).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.config import GatewayConfig
from pdserve.core.access.shares import COUNT_WEIGHT, Shares
from pdserve.core.errors import ConfigError, IdInUse, InvalidRequest, NotFound, Unavailable, shortened
from pdserve.core.types import MAX_MESSAGES, RESPONSE_ID_PREFIX
from pdserve.core.urls import hide_password
from pdserve.gateway.api.http_input import REQUEST_ID
from pdserve.gateway.door import Caller
from pdserve.outage_log import PeerLog

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.0
MAX_CALLS: Final = 16  # at the same time, of which each tenant has its share
MAX_LARGE_CALLS: Final = 4  # with more than LARGE_BYTES, in addition
MAX_CHAIN: Final = 512  # responses of one conversation
MAX_RECORD_BYTES: Final = 8 * 2**20  # one response with its input
PUTS: Final = 3  # attempts to store one
MAX_PURGED: Final = 256  # responses that leave in one script, during which Redis serves no other client
LARGE_BYTES: Final = 65_536  # larger ones are encoded and decoded in a thread
MAX_LISTED: Final = 100  # items of a page
LISTED: Final = 20
# Others cannot be part of a path, so their responses would never be found.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.~:@=+,-]{1,128}")
_ID: Final = re.compile(re.escape(RESPONSE_ID_PREFIX) + _REQUEST_ID.pattern)

# KEYS: ids by the time when they end, and their sizes, with the sum of these as one more field. ARGV[1]: prefix of the
# keys of responses.
_DROP: Final = """
local function drop(id)
  redis.call('DEL', ARGV[1] .. id)
  redis.call('ZREM', KEYS[1], id)
  local size = redis.call('HGET', KEYS[2], id)
  if size then
    redis.call('HDEL', KEYS[2], id)
    redis.call('HINCRBY', KEYS[2], 'sum', -size)
  end
end
"""
# Redis may evict one of the tables, because all have an end.
_MAKE_ROOM: Final = (
    _DROP
    + """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function rebuild()
  local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
  if #ids == 0 then ids = redis.call('HKEYS', KEYS[2]) end
  local sum = 0
  redis.call('DEL', KEYS[1], KEYS[2])
  for _, id in ipairs(ids) do
    local left = redis.call('PTTL', ARGV[1] .. id)
    if left > 0 then
      local size = redis.call('HSTRLEN', ARGV[1] .. id, 'response') + redis.call('HSTRLEN', ARGV[1] .. id, 'items')
      redis.call('HSET', KEYS[2], id, size)
      redis.call('ZADD', KEYS[1], now + left, id)
      sum = sum + size
    end
  end
  if sum > 0 then redis.call('HSET', KEYS[2], 'sum', sum) end
end
local function has_room(size, most_bytes, most)
  return redis.call('ZCARD', KEYS[1]) < tonumber(most)
    and tonumber(redis.call('HGET', KEYS[2], 'sum') or '0') + size <= tonumber(most_bytes)
end
local function make_room(size, most_bytes, most)
  if redis.call('EXISTS', KEYS[1]) ~= redis.call('EXISTS', KEYS[2]) then rebuild() end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, PURGED)) do drop(id) end
  for _ = 1, PURGED do
    if has_room(size, most_bytes, most) then return true end
    local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
    if not oldest then return true end
    drop(oldest)
  end
  return has_room(size, most_bytes, most)
end
local function keep_tables()
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
  for i = 1, 2 do if last then redis.call('PEXPIREAT', KEYS[i], string.format('%.0f', last)) end end
end
"""
).replace("PURGED", str(MAX_PURGED))
# ARGV: prefix, size, most bytes, most responses. 0: there is still no room.
_ROOM: Final = (
    _MAKE_ROOM
    + """
local is_made = make_room(tonumber(ARGV[2]), ARGV[3], ARGV[4])
keep_tables()
return is_made and 1 or 0
"""
)
# ARGV: prefix, id, response, items, number of input items, id before it, most bytes, most responses, lifetime in ms.
_PUT: Final = (
    _MAKE_ROOM
    + """
local key, size, life = ARGV[1] .. ARGV[2], #ARGV[3] + #ARGV[4], tonumber(ARGV[9])
if redis.call('EXISTS', key) == 1 then return 'used' end
local is_made = make_room(size, ARGV[7], ARGV[8])
if is_made then
  redis.call('HSET', key, 'response', ARGV[3], 'items', ARGV[4], 'inputs', ARGV[5], 'previous', ARGV[6])
  redis.call('PEXPIRE', key, life)
  redis.call('ZADD', KEYS[1], now + life, ARGV[2])
  redis.call('HSET', KEYS[2], ARGV[2], size)
  redis.call('HINCRBY', KEYS[2], 'sum', size)
end
keep_tables()
return is_made and 'stored' or 'full'
"""
)
_DELETE: Final = _DROP + "local found = redis.call('EXISTS', ARGV[1] .. ARGV[2]); drop(ARGV[2]); return found"
# ARGV: prefix, id, most responses, most bytes, whether the items are wanted. Returns the bytes of the items, and these,
# the last response's first; or a reason, and the id where it applies.
_CHAIN: Final = """
local found, id, bytes = {}, ARGV[2], 0
while id ~= '' do
  local key = ARGV[1] .. id
  local previous = redis.call('HGET', key, 'previous')
  if not previous then return {'missing', id} end
  bytes = bytes + redis.call('HSTRLEN', key, 'items')
  if #found >= tonumber(ARGV[3]) then return {'deep', id} end
  if bytes > tonumber(ARGV[4]) then return {'large', id} end
  found[#found + 1] = ARGV[5] == '1' and redis.call('HGET', key, 'items') or ''
  id = previous
end
return {'found', bytes, unpack(found)}
"""

#: Counts bytes for their caller before they are read. Raises Overloaded.
Hold = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request says about storing."""

    tenant: str  # part of the names of its keys
    is_stored: bool
    is_required: bool  # the request names `store`, so an answer that cannot be stored is an error
    previous: str  # id of the response before; empty: none
    items: Sequence[Any]  # of its own input
    num_bytes: int = 0  # of its body


def turn_of(
    fields: Mapping[str, Any], caller: Caller, num_bytes: int, request_id: str | None = None
) -> tuple[Turn, dict[str, Any]]:
    """`request_id`: its client's. Also returns the other fields. Raises InvalidRequest."""
    rest = dict(fields)
    store, previous = rest.pop("store", None), rest.pop("previous_response_id", "")
    if store is not None and not isinstance(store, bool):
        raise InvalidRequest("store", "another value", "true or false")
    if not isinstance(previous, str):
        raise InvalidRequest("previous_response_id", "another value", "the id of a response")
    given = rest.get("input")
    items: Sequence[Any] = given if isinstance(given, list) else []
    if isinstance(given, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    can_be_found = request_id is None or _REQUEST_ID.fullmatch(request_id) is not None
    if store and not can_be_found:
        raise InvalidRequest(REQUEST_ID, shortened(repr(request_id)), "1 to 128 letters, digits or _.~:@=+,- to store")
    turn = Turn(
        tenant=tenant_of(caller),
        is_stored=store is not False and can_be_found,
        is_required=store is True,
        previous=previous,
        items=items,
        num_bytes=num_bytes,
    )
    return turn, rest


def tenant_of(caller: Caller) -> str:
    """An older router names no tenant: then each token has its own responses."""
    tenant = caller.model.tenant
    return f"token {caller.key.hex()}" if tenant is None else f"tenant {tenant}"


@final
class ResponseStore:
    """Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of one call, with the wait for a connection. Raises ConfigError."""
        # Here, because most gateways store nothing.
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self._trouble = (RedisError, OSError, TimeoutError, EOFError)
        if not config.redis:
            raise ConfigError("store_bytes", config.store_bytes, "0 without a Redis URL, where responses are stored")
        try:
            self._redis: Any = Redis.from_url(
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
        self._config = config
        self._timeout_s = timeout_s
        self._calls, self._large_calls = _Places(MAX_CALLS), _Places(MAX_LARGE_CALLS)
        self._lines = PeerLog(log)
        scripts = {"put": _PUT, "room": _ROOM, "delete": _DELETE, "chain": _CHAIN}
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts.items()}

    async def check_unused(self, turn: Turn, response_id: str) -> None:
        """Before a response is made. Raises IdInUse, if its client chose the id of a stored one, and Unavailable if it
        must be stored."""
        try:
            is_used = await self._ask(turn.tenant, self._redis.exists, self._prefix(turn.tenant) + response_id)
        except Unavailable:
            if turn.is_required:
                raise
            return
        if is_used:
            raise IdInUse(response_id)

    async def history(self, turn: Turn, hold: Hold) -> list[Any]:
        """The items of the conversation before the turn. Raises NotFound, InvalidRequest, Unavailable, and what `hold`
        raises."""
        _check_id(turn.previous)
        num_bytes, _ = await self._chain(turn, self._config.max_body_bytes, is_wanted=False)
        hold(num_bytes)
        _, found = await self._chain(turn, num_bytes, is_wanted=True)
        items: list[Any] = []
        for part in reversed(found):
            items += await _decoded(part)
        if len(items) > MAX_MESSAGES:
            raise _too_long(f"{len(items)} items", f"at most {MAX_MESSAGES}")
        return items

    async def _chain(self, turn: Turn, most: int, *, is_wanted: bool) -> tuple[int, list[bytes]]:
        arguments = [self._prefix(turn.tenant), turn.previous, MAX_CHAIN, most, int(is_wanted)]
        size = most if is_wanted else 0
        kind, about, *found = await self._ask(turn.tenant, self._scripts["chain"], [], arguments, size=size)
        if kind == b"missing":
            raise NotFound("stored response", about.decode())
        if kind == b"deep":
            raise _too_long(f"over {MAX_CHAIN} responses", f"at most {MAX_CHAIN}")
        if kind == b"large":
            raise _too_long(f"over {most} bytes", f"at most {most} bytes")
        return about, found

    async def keep(self, turn: Turn, response: Mapping[str, Any], encoded: bytes) -> bool:
        """Whether it is stored. Raises InvalidRequest, IdInUse and Unavailable if it must be."""

        def encode() -> bytes:
            items = [*turn.items, *map(_without_logprobs, response["output"])]
            return json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()

        most = min(self._config.store_bytes, MAX_RECORD_BYTES)
        is_large = turn.num_bytes + len(encoded) > LARGE_BYTES
        items = await asyncio.to_thread(encode) if is_large else encode()
        size = len(encoded) + len(items)
        try:
            if size > most:
                raise InvalidRequest("store", f"a response of {size} bytes", f"at most {most} bytes, or false")
            await self._put(turn, response["id"], encoded, items)
        except (InvalidRequest, IdInUse, Unavailable):
            if turn.is_required:
                raise
            return False
        return True

    async def _put(self, turn: Turn, response_id: str, encoded: bytes, items: bytes) -> None:
        config, prefix, tables = self._config, self._prefix(turn.tenant), self._tables(turn.tenant)
        size, limits = len(encoded) + len(items), [config.store_bytes, config.store_count]
        record = [encoded, items, len(turn.items), turn.previous]
        arguments = [prefix, response_id, *record, *limits, int(config.store_s * 1000)]
        for _ in range(PUTS):
            told = await self._ask(turn.tenant, self._scripts["put"], tables, arguments, size=size)
            if told == b"stored":
                return
            if told == b"used":
                raise IdInUse(response_id)
            while not await self._ask(turn.tenant, self._scripts["room"], tables, [prefix, size, *limits]):
                pass  # each call removes some
        raise Unavailable("other calls of this tenant store too much at the same time", 1.0)

    async def response(self, tenant: str, response_id: str, hold: Hold) -> dict[str, Any]:
        """Raises NotFound, Unavailable, and what `hold` raises."""
        found: dict[str, Any] = await _decoded(await self._read(tenant, response_id, "response", hold))
        return found

    async def input(self, tenant: str, response_id: str, hold: Hold) -> list[Any]:
        """Its own input. Raises NotFound, Unavailable, and what `hold` raises."""
        items: list[Any] = await _decoded(await self._read(tenant, response_id, "items", hold))
        return items[: int(await self._get(tenant, response_id, "inputs"))]

    async def _read(self, tenant: str, response_id: str, field: str, hold: Hold) -> bytes:
        _check_id(response_id)
        size = await self._ask(tenant, self._redis.hstrlen, self._prefix(tenant) + response_id, field)
        hold(size)
        return await self._get(tenant, response_id, field, size)

    async def _get(self, tenant: str, response_id: str, field: str, size: int = 0) -> bytes:
        key = self._prefix(tenant) + response_id
        found: bytes | None = await self._ask(tenant, self._redis.hget, key, field, size=size)
        if found is None:
            raise NotFound("stored response", response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound and Unavailable."""
        _check_id(response_id)
        arguments = [self._prefix(tenant), response_id]
        if not await self._ask(tenant, self._scripts["delete"], self._tables(tenant), arguments):
            raise NotFound("stored response", response_id)

    async def close(self) -> None:
        await self._redis.aclose()

    # ------------------------------------------------------------------------------------------------------------

    def _prefix(self, tenant: str) -> str:
        return f"pdserve:{self._config.cluster}:stored:{tenant}:"

    def _tables(self, tenant: str) -> list[str]:
        return [f"pdserve:{self._config.cluster}:stored-{name}:{tenant}" for name in ("ends", "sizes")]

    async def _ask(self, tenant: str, call: Any, *arguments: Any, size: int = 0) -> Any:
        """`size`: bytes of its arguments and answer, if these may be many."""
        places = self._calls if size <= LARGE_BYTES else self._large_calls
        try:
            async with asyncio.timeout(self._timeout_s), places.one_of(tenant):
                return await call(*arguments)
        except self._trouble as error:
            self._lines.warning("stored responses cannot be reached", why=type(error).__name__)
            raise Unavailable("stored responses cannot be reached: Redis does not answer", 1.0) from None


@final
class _Places:
    """For calls at the same time. Who waits, waits for its own tenant's share only."""

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


def input_page(response_id: str, given: Sequence[Any], limit: int, after: str, *, is_ascending: bool) -> dict[str, Any]:
    """A page of the response's own input, in OpenAI's form. Raises NotFound about `after`."""
    items = [{**one, "id": one.get("id") or f"item_{number}_{response_id}"} for number, one in enumerate(given)]
    if not is_ascending:
        items.reverse()
    begin = 0
    if after:
        begin = next((at + 1 for at, one in enumerate(items) if one["id"] == after), 0)
        if not begin:
            raise NotFound("input item", after)
    shown = items[begin : begin + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": begin + limit < len(items),
    }


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = item.get("content")
    if not isinstance(parts, list):
        return item
    return {**item, "content": [{name: one for name, one in part.items() if name != "logprobs"} for part in parts]}


async def _decoded(text: bytes) -> Any:
    return json.loads(text) if len(text) <= LARGE_BYTES else await asyncio.to_thread(json.loads, text)


def _check_id(response_id: str) -> None:
    if not _ID.fullmatch(response_id):
        raise NotFound("stored response", response_id)


def _too_long(seen: str, expected: str) -> InvalidRequest:
    return InvalidRequest("previous_response_id", f"a conversation of {seen}", f"{expected}; send the input instead")
