"""The endpoints /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.core.errors import InvalidRequest
from pdserve.gateway.answers import TokenTable
from pdserve.gateway.door import Caller
from pdserve.gateway.request_models import DetokenizeRequest, TokenizeRequest
from pdserve.gateway.sdk_call import MAX_MESSAGES, check_model, sdk_messages, validated


async def tokenize(given: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest and UnknownModel."""
    check_model(given.get("model"), caller.model)
    messages = given.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES} messages")
    request = validated(TokenizeRequest, given)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt", "neither" if request.prompt is None else "both", "prompt or messages")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name):
                raise InvalidRequest(name, "a value", "messages beside it")
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


async def detokenize(given: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest and UnknownModel. Special tokens have no text."""
    check_model(given.get("model"), caller.model)
    request = validated(DetokenizeRequest, given)
    try:
        return {"prompt": await caller.client.detokenize(request.tokens)}
    except InvalidRequest as error:
        raise error.renamed(error.field.replace("token_ids", "tokens")) from None
