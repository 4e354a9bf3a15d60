"""A server of OpenAI's HTTP API as the server of a benchmark: the gateway of pdserve, vLLM, SGLang and others.

Answers are streamed. `completions` sends prompts as token ids, so their length is exact; `chat` sends words, because
OpenAI's chats take text, and the server's usage tells their length.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final
from urllib.parse import urlsplit

import aiohttp

from pdserve.core.access.hosts import is_loopback_host
from pdserve.core.errors import ConfigError, Unauthenticated, Unavailable
from pdserve.core.json_text import to_json
from pdserve.core.urls import has_password, hide_password
from pdserve.wire.status import NO_CONNECTION
from simulator.bench.load import MAX_ID, as_text
from simulator.bench.server import BenchAnswer, RequestOptions, ServerReply, most_chunks

# --- server-sent events, and the chunks of OpenAI's API in them -----------------------------------------------

DONE: Final = "[DONE]"
MAX_EVENT_BYTES: Final = 4 * 2**20
MAX_COUNT: Final = 10**9  # tokens of one request
_DELTA_TEXTS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


class BrokenStream(Exception):
    """The server sent something that is not an event of OpenAI's API."""


@final
class EventReader:
    """Collects bytes until they are whole lines. Comments and fields other than `data` are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Raises BrokenStream if an event is too long or not UTF-8."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BrokenStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    yield line[5:].strip().decode()
                except UnicodeDecodeError:
                    raise BrokenStream("an event that is not UTF-8") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    has_tokens: bool  # a part of the answer, even if its text is still incomplete
    is_end: bool  # has the finish reason
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    token_ids: Sequence[int] = ()


def read_chunk(event: str) -> StreamChunk:
    """Raises BrokenStream."""
    try:
        found = json.loads(event)
    except (ValueError, RecursionError):
        raise BrokenStream("an event that is not JSON") from None
    if not isinstance(found, dict):
        raise BrokenStream("an event that is not a JSON object")
    error = found.get("error")
    usage = found.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    return StreamChunk(
        has_tokens=choice is not None and _has_tokens(choice),
        is_end=choice is not None and choice.get("finish_reason") is not None,
        prompt_tokens=_count(counts.get("prompt_tokens")),
        output_tokens=_count(counts.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        error=error_message(error) if error is not None else None,
        token_ids=_token_ids(choice),
    )


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Some servers send a token without text; some send the role or the finish reason in a separate chunk."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        has_text = any(delta.get(name) for name in _DELTA_TEXTS)
        is_role = "role" in delta
    else:
        has_text, is_role = bool(choice.get("text")), False
    return has_text or bool(choice.get("token_ids")) or (choice.get("finish_reason") is None and not is_role)


def _token_ids(choice: dict[str, Any] | None) -> Sequence[int]:
    found = None if choice is None else choice.get("token_ids")
    is_valid = isinstance(found, list) and all(type(one) is int and 0 <= one < MAX_ID for one in found)
    return found if found is not None and is_valid else ()


def error_message(error: Any) -> str:
    """The message of OpenAI's error object, or the start of any other text, without control characters."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("error") or error
    words = " ".join(str(error)[:400].split())
    return "".join(char if char.isprintable() else "?" for char in words)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


# --- server ---------------------------------------------------------------------------------------------------

Endpoint = Literal["completions", "chat"]
PATHS: Final[dict[str, str]] = {"completions": "/completions", "chat": "/chat/completions"}
CONNECT_S: Final = 5.0
MAX_BODY_BYTES: Final = 2**20  # of an error or of a list of models
MAX_TOKEN_CHARS: Final = 4096
#: aiohttp shows the bytes that it could not read. HTTP/2 begins with a SETTINGS frame: 3 bytes of length, a 4, zeros.
_HTTP2_BEGINS: Final = re.compile(r"\\x00\\x00(?:\\x..|\\?.)\\x04(?:\\x00){5}")
_GRPC_PORT: Final = "that is a gRPC port; give it with --target instead, or give the HTTP port"


