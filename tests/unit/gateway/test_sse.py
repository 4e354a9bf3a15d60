"""Frames of a stream are lines, whatever ends a line for a client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Piece
from pdserve.core.errors import InternalError
from pdserve.gateway.api import sse
from pdserve.gateway.api.replies import ChatWriter, Head, TextWriter
from pdserve.gateway.api.sse import SLICE, to_json, to_json_pieces
from pdserve.gateway.respond import PAUSE_BYTES, Responder, Sender, TokenTable, encoded, send_whole
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from pdserve.wire.local_channel import LocalServer, LocalTransport
from tests.unit.gateway.test_steps import BESIDE, MODEL, READ

TEXT = 'a\x85b\u2028c\u2029d\n\x0b\x0c\x1c\x1d\x1ee\\u2028"é日'


@pytest.mark.parametrize("make", [sse.frame, sse.padded_frame])
def test_a_frame_is_one_line_for_every_client(make: object) -> None:
    assert callable(make)
    found: bytes = make({"text": TEXT})
    lines = found.decode().splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: "))["text"] == TEXT


def test_padding_counts_escaped_characters() -> None:
    sizes = {len(sse.padded_frame({"text": "\u2028" * count})) % sse.PADDED_BYTES for count in range(40)}
    assert len(sizes) == 1


def test_pieces_are_the_same_json() -> None:
    rows = [{"a": [1, {"b": []}], "c": None}, {"d": float("nan")}]
    value = {
        "empty": {},
        "none": [],
        "rows": rows,
        "long": list(range(3 * SLICE + 1)),
        "texts": ("x",) * (SLICE + 1),
        "deep": {"e": {"f": [[1], [2, [3]]]}},
    }
    assert b"".join(to_json_pieces(value)) == to_json(value)
    assert b"".join(to_json_pieces({"rows": iter(rows), "none": iter(())})) == to_json({"rows": rows, "none": []})
    assert asyncio.run(encoded(value)) == to_json(value)


def test_a_long_answer_is_made_while_it_is_encoded() -> None:
    made = 0

    def tokens() -> Iterator[dict[str, Any]]:
        nonlocal made
        for _ in range(20_000):
            made += 1
            yield {"token": "x", "top": [{"token": "y", "bytes": [1, 2]}] * 20}

    pieces = to_json_pieces({"choices": iter([{"logprobs": {"content": tokens()}}])})
    assert max(len(one) for one in itertools.islice(pieces, 1000)) < 4096
    assert made < 1000


def test_a_token_is_encoded_at_once() -> None:
    """With its most likely ones: a call of the encoder for each value would take ten times as long."""
    top = [{"token": "y", "logprob": -1.0, "bytes": [121]}] * 64
    tokens = [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": top}] * 100
    for value in ({"content": iter(tokens)}, {"content": tokens}):
        pieces = list(to_json_pieces(value))
        assert b"".join(pieces) == to_json({"content": tokens})
        assert 100 <= len(pieces) < 300


def test_others_run_while_an_answer_is_encoded() -> None:
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> int:
        task = asyncio.create_task(beside())
        found = await encoded({"tokens": list(range(500_000))})
        task.cancel()
        return len(found)

    num_bytes = asyncio.run(run())
    assert turns >= num_bytes // (PAUSE_BYTES + 4096) > 40


@pytest.mark.parametrize("num_bytes", [0, 1, PAUSE_BYTES, PAUSE_BYTES + 1, 10 * PAUSE_BYTES])
def test_a_long_answer_is_written_in_pieces_between_which_others_run(num_bytes: int) -> None:
    body = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    sent: list[dict[str, Any]] = []
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def write() -> Sender:
        beside = asyncio.create_task(others())
        sender = Sender(send, lambda: False)
        await send_whole(sender, 200, body, ())
        beside.cancel()
        return sender

    sender = asyncio.run(write())
    parts = sent[1:]
    assert sent[0]["headers"] == [(b"content-length", str(num_bytes).encode())]
    assert b"".join(one["body"] for one in parts) == body
    assert max(len(one["body"]) for one in parts) <= PAUSE_BYTES
    assert [one["more_body"] for one in parts] == [True] * (len(parts) - 1) + [False]
    assert turns >= len(parts) - 1
    assert (sender.has_ended, sender.first_part_s) == (True, None)  # only a stream has a first part


@pytest.mark.parametrize("make", [sse.frame, sse.padded_frame])
def test_a_long_frame_is_encoded_in_pieces(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    top = [None, *({f"token {number}": -float(other) for number in range(20)} for other in range(5000))]
    value = {"choices": [{"index": 0, "logprobs": {"tokens": ["x"] * 5000, "top_logprobs": top}}], "usage": None}
    whole = json.loads(make(value).removeprefix(b"data: "))
    sizes: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> bytes:
        found: bytes = pydantic_core.to_json(*args, **kwargs)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(sse, "pydantic_core", SimpleNamespace(to_json=counting))
    found = json.loads(make(value, is_long=True).removeprefix(b"data: "))
    assert found.keys() == whole.keys()
    assert (found["choices"], found["usage"]) == (whole["choices"], whole["usage"])
    assert max(sizes) < 2 * SLICE * len(json.dumps(top[1]))


# --- templates ------------------------------------------------------------------------------------------------

WRITERS = {"/v1/chat/completions": ChatWriter, "/v1/completions": TextWriter}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STREAMS: Mapping[str, dict[str, Any]] = {
    "plain": {"stream": True},
    "usage": USAGE,
    "running usage": RUNNING,
    "padded": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "not padded": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "token ids": {"stream": True, "return_token_ids": True},
    "two answers": {"stream": True, "n": 2, "temperature": 1.0},
}


def frames(path: str, fields: dict[str, Any], texts: list[str], *, is_plain: bool) -> bytes:
    """Of the pieces of a stream. `is_plain`: by templates where these fit."""
    call = READ[path]({**BESIDE[path], **fields})
    head = Head(request_id='r"\u2028', model='a "model" \x85, "text":""', created_s=7)
    writer = WRITERS[path](head, call, TokenTable())
    if not is_plain:
        writer._is_plain = False
    pieces = [Piece(text=text, token_ids=(1, 2), index=number % 2) for number, text in enumerate(texts)]
    return b"".join(frame for one in pieces for frame in writer.pieces((one,), 3))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("path", WRITERS)
@given(texts=st.lists(st.text(max_size=8) | st.sampled_from([TEXT, "", '""', '\\"', "\x00\x7f", "\ud83d\ude00"])))
def test_a_template_makes_the_same_frames(path: str, name: str, texts: list[str]) -> None:
    texts = [one.encode("utf-8", "replace").decode() for one in texts]  # protobuf has no lone surrogates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse.secrets, "token_hex", lambda size: "0123456789abcdef" * (size // 8))
        found, whole = (frames(path, STREAMS[name], texts, is_plain=one) for one in (True, False))
    assert found == whole


def test_a_template_rejects_what_the_encoder_rejects() -> None:
    for make in (sse.FrameTemplate(sse.frame({"text": ""})).frame, lambda text: sse.frame({"text": text})):
        with pytest.raises(pydantic_core.PydanticSerializationError):
            make("\ud800")


# --- one write for what is there ------------------------------------------------------------------------------


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Writes the start and the texts, then a pause, then the last text and the end, before which it may fail."""

    def __init__(self, *texts: str, fails: bool = False) -> None:
        self._texts, self._fails = texts, fails
        self.goes_on = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r")))
        for number, text in enumerate(self._texts):
            if number == len(self._texts) - 1:
                await self.goes_on.wait()
            delta = inference_pb2.Delta(text=text, token_ids=[number])
            await context.write(inference_pb2.GenerateResponse(delta=delta))
        if self._fails:
            await context.abort(grpc.StatusCode.INTERNAL, "the last step failed")
        finished = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)
        await context.write(inference_pb2.GenerateResponse(finished=finished))


