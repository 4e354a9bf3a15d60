"""Prompts that /v1/completions repeats before its answers (`echo`): reads their texts and token ids."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from pdserve.client.aio import AsyncClient
from pdserve.client.request import Prompt
from pdserve.core.errors import InvalidRequest
from pdserve.gateway.answers import TokenTable
from pdserve.gateway.logprobs import EchoedPrompt
from pdserve.gateway.sdk_call import SdkCall


async def with_echoes(
    call: SdkCall, client: AsyncClient, tokens: TokenTable, most_tokens: int
) -> tuple[SdkCall, tuple[EchoedPrompt, ...]]:
    """The prompts to repeat, and the call with the token ids that were read for them. Raises InvalidRequest.

    Prompts of over `most_tokens` are not read, because the call will reject them.
    """
    if not call.shown.has_echo:
        return call, ()
    kept = call.options.get("truncate_prompt_tokens")
    prompts: list[Prompt] = []
    echoes: list[EchoedPrompt] = []
    for prompt in call.prompts:
        if isinstance(prompt, str) and kept is None and call.shown.logprobs is None:
            prompts.append(prompt)
            echoes.append(EchoedPrompt(prompt))
            continue
        ids: Sequence[int] = await client.tokenize(prompt) if isinstance(prompt, str) else prompt  # type: ignore[assignment]
        if kept:
            ids = ids[-kept:]
        text = ""
        if isinstance(prompt, str) and not (kept and len(ids) == kept):
            text = prompt
        elif len(ids) <= most_tokens:
            with contextlib.suppress(InvalidRequest):  # the call rejects such ids, by the name of its own field
                text = await _text_of(ids, call, client, tokens)
        prompts.append(list(ids))
        echoes.append(EchoedPrompt(text, () if call.shown.logprobs is None else tuple(ids)))
    return dataclasses.replace(call, prompts=prompts), tuple(echoes)


async def _text_of(ids: Sequence[int], call: SdkCall, client: AsyncClient, tokens: TokenTable) -> str:
    if not call.shows_special_tokens:
        return await client.detokenize(ids)
    await tokens.learn(client, set(ids))
    return b"".join(map(tokens, ids)).decode("utf-8", "replace")
