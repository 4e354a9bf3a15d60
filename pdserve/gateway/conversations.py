"""Conversations in Redis, which turns of /v1/responses read and extend.

A conversation is a hash: `created`, `metadata`, `next` (the number of the next item), `bytes` (of all), and a field
"NUMBER ID" for each item. It is one key, so that Redis evicts all of it or nothing. Each call that changes it is one
script: the items of a turn follow each other, whatever other turns run at the same time. Its lifetime begins again with
each change, and with each turn that reads it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from pdserve.config import GatewayConfig
from pdserve.core.errors import InvalidRequest, NotFound, Unavailable
from pdserve.gateway.api import sse
from pdserve.gateway.api.conversations import (
    CONVERSATION_PREFIX,
    ITEM_ID,
    ConversationRequest,
    check_conversation_id,
    conversation_answer,
    page_answer,
    stored_item,
)
from pdserve.gateway.respond import Keep
from pdserve.gateway.storage import RECORDS, Hold, Storage, decoded
from pdserve.gateway.stored import ResponseStore, Turn

MAX_ITEMS: Final = 2048  # of a conversation
READS: Final = 4  # attempts to read a page of a conversation that others extend at the same time
_BESIDE_BYTES: Final = 128  # of a conversation, beside its metadata and items

# ARGV from 7: most items and most bytes of the conversation, time of its creation (0: it exists), metadata (empty: as
# before); then ids and items. Items that are there already are not added again.
_WRITE: Final = (
    RECORDS
    + """
local is_new, metadata = ARGV[9] ~= '0', ARGV[10]
local before = redis.call('HGET', key, 'bytes')
if not is_new and not before then return {'missing'} end
local function written()
  return {'written', redis.call('HGET', key, 'created'), redis.call('HGET', key, 'metadata')}
end
local size, count, repeated, names = tonumber(before or 'BESIDE_BYTES'), 0, 0, {}
for _, name in ipairs(redis.call('HKEYS', key)) do
  local item = string.match(name, '^%d+ (.+)$')
  if item then
    names[item] = name
    count = count + 1
  end
end
for at = 11, #ARGV, 2 do
  local name = names[ARGV[at]]
  if name then
    if redis.call('HGET', key, name) ~= ARGV[at + 1] then return {'used'} end
    repeated = repeated + 2
  end
  names[ARGV[at]] = ''
  count = count + 1
  size = size + #ARGV[at] + #ARGV[at + 1]
end
if repeated > 0 then return repeated == #ARGV - 10 and written() or {'used'} end
if metadata ~= '' then size = size + #metadata - redis.call('HSTRLEN', key, 'metadata') end
if count > tonumber(ARGV[7]) then return {'items', count} end
if size > tonumber(ARGV[8]) then return {'bytes', size} end
if make_room(size) ~= 'made' then return {'full', size} end
if is_new then redis.call('HSET', key, 'created', ARGV[9]) end
if metadata ~= '' then redis.call('HSET', key, 'metadata', metadata) end
redis.call('HSET', key, 'bytes', size)
for at = 11, #ARGV, 2 do
  local number = redis.call('HINCRBY', key, 'next', 1)
  redis.call('HSET', key, number .. ' ' .. ARGV[at], ARGV[at + 1])
end
list(size)
return written()
""".replace("BESIDE_BYTES", str(_BESIDE_BYTES))
)
# ARGV[7]: id of the item.
_DELETE_ITEM: Final = (
    RECORDS
    + """
