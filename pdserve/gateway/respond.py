"""Answers one request for generation: runs the SDK's calls, and writes the answer whole or in chunks.

No header is sent before the first token or the error, so that an error has its status. A client that disconnects ends
the calls at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast, final

from pdserve.client.aio import AsyncClient, AsyncStream
from pdserve.client.request import MAX_TOKENS_PER_CALL, Prompt
from pdserve.client.results import Completion, Model, Piece, Token, TokenLogprob
from pdserve.core.errors import Cancelled, InvalidRequest, PdserveError, Unavailable
from pdserve.gateway.api import logprobs, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.field_support import Endpoint
from pdserve.gateway.api.http_input import IGNORED, REQUEST_ID
from pdserve.gateway.api.logprobs import EchoedPrompt
from pdserve.gateway.api.messages import MessagesWriter
from pdserve.gateway.api.replies import ChatWriter, Head, TextWriter, Writer
from pdserve.gateway.api.responses import ResponsesWriter
from pdserve.gateway.api.sdk_call import SdkCall

# --- streams of the SDK ---------------------------------------------------------------------------------------
# A request has one for each of its prompts. Closing them cancels the request.

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

    @property
    def has_next(self) -> bool:
        """Whether the next message is known to be there already."""
        return len(self._streams) == 1 and self._streams[0].has_next

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


# --- answer over HTTP -----------------------------------------------------------------------------------------

PAUSE_BYTES: Final = 65_536  # encoded or written between two pauses
LEARNED_TOKENS: Final = 512  # with their logprobs, between two pauses
WRITERS: Final[Mapping[Endpoint, Callable[[Head, SdkCall, TokenTable], Writer]]] = {
    "chat": ChatWriter,
    "text": TextWriter,
    "responses": ResponsesWriter,
    "messages": MessagesWriter,
}
EVENT_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect chunks
)


@final
class Sender:
    """Sends one answer. `error_frame` makes the end of a stream that fails, in pieces; None for a whole answer."""

    def __init__(self, send: Any, is_last: Callable[[], bool]) -> None:
        """`is_last`: whether the connection ends after the answer."""
        self._send, self._is_last = send, is_last
        self.has_begun = False
        self.has_ended = False
        self.on_success: Callable[[], None] = lambda: None  # an answer with status 200 begins
        self.first_part_s: float | None = None  # when the first part of a stream was sent
        self.error_frame: Callable[[ErrorReply], Iterable[bytes]] | None = None

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and self._is_last():
            pairs = [pair for pair in message["headers"] if pair[0] != b"connection"]
            message = {**message, "headers": [*pairs, (b"connection", b"close")]}
        if not self.has_begun:
            self.has_begun = True
            if message.get("status") == 200:
                self.on_success()
        await self._send(message)
        self.has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.first_part_s is None and self.error_frame is not None and message.get("more_body", False):
            self.first_part_s = time.perf_counter()

    async def begin_stream(
        self, error_frame: Callable[[ErrorReply], Iterable[bytes]], headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        self.error_frame = error_frame
        await self({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})

    async def fail(self, reply: ErrorReply) -> None:
        """Ends a stream that has begun with its error."""
        assert self.error_frame is not None
        await self.end_stream(self.error_frame(reply))

    async def end_stream(self, pieces: Iterable[bytes]) -> None:
        """Sends them in parts, so that they need not be held at once."""
        part = b""
        async for following in _parts_with_pauses(pieces):
            if part:
                await self({"type": "http.response.body", "body": part, "more_body": True})
            part = following
        await self({"type": "http.response.body", "body": part, "more_body": False})


#: Stores a response, which is given as fields and encoded. Returns whether it did.
Keep = Callable[[Mapping[str, Any], bytes], Awaitable[bool]]


@final
class Responder:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._tokens = TokenTable()

    async def respond(
        self,
        endpoint: Endpoint,
        call: SdkCall,
        client: AsyncClient,
        model: Model,
        receive: Any,
        send: Sender,
        keep: Keep | None = None,
    ) -> int:
        """`keep` stores the answer, before the client has all of it. Returns the status of the answer. Raises
        PdserveError, which the caller turns into the answer or its end."""
        call, echoes = await with_echoes(call, client, self._tokens, model.max_context_tokens)
        answers = Answers(client, call)
        watch = asyncio.create_task(_close_at_disconnect(receive, answers))
        try:
            pieces = answers.pieces()
            first = await anext(pieces, None)
            if watch.done():
                raise Cancelled("the client has disconnected")
            head = Head(
                request_id=answers.request_id,
                model=call.options.get("model") or model.name,
                created_s=int(time.time()),
                eos_token_ids=model.eos_token_ids,
                reasoning=answers.reasoning,
            )
            writer = WRITERS[endpoint](head, call, self._tokens)
            answer = _Answer(
                writer=writer,
                keep=None if keep is None else partial(_keep, cast(ResponsesWriter, writer), keep),
                answers=answers,
                echoes=echoes,
                is_scored=call.shown.logprobs is not None,
                client=client,
                tokens=self._tokens,
                watch=watch,
                send=send,
                headers=_headers(answers.request_id, call.ignored, endpoint),
            )
            return await (answer.stream(first, pieces) if call.shown.is_streamed else answer.whole(pieces))
        finally:
            answers.close()
            watch.cancel()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """One request whose first piece has come."""

    writer: Writer
    keep: Callable[[Sequence[Completion]], Awaitable[None]] | None
    answers: Answers
    echoes: Sequence[EchoedPrompt]
    is_scored: bool
    client: AsyncClient
    tokens: TokenTable
    watch: asyncio.Task[None]  # ends when the client has disconnected
    send: Sender
    headers: tuple[tuple[bytes, bytes], ...]

    async def whole(self, pieces: AsyncIterator[Piece]) -> int:
        async for _ in pieces:
            pass
        if self.watch.done():
            raise Cancelled("the client has disconnected")
        writer, completions = self.writer, self.answers.completions
        for number, one in enumerate(completions):
            await self._begin_prompt(number, one.prompt_logprobs)
            for choice in one.choices:
                await self._learn(choice.logprobs)
        # Written in a thread if it may be long, so that others do not wait for it.
        body = await asyncio.to_thread(writer.answer, completions) if self.is_scored else writer.answer(completions)
        if self.keep is not None:
            await self.keep(completions)
            body = cast(ResponsesWriter, writer).response(completions)
        await send_json(self.send, 200, await encoded(body), self.headers)
        return 200

    async def stream(self, piece: Piece | None, pieces: AsyncIterator[Piece]) -> int:
        """`piece` is the first one, and not in `pieces`."""
        answers = self.answers
        await self.send.begin_stream(self.writer.error, self.headers)
        begun: set[int] = set()
        held = b""  # of a piece that the next message follows at once, such as the end: both are sent together
        while piece is not None:
            prompt = answers.prompt_of(piece.index)
            if prompt not in begun:
                begun.add(prompt)
                await self._begin_prompt(prompt, answers.prompt_logprobs(prompt))
            if piece.logprobs:
                await self._learn_ids(logprobs.token_ids(piece.logprobs))
            frames = self.writer.pieces((piece,), answers.prompt_tokens[prompt])
            if self.is_scored and self.echoes:  # The prompt's tokens come in one frame.
                frames = [await asyncio.to_thread(b"".join, frames)]
            for part in _parts(frames):
                held += part
                if len(held) <= PAUSE_BYTES and answers.has_next:
                    continue
                body, held = held, b""
                await self.send({"type": "http.response.body", "body": body, "more_body": True})
                if len(body) > PAUSE_BYTES:
                    await asyncio.sleep(0)
            try:
                piece = await anext(pieces, None)
            except PdserveError:
                if held:
                    await self.send({"type": "http.response.body", "body": held, "more_body": True})
                raise
        if self.watch.done():
            return 499
        completions = answers.completions
        if self.keep is None:
            await self.send.end_stream(itertools.chain((held,), self.writer.end(completions)))
            return 200
        writer = cast(ResponsesWriter, self.writer)
        closing = b"".join((held, *writer.close(completions)))
        await self.send({"type": "http.response.body", "body": closing, "more_body": True})
        await self.keep(completions)
        await self.send.end_stream(writer.last(completions))
        return 200

    async def _begin_prompt(self, number: int, scored: Sequence[TokenLogprob | None]) -> None:
        """Before the first piece of a prompt's answers."""
        await self._learn(scored)
        if self.echoes:
            echoed = self.echoes[number]
            await self._learn_ids(set(echoed.token_ids))
            self.writer.repeat(number, dataclasses.replace(echoed, scored=tuple(scored)))

    async def _learn(self, scored: Sequence[TokenLogprob | None]) -> None:
        """Learns the tokens of one answer or prompt. Others of the event loop run in between."""
        for start in range(0, len(scored), LEARNED_TOKENS):
            await self._learn_ids(logprobs.token_ids(scored[start : start + LEARNED_TOKENS]))
            await asyncio.sleep(0)

    async def _learn_ids(self, token_ids: set[int]) -> None:
        """If the router has ended, the next one is asked, because the answer continues there too."""
        attempts = self.client.attempts()
        while True:
            try:
                return await self.tokens.learn(self.client, token_ids)
            except Unavailable as error:
                delay_s = attempts.resume_delay_s(error, 0)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)


