"""Endpoints that generate nothing: /tokenize and /detokenize, as in vLLM, Anthropic's count of tokens, health,
sessions, what is stored, and those of the live view."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final
from urllib.parse import parse_qsl

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Model
from pdserve.core.errors import Cancelled, InvalidRequest, NotFound, PdserveError, PermissionDenied, shortened
from pdserve.core.live import PERIOD_S, LiveFrame, frame_to_json
from pdserve.gateway.api import sse
from pdserve.gateway.api.conversations import (
    INCLUDED,
    LISTED,
    MAX_LISTED,
    conversation_request,
    input_page,
    items_request,
    update_request,
)
from pdserve.gateway.api.errors import UnsupportedField
from pdserve.gateway.api.messages import messages_call
from pdserve.gateway.api.request_models import (
    DetokenizeRequest,
    LoadLoraRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from pdserve.gateway.api.sdk_call import SdkCall, check_model, sdk_messages, validated
from pdserve.gateway.conversations import Stores
from pdserve.gateway.door import Caller
from pdserve.gateway.respond import EVENT_STREAM, Sender, TokenTable, disconnected
from pdserve.gateway.storage import Hold
from pdserve.gateway.tools.plan import check_tools_bytes

ID_BYTES: Final = 8
NAME_BYTES: Final = 64


def tokenize_bytes(request: TokenizeRequest, body_bytes: int) -> int:
    """The most that the answer takes in memory: a text has at most one token for each byte, and no fewer bytes in its
    body."""
    return body_bytes * (ID_BYTES + (NAME_BYTES if request.return_token_strs else 0))


def detokenize_bytes(request: DetokenizeRequest, body_bytes: int) -> int:
    return NAME_BYTES * len(request.tokens)


def tokenize_request(given: Mapping[str, Any], model: Model) -> TokenizeRequest:
    """Raises InvalidRequest and UnknownModel."""
    check_model(given.get("model"), model)
    request = validated(TokenizeRequest, given)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt", "neither" if request.prompt is None else "both", "prompt or messages")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name):
                raise InvalidRequest(name, "a value", "messages beside it")
    check_tools_bytes(request.tools or ())
    return request


async def tokenize(request: TokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest."""
    if request.messages is None:
        ids = await caller.client.tokenize(request.prompt or "", add_special_tokens=request.add_special_tokens)
    else:
        tools = None if request.tools is None else [one.model_dump(exclude_none=True) for one in request.tools]
        ids = await caller.client.tokenize(
            sdk_messages(request.messages),
            tools=tools,
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt,
            chat_template_kwargs=request.chat_template_kwargs,
        )
    names = None
    if request.return_token_strs:
        table = TokenTable()
        await table.learn(caller.client, set(ids))
        names = [table(one).decode("utf-8", "replace") for one in ids]
    return {
        "count": len(ids),
        "max_model_len": caller.model.max_context_tokens,
        "tokens": ids,
        "token_strs": names,
    }


def detokenize_request(given: Mapping[str, Any], model: Model) -> DetokenizeRequest:
    """Raises InvalidRequest and UnknownModel."""
    check_model(given.get("model"), model)
    request = validated(DetokenizeRequest, given)
    if len(request.tokens) > model.max_context_tokens:
        expected = f"at most {model.max_context_tokens} tokens, the context window"
        raise InvalidRequest("tokens", f"{len(request.tokens)} tokens", expected)
    return request


def count_bytes(call: SdkCall, body_bytes: int) -> int:
    return body_bytes * ID_BYTES


def count_request(given: Mapping[str, Any], model: Model) -> SdkCall:
    """Raises InvalidRequest and UnknownModel."""
    return messages_call(given, model, {})


