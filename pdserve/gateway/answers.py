"""Reads the streams of one HTTP request: one for each of its prompts. Closing them cancels the request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Final, final

from pdserve.client.aio import AsyncClient, AsyncStream
from pdserve.client.request import MAX_TOKENS_PER_CALL, Prompt
from pdserve.client.results import Completion, Piece, Token, TokenLogprob
from pdserve.core.errors import InvalidRequest
from pdserve.gateway.api.logprobs import EchoedPrompt
from pdserve.gateway.api.sdk_call import SdkCall

MAX_KNOWN: Final = 2**19  # more than a vocabulary has; at this number the table is cleared


@final
class Answers:
    def __init__(self, client: AsyncClient, call: SdkCall) -> None:
        """Raises InvalidRequest."""
        self._streams: list[AsyncStream] = []
        self._each = call.answers_each
        try:
            for number, prompt in enumerate(call.prompts):
                options = call.options
                if number and (request_id := options.get("request_id")):
                    options = {**options, "request_id": f"{request_id}.{number}"}
                self._streams.append(client.stream(prompt, keeps_pieces=not call.shown.is_streamed, **options))
        except InvalidRequest as error:
            self.close()
            if len(call.prompts) > 1 and error.field.startswith("prompt["):
                raise error.renamed(f"prompt[{len(self._streams)}]{error.field.removeprefix('prompt')}") from None
            raise
        except BaseException:
            self.close()
            raise

    @property
    def request_id(self) -> str:
        """Of the first prompt. Available with the first piece."""
        return self._streams[0].request_id

    @property
    def reasoning(self) -> str | None:
        """How the prompt of a chat ends. Available with the first piece."""
        return self._streams[0].reasoning

    @property
    def prompt_tokens(self) -> list[int]:
        """The number of each prompt whose first piece has arrived; 0 for the others."""
        return [one.prompt_tokens or 0 for one in self._streams]

    def prompt_logprobs(self, prompt: int) -> tuple[TokenLogprob | None, ...]:
        """Of prompt number `prompt`. Available with its first piece."""
        return self._streams[prompt].prompt_logprobs

    def prompt_of(self, index: int) -> int:
        """The number of the prompt of answer `index`."""
        return index // self._each

    @property
    def completions(self) -> list[Completion]:
        return [one.completion for one in self._streams]

    def close(self) -> None:
        """Cancels the running streams. Idempotent."""
        for one in self._streams:
            one.close()

    def pieces(self) -> AsyncIterator[Piece]:
        """Pieces with the number of their answer over all prompts. The first error of a stream ends all streams."""
        return self._streams[0] if len(self._streams) == 1 else self._merged()

    async def _merged(self) -> AsyncIterator[Piece]:
        # The queue has no limit, because a stream that was closed must be able to end although nobody reads. A piece is
        # read when the one before it was taken from the queue.
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        taken = [asyncio.Semaphore(0) for _ in self._streams]
        readers = [asyncio.create_task(self._read(number, queue, one)) for number, one in enumerate(taken)]
        try:
            left = len(readers)
            while left:
                found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    taken[self.prompt_of(found.index)].release()
                    yield found
        finally:
            for one in readers:
                one.cancel()
            self.close()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(
        self, number: int, queue: asyncio.Queue[Piece | BaseException | None], taken: asyncio.Semaphore
    ) -> None:
        try:
            async for piece in self._streams[number]:
                queue.put_nowait(dataclasses.replace(piece, index=number * self._each + piece.index))
                await taken.acquire()
            queue.put_nowait(None)
        except Exception as error:  # passed on to the reader of all streams
            queue.put_nowait(error)


@final
class TokenTable:
    """The bytes of tokens, each read once from the router."""

    def __init__(self) -> None:
        self._known: dict[int, Token] = {}

    def __call__(self, token_id: int) -> bytes:
        return self._known[token_id].token_bytes

    def is_special(self, token_id: int) -> bool:
        return self._known[token_id].is_special

    async def learn(self, client: AsyncClient, token_ids: set[int]) -> None:
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        missing = [one for one in token_ids if one not in self._known]
        for start in range(0, len(missing), MAX_TOKENS_PER_CALL):
            asked: Sequence[int] = missing[start : start + MAX_TOKENS_PER_CALL]
            self._known.update(zip(asked, await client.tokens(asked), strict=True))


# --- prompts before their answers -----------------------------------------------------------------------------
# Texts and token ids of prompts that /v1/completions repeats (`echo`).


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
