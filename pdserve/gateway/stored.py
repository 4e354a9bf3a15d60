"""Stored responses of /v1/responses in Redis: each with its own input and the id of the response before it.

A response is a hash of `response`, `items` (its own input and its output without logprobs, all that a later response
needs), `inputs` (the number of the items that are input) and `previous` (the id of the response before it, or of the
conversation that has it).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.errors import IdInUse, InvalidRequest, NotFound, Unavailable, shortened
from pdserve.core.types import MAX_MESSAGES, RESPONSE_ID_PREFIX
from pdserve.gateway.api import sse
from pdserve.gateway.api.conversations import check_conversation_id, kept_item
from pdserve.gateway.api.http_input import REQUEST_ID
from pdserve.gateway.door import Caller
from pdserve.gateway.storage import LARGE_BYTES, RECORDS, Hold, Storage, decoded, tenant_of

MAX_CHAIN: Final = 512  # responses before one
MAX_RECORD_BYTES: Final = 8 * 2**20  # one response with its input
# Others cannot be part of a path, so their responses would never be found.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.~:@=+,-]{1,128}")
_ID: Final = re.compile(re.escape(RESPONSE_ID_PREFIX) + _REQUEST_ID.pattern)

# ARGV from 7: response, items, number of input items, id before it.
_PUT: Final = (
    RECORDS
    + """