async def _keep(writer: ResponsesWriter, keep: Keep, completions: Sequence[Completion]) -> None:
    response = writer.response(completions)
    writer.is_stored = await keep(response, await encoded(response))


def _headers(request_id: str, ignored: Iterable[str], endpoint: Endpoint) -> tuple[tuple[bytes, bytes], ...]:
    found = [(REQUEST_ID.encode(), request_id.encode())]
    if endpoint == "messages":
        found.append((b"request-id", request_id.encode()))  # where Anthropic's clients read it
    if named := ", ".join(ignored).encode():
        found.append((IGNORED.encode(), named))
    return tuple(found)


async def encoded(value: Mapping[str, Any]) -> bytes:
    """The same as to_json. Others of the event loop run in between."""
    return b"".join([part async for part in _parts_with_pauses(sse.to_json_pieces(value))])


async def _parts_with_pauses(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in _parts(pieces):
        yield part
        if len(part) > PAUSE_BYTES:
            await asyncio.sleep(0)


def _parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces, joined to parts. All but the last have over PAUSE_BYTES, and the caller pauses after those."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) > PAUSE_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


async def send_json(send: Any, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send_whole(send, status, body, ((b"content-type", b"application/json"), *headers))


async def send_whole(send: Any, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    start = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    for at in range(0, max(len(body), 1), PAUSE_BYTES):  # the transport would copy all of a long one at once
        end = at + PAUSE_BYTES
        await send({"type": "http.response.body", "body": body[at:end], "more_body": end < len(body)})
        if end < len(body):
            await asyncio.sleep(0)


async def disconnected(receive: Any) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close_at_disconnect(receive: Any, answers: Answers) -> None:
    await disconnected(receive)
    answers.close()