async def count(call: SdkCall, caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest."""
    options = call.options
    try:
        ids = await caller.client.tokenize(
            call.prompts[0],  # type: ignore[arg-type]
            tools=options.get("tools"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
            reasoning_effort=options.get("reasoning_effort"),
        )
    except InvalidRequest as error:
        raise call.renamed(error) from None
    kept = options.get("truncate_prompt_tokens")
    return {"input_tokens": len(ids) if kept is None else min(len(ids), kept)}


async def detokenize(request: DetokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest. Special tokens have no text."""
    try:
        return {"prompt": await caller.client.detokenize(request.tokens)}
    except InvalidRequest as error:
        raise error.renamed(error.field.replace("token_ids", "tokens")) from None


# --- health ---------------------------------------------------------------------------------------------------
# The router is asked at most once per HEALTH_S, however many callers there are.

HEALTH_S: Final = 0.5


@final
class Health:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._asking = asyncio.Lock()
        self._is_serving = False
        self._until_s = -float("inf")

    async def is_serving(self) -> bool:
        async with self._asking:
            if time.monotonic() >= self._until_s:
                try:
                    self._is_serving = await self._client.is_serving()
                except PdserveError:
                    self._is_serving = False
                self._until_s = time.monotonic() + HEALTH_S
            return self._is_serving


# --- sessions -------------------------------------------------------------------------------------------------

MAX_QUERY_BYTES: Final = 512


async def sessions(client: AsyncClient, query: bytes) -> dict[str, Any]:
    """A page in OpenAI's form of lists. Raises InvalidRequest."""
    page = await client.sessions(**page_query(query))
    data = [{"object": "session", **asdict(one)} for one in page.sessions]
    return {"object": "list", "data": data, "has_more": page.has_more, "is_partial": page.is_partial}


async def end_session(client: AsyncClient, session_id: str) -> dict[str, Any]:
    """Raises InvalidRequest and NotFound."""
    if not await client.end_session(session_id):
        raise NotFound("session", session_id)
    return {"object": "session", "session_id": session_id, "is_over": True}


def page_query(query: bytes) -> dict[str, int]:
    """`limit` and `after` of a query, both numbers. Raises InvalidRequest."""
    return {name: _number(name, value) for name, value in _query(query, ("limit", "after")).items()}


def _query(query: bytes, names: Sequence[str], *, is_included: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    if len(query) > MAX_QUERY_BYTES:
        raise InvalidRequest("query", f"{len(query)} bytes", f"at most {MAX_QUERY_BYTES} bytes")
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if is_included and name in ("include", "include[]"):
            if value not in INCLUDED:
                raise InvalidRequest("include", shortened(repr(value)), f"one of {', '.join(sorted(INCLUDED))}")
            continue
        if name not in names or name in found:
            raise InvalidRequest("query", shortened(repr(name)), f"{', '.join(names)}, each once")
        found[name] = value
    return found


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 19):
        raise InvalidRequest(name, shortened(repr(value)), "a number")
    return int(value)


# --- stored responses and conversations ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A call to what is stored. Each function below raises NotFound, Unavailable and Overloaded, and InvalidRequest
    about its query."""

    stores: Stores
    tenant: str
    scope: Any
    hold: Hold
    request: Any  # of the body

    def part(self, name: str) -> str:
        """Of the path."""
        return str(self.scope["path_params"][name])

    def query(self, *names: str) -> dict[str, str]:
        """Also accepts `include`, any number of times. Its values name what is not stored."""
        found = self.scope.get("query_string", b"")
        return _query(found, names, is_included=True)

    def page(self) -> tuple[int, str, bool]:
        """The limit, the item before the page, and whether the oldest items come first."""
        given = self.query("limit", "after", "order")
        limit, order = _number("limit", given.get("limit", str(LISTED))), given.get("order", "desc")
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidRequest("limit", limit, f"1 to {MAX_LISTED}")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", shortened(repr(order)), "asc or desc")
        return limit, given.get("after", ""), order == "asc"


def nothing_stored(scope: Any) -> PdserveError:
    """The error where nothing is stored."""
    if names := list(scope["path_params"].values()):
        return NotFound("stored response or conversation", names[0])
    return UnsupportedField("path", "a conversation", "the setting store_bytes of the gateway, to store any")


async def _response(call: Stored) -> dict[str, Any]:
    given = call.query("stream", "include_obfuscation")
    if given.get("stream", "false") != "false":
        raise UnsupportedField("stream", "a value", "false: a stored response is given whole")
    return await call.stores.responses.response(call.tenant, call.part("response_id"), call.hold)


async def _delete_response(call: Stored) -> dict[str, Any]:
    await call.stores.responses.delete(call.tenant, response_id := call.part("response_id"))
    return {"id": response_id, "object": "response", "deleted": True}


async def _cancel_response(call: Stored) -> dict[str, Any]:
    response_id = call.part("response_id")
    await call.stores.responses.response(call.tenant, response_id, call.hold)
    raise InvalidRequest("response_id", "a response that has ended", "a response in the background, which none is")


async def _input_items(call: Stored) -> dict[str, Any]:
    limit, after, is_ascending = call.page()
    items = await call.stores.responses.input(call.tenant, response_id := call.part("response_id"), call.hold)
    return input_page(response_id, items, limit, after, is_ascending=is_ascending)


async def _create_conversation(call: Stored) -> dict[str, Any]:
    return await call.stores.conversations.create(call.tenant, call.request)


async def _conversation(call: Stored) -> dict[str, Any]:
    return await call.stores.conversations.describe(call.tenant, call.part("conversation_id"))


async def _update_conversation(call: Stored) -> dict[str, Any]:
    metadata = call.request.metadata or {}
    return await call.stores.conversations.update(call.tenant, call.part("conversation_id"), metadata)


async def _delete_conversation(call: Stored) -> dict[str, Any]:
    await call.stores.conversations.delete(call.tenant, conversation_id := call.part("conversation_id"))
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


async def _items(call: Stored) -> dict[str, Any]:
    limit, after, is_ascending = call.page()
    conversation_id = call.part("conversation_id")
    store = call.stores.conversations
    return await store.page(call.tenant, conversation_id, call.hold, limit, after, is_ascending=is_ascending)


async def _add_items(call: Stored) -> dict[str, Any]:
    call.query()
    return await call.stores.conversations.add(call.tenant, call.part("conversation_id"), call.request.items)


async def _item(call: Stored) -> dict[str, Any]:
    call.query()
    where = call.part("conversation_id"), call.part("item_id")
    return await call.stores.conversations.item(call.tenant, *where, call.hold)


async def _delete_item(call: Stored) -> dict[str, Any]:
    where = call.part("conversation_id"), call.part("item_id")
    return await call.stores.conversations.delete_item(call.tenant, *where)


#: By method and path: what answers a call, and where it has a body, what reads that.
STORED: Final[Mapping[tuple[str, str], tuple[Any, ...]]] = {
    ("GET", "/v1/responses/{response_id}"): (_response,),
    ("DELETE", "/v1/responses/{response_id}"): (_delete_response,),
    ("POST", "/v1/responses/{response_id}/cancel"): (_cancel_response,),
    ("GET", "/v1/responses/{response_id}/input_items"): (_input_items,),
    ("POST", "/v1/conversations"): (_create_conversation, conversation_request),
    ("GET", "/v1/conversations/{conversation_id}"): (_conversation,),
    ("POST", "/v1/conversations/{conversation_id}"): (_update_conversation, update_request),
    ("DELETE", "/v1/conversations/{conversation_id}"): (_delete_conversation,),
    ("GET", "/v1/conversations/{conversation_id}/items"): (_items,),
    ("POST", "/v1/conversations/{conversation_id}/items"): (_add_items, items_request),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): (_item,),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): (_delete_item,),
}


# --- LoRA adapters --------------------------------------------------------------------------------------------
# In vLLM's form. The router decides who may load and unload, and the workers decide which folders may be loaded.


def load_lora_request(given: Mapping[str, Any], model: Model) -> LoadLoraRequest:
    """Raises InvalidRequest."""
    return validated(LoadLoraRequest, given)


async def load_lora(request: LoadLoraRequest, caller: Caller) -> str:
    """Raises InvalidRequest with the workers' reasons."""
    try:
        await caller.client.load_adapter(request.lora_name, request.lora_path)
    except InvalidRequest as error:
        raise error.renamed({"name": "lora_name", "folder": "lora_path"}.get(error.field, error.field)) from None
    return f"Success: LoRA adapter '{request.lora_name}' added successfully."


def unload_lora_request(given: Mapping[str, Any], model: Model) -> UnloadLoraRequest:
    """Raises InvalidRequest."""
    return validated(UnloadLoraRequest, given)


async def unload_lora(request: UnloadLoraRequest, caller: Caller) -> str:
    """Raises UnknownModel."""
    await caller.client.unload_adapter(request.lora_name)
    return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


# --- live view ------------------------------------------------------------------------------------------------
# The event stream of frames, explanations, and the operator's commands. Frames come from the router's Watch with the
# viewer's own token, so the router decides who may see them.

#: A page of another site cannot set this header without the gateway's permission (CORS), which it never gives.
OWN_HEADER: Final = "x-pdserve-ui"


async def stream_frames(caller: Caller, receive: Any, send: Sender) -> int:
    """Sends frames until the viewer leaves or the router ends the stream. Raises PdserveError."""
    gone = asyncio.create_task(disconnected(receive))
    frames = caller.client.watch(PERIOD_S)
    try:
        first = await _next(frames, gone)
        topology = await caller.client.topology()
        await send.begin_stream(lambda reply: [sse.frame(reply.body)])
        hello = {"model": caller.model.name, "router_id": topology.router_id, "period_s": PERIOD_S, "is_operator": True}
        data = sse.frame({"hello": hello})
        frame: LiveFrame | None = first
        while frame is not None:
            data += sse.frame(frame_to_json(frame))
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = b""
            frame = await _next(frames, gone)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200
    except Cancelled:
        return 499
    finally:
        gone.cancel()
        await frames.aclose()


async def send_head(caller: Caller, send: Any) -> int:
    """Answers HEAD without becoming a viewer, whose number is limited. Raises PermissionDenied."""
    await caller.client.topology()
    await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return 200


async def explanation(client: AsyncClient, request_id: str) -> dict[str, Any]:
    """Raises NotFound after the router has forgotten the request."""
    return asdict(await client.explain(request_id))


async def worker_log(client: AsyncClient, worker_id: str) -> dict[str, Any]:
    """Raises NotFound, and Unavailable if the worker does not answer."""
    return {"lines": [asdict(one) for one in await client.worker_log(worker_id)]}


def check_own(given: Mapping[str, str]) -> None:
    """Raises PermissionDenied if the request may come from a page of another site."""
    if OWN_HEADER not in given:
        raise PermissionDenied(f"no header {OWN_HEADER}, which pages of other sites cannot send")


async def _next(frames: Any, gone: asyncio.Task[None]) -> LiveFrame | None:
    """None at the end. Raises Cancelled if the viewer has left."""
    waiting = asyncio.ensure_future(anext(frames, None))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise Cancelled("the viewer has left")
        found: LiveFrame | None = waiting.result()
        return found
    finally:
        if not waiting.done():
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