if redis.call('EXISTS', key) == 1 then return {'used'} end
local size = #ARGV[7] + #ARGV[8]
if make_room(size) ~= 'made' then return {'full', size} end
redis.call('HSET', key, 'response', ARGV[7], 'items', ARGV[8], 'inputs', ARGV[9], 'previous', ARGV[10])
list(size)
return {'stored'}
"""
)
# ARGV: prefix, id, most responses, most bytes, whether the items are wanted. Returns the bytes of the items, and these,
# the last response's first; or a reason, and the id where it applies.
_CHAIN: Final = """
local found, id, bytes = {}, ARGV[2], 0
while id ~= '' do
  local key = ARGV[1] .. id
  local previous = redis.call('HGET', key, 'previous')
  if not previous then return {'missing', id} end
  if string.find(previous, '^conv_') then return {'conversation', previous} end
  bytes = bytes + redis.call('HSTRLEN', key, 'items')
  if #found >= tonumber(ARGV[3]) then return {'deep', id} end
  if bytes > tonumber(ARGV[4]) then return {'large', id} end
  found[#found + 1] = ARGV[5] == '1' and redis.call('HGET', key, 'items') or ''
  id = previous
end
return {'found', bytes, unpack(found)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a request says about storing."""

    tenant: str  # part of the names of its keys
    is_stored: bool
    is_required: bool  # the request names `store`, so an answer that cannot be stored is an error
    previous: str  # id of the response before; empty: none
    conversation: str = ""  # id of the conversation that it continues; empty: none
    items: Sequence[Any]  # of its own input
    num_bytes: int = 0  # of its body

    @property
    def shown(self) -> dict[str, Any]:
        """In the answer."""
        conversation = {"id": self.conversation} if self.conversation else None
        previous = self.previous or None
        return {"store": self.is_stored, "previous_response_id": previous, "conversation": conversation}


def turn_of(
    fields: Mapping[str, Any], caller: Caller, num_bytes: int, request_id: str | None = None
) -> tuple[Turn, dict[str, Any]]:
    """`request_id`: its client's. Also returns the other fields. Raises InvalidRequest and NotFound."""
    rest = dict(fields)
    store, previous = rest.pop("store", None), rest.pop("previous_response_id", None)
    if store is not None and not isinstance(store, bool):
        raise InvalidRequest("store", "another value", "true or false")
    if previous is not None and not isinstance(previous, str):
        raise InvalidRequest("previous_response_id", "another value", "the id of a response")
    conversation = rest.pop("conversation", None)
    if isinstance(conversation, dict) and conversation.keys() == {"id"} and conversation["id"] is not None:
        conversation = conversation["id"]
    if conversation is not None and not isinstance(conversation, str):
        raise InvalidRequest("conversation", "another value", "the id of a conversation, or an object with its `id`")
    if conversation is not None and previous is not None:
        raise InvalidRequest("conversation", "a value beside previous_response_id", "one of the two")
    if conversation is not None:
        check_conversation_id(conversation)
    if previous is not None:
        _check_id(previous)
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
        previous=previous or "",
        conversation=conversation or "",
        items=items,
        num_bytes=num_bytes,
    )
    return turn, rest


@final
class ResponseStore:
    def __init__(self, storage: Storage) -> None:
        self._storage, self._config = storage, storage.config
        self._put, self._chain = storage.script(_PUT), storage.script(_CHAIN)

    async def check_unused(self, turn: Turn, response_id: str) -> None:
        """Before a response is made. Raises IdInUse, if its client chose the id of a stored one, and Unavailable if it
        must be stored."""
        try:
            is_used = await self._storage.ask(
                turn.tenant, self._storage.redis.exists, self._storage.prefix(turn.tenant) + response_id
            )
        except Unavailable:
            if turn.is_required:
                raise
            return
        if is_used:
            raise IdInUse(response_id)

    async def history(self, turn: Turn, hold: Hold) -> list[Any]:
        """The items of the conversation before the turn. Raises NotFound, InvalidRequest, Unavailable, and what `hold`
        raises."""
        num_bytes, _ = await self._read_chain(turn, self._config.max_body_bytes, is_wanted=False)
        hold(num_bytes)
        _, found = await self._read_chain(turn, num_bytes, is_wanted=True)
        items: list[Any] = []
        for part in reversed(found):
            items += await decoded(part)
        if len(items) > MAX_MESSAGES:
            raise _too_long(f"{len(items)} items", f"at most {MAX_MESSAGES}")
        return items

    async def _read_chain(self, turn: Turn, most: int, *, is_wanted: bool) -> tuple[int, list[bytes]]:
        arguments = [self._storage.prefix(turn.tenant), turn.previous, MAX_CHAIN, most, int(is_wanted)]
        size = most if is_wanted else 0
        kind, about, *found = await self._storage.ask(turn.tenant, self._chain, [], arguments, size=size)
        if kind == b"missing":
            raise NotFound("stored response", about.decode())
        if kind == b"conversation":
            seen = f"a response of the conversation {about.decode()}"
            raise InvalidRequest("previous_response_id", seen, "`conversation` with its id instead")
        if kind == b"deep":
            raise _too_long(f"over {MAX_CHAIN} responses", f"at most {MAX_CHAIN}")
        if kind == b"large":
            raise _too_long(f"over {most} bytes", f"at most {most} bytes")
        return about, found

    async def record(self, turn: Turn, response: Mapping[str, Any], encoded: bytes) -> bytes | None:
        """The encoded items of the response's record; None: it is too large. Raises InvalidRequest if it must be stored
        and is too large."""

        def encode() -> bytes:
            return sse.to_json([kept_item(one) for one in (*turn.items, *response["output"])])

        is_large = turn.num_bytes + len(encoded) > LARGE_BYTES
        items = await asyncio.to_thread(encode) if is_large else encode()
        size, most = len(encoded) + len(items), min(self._config.store_bytes, MAX_RECORD_BYTES)
        if size <= most:
            return items
        if turn.is_required:
            raise InvalidRequest("store", f"a response of {size} bytes", f"at most {most} bytes, or false")
        return None

    async def keep(self, turn: Turn, response_id: str, encoded: bytes, items: bytes) -> bool:
        """Whether it is stored. `items`: those of its `record`. Raises InvalidRequest, IdInUse and Unavailable if it
        must be."""
        record = [encoded, items, len(turn.items), turn.conversation or turn.previous]
        size = len(encoded) + len(items)
        try:
            told = await self._storage.write(turn.tenant, self._put, response_id, record, size, turn.conversation)
            if told == [b"used"]:
                raise IdInUse(response_id)
        except (InvalidRequest, IdInUse, Unavailable):
            if turn.is_required:
                raise
            return False
        return True

    async def response(self, tenant: str, response_id: str, hold: Hold) -> dict[str, Any]:
        """Raises NotFound, Unavailable, and what `hold` raises."""
        found: dict[str, Any] = await decoded(await self._read(tenant, response_id, "response", hold))
        return found

    async def input(self, tenant: str, response_id: str, hold: Hold) -> list[Any]:
        """Its own input. Raises NotFound, Unavailable, and what `hold` raises."""
        items: list[Any] = await decoded(await self._read(tenant, response_id, "items", hold))
        return items[: int(await self._get(tenant, response_id, "inputs"))]

    async def _read(self, tenant: str, response_id: str, field: str, hold: Hold) -> bytes:
        _check_id(response_id)
        size = await self._storage.ask(
            tenant, self._storage.redis.hstrlen, self._storage.prefix(tenant) + response_id, field
        )
        hold(size)
        return await self._get(tenant, response_id, field, size)

    async def _get(self, tenant: str, response_id: str, field: str, size: int = 0) -> bytes:
        key = self._storage.prefix(tenant) + response_id
        found: bytes | None = await self._storage.ask(tenant, self._storage.redis.hget, key, field, size=size)
        if found is None:
            raise NotFound("stored response", response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound and Unavailable."""
        _check_id(response_id)
        if not await self._storage.delete(tenant, response_id):
            raise NotFound("stored response", response_id)


def _check_id(response_id: str) -> None:
    if not _ID.fullmatch(response_id):
        raise NotFound("stored response", response_id)


def _too_long(seen: str, expected: str) -> InvalidRequest:
    return InvalidRequest("previous_response_id", f"a conversation of {seen}", f"{expected}; send the input instead")