@final
class HttpServer:
    def __init__(
        self,
        name: str,
        url: str,
        *,
        sampling: RequestOptions,
        endpoint: Endpoint = "completions",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        insecure: bool = False,
        timeout_s: float,
        model: str = "",
    ) -> None:
        """Raises ConfigError. A token is sent over TLS or to this host only, unless `insecure`. `tls` None: the
        system's root certificates."""
        self.name, self.address = name, base_url(url)
        parts = urlsplit(self.address)
        is_readable = parts.scheme != "https" and not insecure
        if token and is_readable and not is_loopback_host(parts.hostname or ""):
            raise ConfigError(
                "token", "a token for " + self.address, "https, or a loopback address: it would be readable"
            )
        if token and not (len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable()):
            raise ConfigError("token", "characters that a header cannot have", "printable ASCII")
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        for header, target_s in (("x-slo-ttft-ms", sampling.slo_ttft_s), ("x-slo-tpot-ms", sampling.slo_tpot_s)):
            if target_s is not None:
                self._headers[header] = f"{1000.0 * target_s:g}"
        if sampling.slo_task_s is not None:
            self._headers["x-slo-task-s"] = f"{sampling.slo_task_s:g}"
        self._sampling, self._endpoint, self._model = sampling, endpoint, model
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._session: aiohttp.ClientSession | None = None
        self._tls = tls

    async def connect(self) -> str:
        try:
            async with self._opened().get(f"{self.address}/models") as answer:
                body = await _body_of(answer)
        except aiohttp.ClientResponseError as error:
            raise Unavailable(f"{NO_CONNECTION} {self.address}: {_cause(error)}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"no server answers at {self.address} ({_cause(error)})") from None
        if answer.status in (401, 403):
            raise Unauthenticated(f"{self.address} rejects the token: HTTP {answer.status}, {_words(body)}")
        if answer.status != 200:
            raise Unavailable(f"{self.address}/models answers HTTP {answer.status}: {_words(body)}")
        names = _model_names(body)
        if not names:
            raise Unavailable(f"{self.address}/models names no model; is that a server of OpenAI's API?")
        if self._model and self._model not in names:
            raise ConfigError("model", self._model, f"a model that {self.address} serves: {', '.join(names[:5])}")
        self._model = self._model or names[0]
        return self._model

    def prepare(self, token_ids: Sequence[int], max_tokens: int, session_id: str = "") -> Any:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._sampling.ignore_eos:
            body["ignore_eos"] = True
        if self._sampling.has_sessions:
            body["return_token_ids"] = True  # of vLLM
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": as_text(token_ids)}]
        else:
            body["prompt"] = list(token_ids)
        headers = {"content-type": "application/json"}
        if session_id:
            headers["x-session-id"] = session_id
        return to_json(body).encode(), headers, max_tokens

    async def send(self, prepared: Any, reply: ServerReply) -> None:
        try:
            body, headers, max_tokens = prepared
            await self._stream(body, headers, max_tokens, reply)
        except BrokenStream as error:
            reply.fail("not a stream of OpenAI's API", str(error))
        except TimeoutError:
            reply.fail("timeout")
        except aiohttp.ClientPayloadError as error:
            reply.fail("stream ended early", str(error))
        except (aiohttp.ClientError, OSError) as error:
            reply.fail(
                "no connection" if isinstance(error, aiohttp.ClientConnectorError) else "lost connection", _cause(error)
            )

    async def _stream(self, body: bytes, headers: dict[str, str], max_tokens: int, reply: ServerReply) -> None:
        url = self.address + PATHS[self._endpoint]
        async with self._opened().post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                said = _words(await _body_of(answer))
                if answer.status == 429:
                    reply.reject(said)
                else:
                    reply.fail(f"HTTP {answer.status}", said)
                return
            most = most_chunks(max_tokens)
            reader, is_ended = EventReader(), False
            async for data in answer.content.iter_any():
                now_s = time.perf_counter()
                for event in reader.feed(data):
                    if event == DONE:
                        is_ended = True
                        break
                    chunk = read_chunk(event)
                    if chunk.error is not None:
                        reply.fail("error in the stream", chunk.error)
                        return
                    if chunk.has_tokens:
                        reply.chunk_s.append(now_s)
                    reply.token_ids += chunk.token_ids
                    is_ended = is_ended or chunk.is_end
                    reply.prompt_tokens = reply.prompt_tokens if chunk.prompt_tokens is None else chunk.prompt_tokens
                    reply.output_tokens = reply.output_tokens if chunk.output_tokens is None else chunk.output_tokens
                    reply.cached_tokens = reply.cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens
                if max(len(reply.chunk_s), len(reply.token_ids)) > most:
                    reply.fail("too many parts in an answer")
                    return
        if is_ended:
            reply.complete()
        else:
            reply.fail("stream ended early", "neither a finish reason nor [DONE] came")

    async def end_session(self, session_id: str) -> str:
        """A call of pdserve, which OpenAI's API does not have."""
        try:
            async with self._opened().delete(f"{self.address}/sessions/{session_id}") as answer:
                said = _words(await _body_of(answer))
                return "" if answer.status == 200 else f"HTTP {answer.status}, {said}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _cause(error)

    async def with_predictions(self, answers: Sequence[BenchAnswer]) -> Sequence[BenchAnswer]:
        """OpenAI's API has none."""
        return answers

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Connections are not limited, because an open loop must not wait for a free connection.
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=self._timeout, auto_decompress=False
            )
        return self._session


def base_url(url: str) -> str:
    """With /v1 where the URL has no path. Raises ConfigError."""
    expected = "a URL such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError("url", repr(url), expected) from None
    if not is_valid or parts.query or parts.fragment:
        raise ConfigError("url", repr(url), expected)
    if has_password(url):
        raise ConfigError("url", repr(hide_password(url)), "no password in it; the token comes from the environment")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


async def _body_of(answer: aiohttp.ClientResponse) -> bytes:
    """The first MAX_BODY_BYTES of the body."""
    body = bytearray()
    async for data in answer.content.iter_any():
        body += data
        if len(body) >= MAX_BODY_BYTES:
            break
    return bytes(body[:MAX_BODY_BYTES])


def _model_names(body: bytes) -> list[str]:
    try:
        found = json.loads(body)
        return [name for one in found["data"] if (name := str(one["id"])).isprintable()]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def _words(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return error_message(text)
    return error_message(found.get("error", found) if isinstance(found, dict) else found)


def _cause(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return f"{error.certificate_error}; --tls-ca names the CA"
        number = error.os_error.errno
        return os.strerror(number) if number else error_message(str(error.os_error))
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientResponseError):  # its text has the bytes that came
        return _GRPC_PORT if _HTTP2_BEGINS.search(error.message) else "that server does not speak HTTP/1"
    return error_message(str(error) or type(error).__name__)
