"""Stored responses of /v1/responses in Redis: each with its own input and the id of the response before it.

Off unless `store_bytes` is set. Each tenant has its own keys, so that no id of another tenant is ever found. The
responses of a tenant are limited in bytes and number; the oldest leaves first, and each has a lifetime. Scripts keep
the sums exact, whichever gateway stores. A Redis that is slow or gone fails only the calls that need it, with
Unavailable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.config import GatewayConfig
from pdserve.core.errors import ConfigError, IdInUse, InvalidRequest, NotFound, Unavailable
from pdserve.core.types import MAX_MESSAGES, RESPONSE_ID_PREFIX
from pdserve.core.urls import hide_password
from pdserve.gateway.door import Caller
from pdserve.outage_log import PeerLog

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.0  # of one call, with the wait for a connection
MAX_CALLS: Final = 16  # at the same time
MAX_CHAIN: Final = 512  # responses of one conversation
MAX_RECORD_BYTES: Final = 8 * 2**20  # one response with its input
MAX_LISTED: Final = 100  # items of a page
LISTED: Final = 20
_ID: Final = re.compile(re.escape(RESPONSE_ID_PREFIX) + r"[!-~]{1,128}")
_TROUBLE: Final = (RedisError, OSError, TimeoutError, EOFError)

# KEYS: ids by the time when they end, their sizes, the sum of these. ARGV[1]: prefix of the keys of responses.
_DROP: Final = """
local function drop(id)
  redis.call('DEL', ARGV[1] .. id)
  redis.call('ZREM', KEYS[1], id)
  local size = redis.call('HGET', KEYS[2], id)
  if size then
    redis.call('HDEL', KEYS[2], id)
    redis.call('DECRBY', KEYS[3], size)
  end
end
"""
# ARGV: prefix, id, record, id before it, most bytes, most responses, lifetime in ms. 0: there is one of this id.
_PUT: Final = (
    _DROP
    + """