if redis.call('EXISTS', key) == 0 then return {'missing'} end
for _, name in ipairs(redis.call('HKEYS', key)) do
  if string.match(name, '^%d+ (.+)$') == ARGV[7] then
    check_tables()
    local size = redis.call('HINCRBY', key, 'bytes', -#ARGV[7] - redis.call('HSTRLEN', key, name))
    redis.call('HDEL', key, name)
    list(size)
    return {'deleted', redis.call('HGET', key, 'created'), redis.call('HGET', key, 'metadata')}
  end
end
return {'no item'}
"""
)
# ARGV from 7: most bytes, 1 for the first items first, most items, id of the item before the first (empty: none), id of
# the only item that is wanted (empty: all), 1 to begin the lifetime again. Returns the bytes of the items if these are
# more, and otherwise whether there are more items, the bytes of the conversation, and the items.
_PAGE: Final = (
    RECORDS
    + """
if redis.call('EXISTS', key) == 0 then return {'missing'} end
local names, number, is_found = {}, {}, ARGV[10] == ''
for _, name in ipairs(redis.call('HKEYS', key)) do
  local at, item = string.match(name, '^(%d+) (.+)$')
  if at and (ARGV[11] == '' or ARGV[11] == item) then
    names[#names + 1] = name
    number[name] = tonumber(at)
  end
end
local is_ascending = ARGV[8] == '1'
table.sort(names, function(a, b)
  if is_ascending then return number[a] < number[b] end
  return number[a] > number[b]
end)
local page, bytes, more = {}, 0, 0
for _, name in ipairs(names) do
  if is_found then
    if #page >= tonumber(ARGV[9]) then
      more = 1
      break
    end
    page[#page + 1] = name
    bytes = bytes + redis.call('HSTRLEN', key, name)
  elseif string.match(name, '^%d+ (.+)$') == ARGV[10] then
    is_found = true
  end
end
if not is_found then return {'no item'} end
if bytes > tonumber(ARGV[7]) then return {'large', bytes} end
local size = tonumber(redis.call('HGET', key, 'bytes'))
if ARGV[12] == '1' then
  check_tables()
  list(size)
end
local found = {'page', more, size}
for _, name in ipairs(page) do found[#found + 1] = redis.call('HGET', key, name) end
return found
"""
)


@final
class ConversationStore:
    def __init__(self, storage: Storage) -> None:
        self._storage, self._config = storage, storage.config
        self._write, self._page = storage.script(_WRITE), storage.script(_PAGE)
        self._delete_item = storage.script(_DELETE_ITEM)

    async def create(self, tenant: str, request: ConversationRequest) -> dict[str, Any]:
        """Raises InvalidRequest and Unavailable."""
        conversation_id = CONVERSATION_PREFIX + secrets.token_hex(16)
        _, texts = await asyncio.to_thread(_made, request.items or ())
        metadata = request.metadata or {}
        return await self._change(tenant, conversation_id, texts, metadata=metadata, created_s=int(time.time()))

    async def describe(self, tenant: str, conversation_id: str) -> dict[str, Any]:
        """Raises NotFound and Unavailable."""
        check_conversation_id(conversation_id)
        storage = self._storage
        key = storage.prefix(tenant) + conversation_id
        created, metadata = await storage.ask(tenant, storage.redis.hmget, key, "created", "metadata")
        if created is None:
            raise NotFound("conversation", conversation_id)
        return conversation_answer(conversation_id, int(created), json.loads(metadata))

    async def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Raises NotFound, InvalidRequest and Unavailable."""
        return await self._change(tenant, conversation_id, (), metadata=metadata)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """With its items. Raises NotFound and Unavailable."""
        check_conversation_id(conversation_id)
        if not await self._storage.delete(tenant, conversation_id):
            raise NotFound("conversation", conversation_id)

    async def add(self, tenant: str, conversation_id: str, given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the added items. Raises NotFound, InvalidRequest and Unavailable."""
        items, texts = await asyncio.to_thread(_made, given)
        await self._change(tenant, conversation_id, texts)
        return page_answer(items, has_more=False)

    async def page(
        self, tenant: str, conversation_id: str, hold: Hold, limit: int, after: str, *, is_ascending: bool
    ) -> dict[str, Any]:
        """Raises NotFound, Unavailable, and what `hold` raises."""
        items, has_more, _ = await self._read(tenant, conversation_id, hold, limit, after, is_ascending=is_ascending)
        return page_answer(items, has_more=has_more)

    async def item(self, tenant: str, conversation_id: str, item_id: str, hold: Hold) -> dict[str, Any]:
        """Raises NotFound, Unavailable, and what `hold` raises."""
        _check_item(item_id)
        items, *_ = await self._read(tenant, conversation_id, hold, 1, only=item_id)
        if not items:
            raise NotFound("item", item_id)
        return items[0]

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Returns the conversation. Raises NotFound and Unavailable."""
        _check_item(item_id)
        check_conversation_id(conversation_id)
        kind, *rest = await self._storage.run(tenant, self._delete_item, conversation_id, item_id)
        if kind != b"deleted":
            raise _not_found(kind, conversation_id, item_id)
        return conversation_answer(conversation_id, int(rest[0]), json.loads(rest[1]))

    async def history(self, turn: Turn, hold: Hold) -> list[dict[str, Any]]:
        """All items, before a turn is answered. The lifetime begins again, so that it does not end during the turn.
        Raises NotFound, Unavailable, what `hold` raises, and InvalidRequest if the turn does not fit."""
        items, _, num_bytes = await self._read(turn.tenant, turn.conversation, hold, MAX_ITEMS, begins_again=True)
        if (num_items := len(items) + len(turn.items)) >= MAX_ITEMS:
            raise _too_long(f"over {num_items} items with the answer", f"at most {MAX_ITEMS} items")
        if (total := num_bytes + turn.num_bytes) > self._most_bytes:
            raise _too_long(f"{total} bytes with the body of this call", f"at most {self._most_bytes} bytes")
        return items

    async def append(self, turn: Turn, output: Sequence[dict[str, Any]]) -> None:
        """The turn's input and its answer. Raises NotFound, InvalidRequest and Unavailable."""
        try:
            await self._append(turn, output, keeps_id=True)
        except _ItemIdInUse:  # a client used its request id twice
            await self._append(turn, output, keeps_id=False)

    async def _append(self, turn: Turn, output: Sequence[dict[str, Any]], *, keeps_id: bool) -> None:
        _, texts = await asyncio.to_thread(_made, turn.items, output, keeps_id=keeps_id)
        try:
            await self._change(turn.tenant, turn.conversation, texts)
        except Unavailable:  # a slow Redis may still add these items; it does not add them twice
            await self._change(turn.tenant, turn.conversation, texts)

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _most_bytes(self) -> int:
        return min(self._config.store_bytes, self._config.max_body_bytes)

    async def _change(
        self,
        tenant: str,
        conversation_id: str,
        texts: Sequence[bytes],
        *,
        metadata: Mapping[str, str] | None = None,
        created_s: int = 0,
    ) -> dict[str, Any]:
        """`texts`: ids of items, each before its encoded item."""
        check_conversation_id(conversation_id)
        num_items, size = len(texts) // 2, sum(map(len, texts))
        if num_items > MAX_ITEMS:
            raise _too_long(f"{num_items} items", f"at most {MAX_ITEMS} items")
        if size > self._most_bytes:
            raise _too_long(f"{size} bytes", f"at most {self._most_bytes} bytes")
        about = [MAX_ITEMS, self._most_bytes, created_s, b"" if metadata is None else sse.to_json(metadata)]
        kind, *rest = await self._storage.write(tenant, self._write, conversation_id, [*about, *texts], size)
        match kind:
            case b"missing":
                raise NotFound("conversation", conversation_id)
            case b"used":
                raise _ItemIdInUse
            case b"items":
                raise _too_long(f"{rest[0]} items", f"at most {MAX_ITEMS} items")
            case b"bytes":
                raise _too_long(f"{rest[0]} bytes", f"at most {self._most_bytes} bytes")
        return conversation_answer(conversation_id, int(rest[0]), json.loads(rest[1]))

    async def _read(
        self,
        tenant: str,
        conversation_id: str,
        hold: Hold,
        limit: int,
        after: str = "",
        *,
        is_ascending: bool = True,
        only: str = "",
        begins_again: bool = False,
    ) -> tuple[list[dict[str, Any]], bool, int]:
        """Also whether there are more, and the bytes of the conversation. Bytes are counted before they are read."""
        check_conversation_id(conversation_id)
        held = 0
        for _ in range(READS):
            arguments = [held, int(is_ascending), limit, after, only, int(begins_again)]
            kind, *rest = await self._storage.run(tenant, self._page, conversation_id, *arguments, size=held)
            if kind == b"large":
                hold(rest[0] - held)
                held = rest[0]
            elif kind == b"page":
                items = await decoded(b"[" + b",".join(rest[2:]) + b"]")
                return items, bool(rest[0]), rest[1]
            else:
                raise _not_found(kind, conversation_id, after)
        raise Unavailable("other calls extend this conversation at the same time", 1.0)


@final
class Stores:
    """Responses and conversations of all tenants. Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, timeout_s: float) -> None:
        """Raises ConfigError."""
        self._storage = Storage(config, timeout_s)
        self.responses, self.conversations = ResponseStore(self._storage), ConversationStore(self._storage)

    async def history(self, turn: Turn, hold: Hold) -> list[Any]:
        """The items before the turn. Raises NotFound, InvalidRequest, Unavailable, and what `hold` raises."""
        if turn.conversation:
            return await self.conversations.history(turn, hold)
        return await self.responses.history(turn, hold) if turn.previous else []

    def keep(self, turn: Turn) -> Keep | None:
        """What is done with the answer; None: nothing."""
        if not (turn.is_stored or turn.conversation):
            return None

        async def keep(response: Mapping[str, Any], encoded: bytes) -> bool:
            record = await self.responses.record(turn, response, encoded) if turn.is_stored else None
            if turn.conversation:  # before the response is stored, because this may fail
                await self.conversations.append(turn, response["output"])
            return record is not None and await self.responses.keep(turn, response["id"], encoded, record)

        return keep

    async def close(self) -> None:
        await self._storage.close()


class _ItemIdInUse(Exception):
    pass


def _made(
    given: Sequence[Mapping[str, Any]], output: Sequence[Mapping[str, Any]] = (), *, keeps_id: bool = False
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The stored items, and the id and the encoded form of each. `keeps_id`: of those of the output."""
    items = [stored_item(one, secrets.token_hex(16), keeps_id=False) for one in given]
    items += [stored_item(one, secrets.token_hex(16), keeps_id=keeps_id) for one in output]
    return items, [text for one in items for text in (one["id"].encode(), sse.to_json(one))]


def _check_item(item_id: str) -> None:
    if not ITEM_ID.fullmatch(item_id):
        raise NotFound("item", item_id)


def _not_found(kind: bytes, conversation_id: str, item_id: str) -> NotFound:
    return NotFound("item", item_id) if kind == b"no item" else NotFound("conversation", conversation_id)


def _too_long(seen: str, expected: str) -> InvalidRequest:
    return InvalidRequest("conversation", f"a conversation of {seen}", f"{expected}; begin a new one")
