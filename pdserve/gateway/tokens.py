"""The endpoints /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.client.results import Model
from pdserve.core.errors import InvalidRequest
from pdserve.gateway.answers import TokenTable
from pdserve.gateway.door import Caller
from pdserve.gateway.request_models import DetokenizeRequest, TokenizeRequest
from pdserve.gateway.sdk_call import check_model, sdk_messages, validated
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


async def detokenize(request: DetokenizeRequest, caller: Caller) -> dict[str, Any]:
    """Raises InvalidRequest. Special tokens have no text."""
    try:
        return {"prompt": await caller.client.detokenize(request.tokens)}
    except InvalidRequest as error:
        raise error.renamed(error.field.replace("token_ids", "tokens")) from None