local key, size, life = ARGV[1] .. ARGV[2], #ARGV[3], tonumber(ARGV[7])
if redis.call('EXISTS', key) == 1 then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do drop(id) end
while redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[6])
  or tonumber(redis.call('GET', KEYS[3]) or '0') + size > tonumber(ARGV[5]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
redis.call('HSET', key, 'record', ARGV[3], 'previous', ARGV[4])
redis.call('PEXPIRE', key, life)
redis.call('ZADD', KEYS[1], now + life, ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], size)
redis.call('INCRBY', KEYS[3], size)
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], life) end
return 1
"""
)
_DELETE: Final = _DROP + "local found = redis.call('EXISTS', ARGV[1] .. ARGV[2]); drop(ARGV[2]); return found"
# ARGV: prefix, id, most responses, most bytes. The records, the last one first; or a reason, and the id where it
# applies.
_CHAIN: Final = """
local found, id, bytes = {}, ARGV[2], 0
while id ~= '' do
  local held = redis.call('HMGET', ARGV[1] .. id, 'record', 'previous')
  if not held[1] then return {'missing', id} end
  bytes = bytes + #held[1]
  if #found >= tonumber(ARGV[3]) then return {'deep', id} end
  if bytes > tonumber(ARGV[4]) then return {'large', id} end
  found[#found + 1] = held[1]
  id = held[2]
end
return {'found', unpack(found)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request says about storing."""

    tenant: str  # part of the names of its keys
    is_stored: bool
    is_required: bool  # the request names `store`, so an answer that cannot be stored is an error
    previous: str  # id of the response before; empty: none
    items: Sequence[Any]  # of its own input


def turn_of(fields: Mapping[str, Any], caller: Caller) -> tuple[Turn, dict[str, Any]]:
    """Also returns the other fields. Raises InvalidRequest."""
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
    is_stored = store is not False
    tenant = tenant_of(caller)
    return Turn(tenant=tenant, is_stored=is_stored, is_required=store is True, previous=previous, items=items), rest


def tenant_of(caller: Caller) -> str:
    """An older router names no tenant: then each token has its own responses."""
    tenant = caller.model.tenant
    return f"token {caller.key.hex()}" if tenant is None else f"tenant {tenant}"


@final
class ResponseStore:
    """Belongs to one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        if not config.redis:
            raise ConfigError("store_bytes", config.store_bytes, "0 without a Redis URL, where responses are stored")
        try:
            self._redis: Any = Redis.from_url(
                config.redis,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                max_connections=MAX_CALLS + 1,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError:
            url = hide_password(config.redis)
            raise ConfigError("redis", url, "redis://HOST:PORT/DB or unix:///path/to/socket") from None
        self._config = config
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._lines = PeerLog(log)
        scripts = {"put": _PUT, "delete": _DELETE, "chain": _CHAIN}
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts.items()}

    async def check_unused(self, turn: Turn, response_id: str) -> None:
        """Before a response is made. Raises IdInUse, if its client chose the id of a stored one, and Unavailable if it
        must be stored."""
        try:
            is_used = await self._ask(self._redis.exists, self._prefix(turn.tenant) + response_id)
        except Unavailable:
            if turn.is_required:
                raise
            return
        if is_used:
            raise IdInUse(response_id)

    async def history(self, turn: Turn) -> tuple[list[Any], int]:
        """The items of the conversation before the turn, and their bytes. Raises NotFound, InvalidRequest and
        Unavailable."""
        _check_id(turn.previous)
        most = self._config.max_body_bytes
        arguments = [self._prefix(turn.tenant), turn.previous, MAX_CHAIN, most]
        kind, *found = await self._ask(self._scripts["chain"], [], arguments)
        if kind == b"missing":
            raise NotFound("stored response", found[0].decode())
        if kind == b"deep":
            raise _too_long(f"over {MAX_CHAIN} responses", f"at most {MAX_CHAIN}")
        if kind == b"large":
            raise _too_long(f"over {most} bytes", f"at most {most} bytes")
        items: list[Any] = []
        for record in reversed(found):
            held = await asyncio.to_thread(json.loads, record)
            items += held["input"]
            items += map(_without_logprobs, held["response"]["output"])
        if len(items) > MAX_MESSAGES:
            raise _too_long(f"{len(items)} items", f"at most {MAX_MESSAGES}")
        return items, sum(map(len, found))

    async def keep(self, turn: Turn, response_id: str, response: bytes) -> bool:
        """Whether it is stored. Raises InvalidRequest, IdInUse and Unavailable if it must be."""
        record = b'{"response":%b,"input":%b}' % (response, json.dumps(turn.items, ensure_ascii=False).encode())
        config, most = self._config, min(self._config.store_bytes, MAX_RECORD_BYTES)
        try:
            if len(record) > most:
                raise InvalidRequest("store", f"a response of {len(record)} bytes", f"at most {most} bytes, or false")
            life_ms = int(config.store_s * 1000)
            limits = [config.store_bytes, config.store_count, life_ms]
            prefix = self._prefix(turn.tenant)
            arguments = [prefix, response_id, record, turn.previous, *limits]
            if not await self._ask(self._scripts["put"], self._tables(turn.tenant), arguments):
                raise IdInUse(response_id)
        except (InvalidRequest, IdInUse, Unavailable):
            if turn.is_required:
                raise
            return False
        return True

    async def read(self, tenant: str, response_id: str) -> dict[str, Any]:
        """`response` and `input`. Raises NotFound and Unavailable."""
        _check_id(response_id)
        record = await self._ask(self._redis.hget, self._prefix(tenant) + response_id, "record")
        if record is None:
            raise NotFound("stored response", response_id)
        found: dict[str, Any] = await asyncio.to_thread(json.loads, record)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound and Unavailable."""
        _check_id(response_id)
        arguments = [self._prefix(tenant), response_id]
        if not await self._ask(self._scripts["delete"], self._tables(tenant), arguments):
            raise NotFound("stored response", response_id)

    async def close(self) -> None:
        await self._redis.aclose()

    # ------------------------------------------------------------------------------------------------------------

    def _prefix(self, tenant: str) -> str:
        return f"pdserve:{self._config.cluster}:stored:{tenant}:"

    def _tables(self, tenant: str) -> list[str]:
        return [f"pdserve:{self._config.cluster}:stored-{name}:{tenant}" for name in ("ends", "sizes", "sum")]

    async def _ask(self, call: Any, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._calls:
                return await call(*arguments)
        except _TROUBLE as error:
            self._lines.warning("stored responses cannot be reached", why=type(error).__name__)
            raise Unavailable("stored responses cannot be reached: Redis does not answer", 1.0) from None


def input_page(record: Mapping[str, Any], limit: int, after: str, *, is_ascending: bool) -> dict[str, Any]:
    """A page of the response's own input, in OpenAI's form. Raises NotFound about `after`."""
    response_id = record["response"]["id"]
    items = [{"id": f"item_{number}_{response_id}", **one} for number, one in enumerate(record["input"])]
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


def _check_id(response_id: str) -> None:
    if not _ID.fullmatch(response_id):
        raise NotFound("stored response", response_id)


def _too_long(seen: str, expected: str) -> InvalidRequest:
    return InvalidRequest("previous_response_id", f"a conversation of {seen}", f"{expected}; send the input instead")
