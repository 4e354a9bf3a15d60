"""Conversations of OpenAI's API: their requests, the stored form of an item, and pages of items. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from pdserve.core.errors import InvalidRequest, NotFound
from pdserve.gateway.api.request_models import ITEMS, MAX_NAMES, Most, Strict, described
from pdserve.gateway.api.responses import check_items
from pdserve.gateway.api.sdk_call import validated

CONVERSATION_PREFIX: Final = "conv_"
_CONVERSATION_ID: Final = re.compile(CONVERSATION_PREFIX + "[0-9a-f]{32}")
ITEM_ID: Final = re.compile(r"[A-Za-z0-9_.~:@=+,-]{1,200}")  # others cannot be part of a path
MAX_ADDED: Final = 20  # items of one call
LISTED: Final = 20
MAX_LISTED: Final = 100  # items of a page
#: OpenAI's values of `include`. They have no effect, because items are stored without what they ask for.
INCLUDED: Final = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_PREFIXES: Final = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}

_Items = Annotated[list[Annotated[dict[str, Any], Most(MAX_NAMES)]], Most(MAX_ADDED)]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Most(16)
]  # as in OpenAI's API


class ConversationRequest(Strict):
    items: _Items | None = described("the first items, in the form of the `input` of /v1/responses")
    metadata: _Metadata | None = described("up to 16 labels of the client")


class ConversationUpdate(Strict):
    metadata: _Metadata | None = described("replaces the earlier labels; absent: none")


class ConversationItems(Strict):
    items: _Items = Field(description="added at the end, in the form of the `input` of /v1/responses")


def check_conversation_id(given: str) -> None:
    """Raises NotFound."""
    if not _CONVERSATION_ID.fullmatch(given):
        raise NotFound("conversation", given)


def conversation_request(given: Mapping[str, Any]) -> ConversationRequest:
    """Raises InvalidRequest."""
    request = validated(ConversationRequest, given)
    check_items("items", request.items or ())
    return request


def items_request(given: Mapping[str, Any]) -> ConversationItems:
    """Raises InvalidRequest."""
    request = validated(ConversationItems, given)
    if not request.items:
        raise InvalidRequest("items", "no item", "at least one item")
    check_items("items", request.items)
    return request


def update_request(given: Mapping[str, Any]) -> ConversationUpdate:
    """Raises InvalidRequest."""
    return validated(ConversationUpdate, given)


def kept_item(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a valid item that later turns need, and its id and status. No others are stored, because they could
    be large."""
    kind = given.get("type") or "message"
    found = {name: given[name] for name in ITEMS[kind].model_fields if given.get(name) is not None}
    for name in ("content", "summary", "output"):
        if isinstance(found.get(name), list):
            found[name] = [_kept_part(one) for one in found[name] if isinstance(one, dict)]
    about = {name: given[name] for name in ("id", "status") if isinstance(given.get(name), str)}
    return {"type": kind, **about, **found}


def _kept_part(part: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: part[name] for name in ("type", "text", "refusal") if isinstance(part.get(name), str)}
    return {**found, "annotations": []} if found.get("type") == "output_text" else found


def stored_item(given: Mapping[str, Any], new_id: str, *, keeps_id: bool) -> dict[str, Any]:
    """In the form that OpenAI's clients read. `new_id` follows the prefix of the item's type; with `keeps_id`, an id
    that the item has stays."""
    found = {"status": "completed", **kept_item(given)}
    kind = found["type"]
    if not (keeps_id and ITEM_ID.fullmatch(found.get("id", ""))):
        found["id"] = _PREFIXES[kind] + new_id
    if kind == "message":
        if isinstance(text := found["content"], str):
            is_answer = found["role"] == "assistant"
            found["content"] = [_kept_part({"type": "output_text" if is_answer else "input_text", "text": text})]
    elif kind == "reasoning":
        found.setdefault("summary", [])
    return found


def conversation_answer(conversation_id: str, created_at: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    return {"id": conversation_id, "object": "conversation", "created_at": created_at, "metadata": metadata}


def page_answer(shown: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page of items."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }


def input_page(response_id: str, given: Sequence[Any], limit: int, after: str, *, is_ascending: bool) -> dict[str, Any]:
    """A page of a response's own input. Raises NotFound about `after`."""
    items = [{**one, "id": one.get("id") or f"item_{number}_{response_id}"} for number, one in enumerate(given)]
    if not is_ascending:
        items.reverse()
    begin = 0
    if after:
        begin = next((at + 1 for at, one in enumerate(items) if one["id"] == after), 0)
        if not begin:
            raise NotFound("input item", after)
    return page_answer(items[begin : begin + limit], has_more=begin + limit < len(items))