async def bodies_of(servicer: Scripted, failure: type[Exception] | None = None) -> list[tuple[bytes, bool]]:
    """The bodies of a streamed text, and whether more follow."""
    server = LocalServer((), 2**20)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
    call = READ["/v1/completions"]({**BESIDE["/v1/completions"], "stream": True})
    sent: list[tuple[bytes, bool]] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], message["more_body"]))
            servicer.goes_on.set()

    async def never() -> Any:
        await asyncio.Event().wait()

    async with AsyncClient("localhost:1", transport=LocalTransport(server)) as client:
        with contextlib.nullcontext() if failure is None else pytest.raises(failure):
            await Responder().respond("text", call, client, MODEL, never, Sender(send, lambda: False))
    return sent


async def test_the_last_piece_is_sent_with_the_end_that_has_come_with_it() -> None:
    [(first, goes_on), (last, is_open)] = await bodies_of(Scripted("a", "b", "c"))
    assert (goes_on, is_open) == (True, False)
    assert [first.count(b"data: "), last.count(b"data: ")] == [2, 3]  # the text, its reason, and [DONE]
    assert b'"text":"a"' in first
    assert b'"text":"b"' in first
    assert b'"text":"c"' in last


async def test_a_piece_is_sent_although_the_call_fails_after_it() -> None:
    sent = await bodies_of(Scripted("a", "b", fails=True), InternalError)
    assert [b'"text":"a"' in sent[0][0], b'"text":"b"' in sent[1][0]] == [True, True]
    assert [more for _, more in sent] == [True, True]  # the caller ends the stream with the error
