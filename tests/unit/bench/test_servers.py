"""Real servers under load: a router over gRPC, the gateway over HTTP, and HTTP servers that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdserve.core.errors import ConfigError, Unauthenticated, Unavailable
from simulator.bench.benchmark import Benchmark, BenchPlan
from simulator.bench.http_server import (
    MAX_EVENT_BYTES,
    BrokenStream,
    EventReader,
    HttpServer,
    base_url,
    error_message,
    read_chunk,
)
from simulator.bench.load import DEFAULT_IDS, LoadLevel, LoadPlan, SyntheticLoad
from simulator.bench.router_server import GrpcServer
from simulator.bench.server import BenchOutcome, BenchServer, RequestOptions, ServerReply
from simulator.bench.statistics import BenchResult
from tests.unit.gateway.conftest import Served, serve

PATIENT_S = 120.0
SAMPLING = RequestOptions(temperature=0.0, slo_ttft_s=PATIENT_S, slo_tpot_s=20.0)


def router(address: str, **values: Any) -> GrpcServer:
    return GrpcServer("router", address, **{"sampling": SAMPLING, "timeout_s": PATIENT_S, **values})


def http(url: str, **values: Any) -> HttpServer:
    return HttpServer("http", url, **{"sampling": SAMPLING, "timeout_s": PATIENT_S, **values})


async def load(*servers: BenchServer, turns: int = 1) -> BenchResult:
    source = SyntheticLoad(input_tokens=(20, 40), output_tokens=(6, 9))
    plan = BenchPlan(
        load=LoadPlan(source=source, num_requests=8, duration_s=None),
        levels=[LoadLevel(concurrency=4)],
        turns=turns,
        token_ids=DEFAULT_IDS,
    )
    return await Benchmark(servers, plan, None).run()


async def test_router_and_gateway_give_the_same_counts(toy: Served) -> None:
    found = await load(router(toy.router), http(toy.url), turns=2)
    first, second = (one.summary for one in found.levels)
    assert found.servers[0][2] == found.servers[1][2] == "toy"
    assert (first.completed, second.completed) == (16, 16)
    assert first.total_input_tokens == second.total_input_tokens
    assert first.total_output_tokens == second.total_output_tokens
    assert [len(one.answers) for one in found.levels[0].turns] == [8, 8]
    assert {ratio.metric.name for ratio in found.ratios(found.shown_levels[0])} >= {"median_ttft_ms", "median_e2el_ms"}


async def test_the_router_s_own_times_are_within_ours(toy: Served) -> None:
    found = await load(router(toy.router))
    for one in found.levels[0].turns[0].answers:
        assert one.server_ttft_s is not None
        assert 0.0 < one.server_ttft_s <= one.ttft_s


async def test_chats_send_words(bundled: Served) -> None:
    found = await load(http(bundled.url + "/v1/", endpoint="chat"))
    summary = found.levels[0].summary
    assert (summary.completed, summary.failed) == (8, 0)
    assert summary.total_input_tokens > 8 * 20


async def test_rejections_are_counted_over_both() -> None:
    with serve(router={"max_queue": 0}, worker={"toy_step_s": 0.05, "max_batch": 1}, prefill=0) as served:
        for server in (router(served.router), http(served.url)):
            summary = (await load(server)).levels[0].summary
            assert summary.rejected > 0
            assert summary.failed == 0
            assert summary.rejected + summary.completed == 8


async def test_an_error_is_named_by_its_status(toy: Served) -> None:
    found = await load(http(toy.url, sampling=RequestOptions(temperature=-1.0)))
    summary = found.levels[0].summary
    assert summary.errors == {"HTTP 400": 8}
    assert "temperature" in summary.details["HTTP 400"]
    source = SyntheticLoad(input_tokens=(100_000, 100_000), output_tokens=(1, 1))
    plan = BenchPlan(
        load=LoadPlan(source=source, num_requests=1, duration_s=None),
        levels=[LoadLevel(concurrency=1)],
        token_ids=DEFAULT_IDS,
    )
    found = await Benchmark([router(toy.router)], plan, None).run()
    assert found.levels[0].summary.errors == {"gRPC CONTEXT_LENGTH_EXCEEDED": 1}


async def test_another_model_is_rejected_before_the_load(toy: Served) -> None:
    for server in (router(toy.router, model="other"), http(toy.url, model="other")):
        with pytest.raises(ConfigError, match="other"):
            await load(server)


async def test_a_missing_server_is_one_error() -> None:
    for server in (router("127.0.0.1:9"), http("http://127.0.0.1:9")):
        with pytest.raises(Unavailable, match="no server answers"):
            await load(server)


async def test_the_ports_of_grpc_and_http_are_told_apart(toy: Served) -> None:
    with pytest.raises(Unavailable, match="that is an HTTP port; give the gRPC port") as caught:
        await load(router(urlsplit(toy.url).netloc))
    assert "\n" not in caught.value.message
    with pytest.raises(Unavailable, match=r"that is a gRPC port; give it with --target") as caught:
        await load(http(f"http://{toy.router}"))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("answer", [b"-ERR unknown command\r\n", b"\x00\xff\n\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
async def test_another_server_is_named_without_its_bytes(answer: bytes) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="does not speak HTTP/1") as caught:
            await load(http(f"http://127.0.0.1:{port}"))
    assert caught.value.message.isprintable()


async def test_a_token_is_needed_and_sent() -> None:
    with serve(token="right") as served:
        with pytest.raises(Unauthenticated):
            await load(http(served.url, token="wrong"))
        for server in (router(served.router, token="right"), http(served.url, token="right")):
            assert (await load(server)).levels[0].summary.completed == 8


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://a", "http://", "http://a:99999", "http://a/?q=1", "http://u:p@a", "http://[::1"]
)
def test_only_server_urls_are_accepted(url: str) -> None:
    with pytest.raises(ConfigError):
        base_url(url)


def test_a_path_replaces_v1() -> None:
    assert base_url("http://a:1") == base_url("http://a:1/v1/") == "http://a:1/v1"
    assert base_url("https://a/openai/v2") == "https://a/openai/v2"


def test_the_benchmark_sends_no_token_in_plain_text() -> None:
    with pytest.raises(ConfigError, match="readable"):
        http("http://10.0.0.1:8000", token="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_token_is_sent_to_this_host(host: str) -> None:
    assert http(f"http://{host}:8000", token="secret").address == f"http://{host}:8000/v1"


CHUNK = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def scripted(answer: bytes, body: bytes = b'{"data": [{"id": "m"}]}') -> AsyncIterator[str]:
    """A server that lists a model in `body`, and gives every other request this answer and closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        (STREAM + CHUNK + LAST, BenchOutcome.COMPLETED, ""),
        (STREAM + CHUNK + b"data: [DONE]\n\n", BenchOutcome.COMPLETED, ""),
        (STREAM + CHUNK, BenchOutcome.FAILED, "stream ended early"),
        (STREAM, BenchOutcome.FAILED, "stream ended early"),
        (CHUNKED + b"5\r\ndata:", BenchOutcome.FAILED, "stream ended early"),
        (STREAM + LAST, BenchOutcome.FAILED, "an answer without tokens"),
        (STREAM + CHUNK + b'data: {"error": {"message": "x"}}\n\n', BenchOutcome.FAILED, "error in the stream"),
        (STREAM + b"data: <html>\n\n", BenchOutcome.FAILED, "not a stream of OpenAI's API"),
        (STREAM + 200 * CHUNK, BenchOutcome.FAILED, "too many parts in an answer"),
        (b"HTTP/1.1 429 x\r\ncontent-length: 0\r\n\r\n", BenchOutcome.REJECTED, "rejected"),
        (b"HTTP/1.1 503 x\r\ncontent-length: 2\r\n\r\nno", BenchOutcome.FAILED, "HTTP 503"),
        (b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n", BenchOutcome.FAILED, "HTTP 404"),
        (b"nonsense\r\n\r\n", BenchOutcome.FAILED, "lost connection"),
        (b"", BenchOutcome.FAILED, "lost connection"),
    ],
)
async def test_every_end_of_an_answer_has_its_outcome(answer: bytes, outcome: BenchOutcome, error: str) -> None:
    async with scripted(answer) as url:
        server = http(url)
        await server.connect()
        reply = ServerReply(chunk_s=[])
        await server.send(server.prepare([1, 2], 4), reply)
        await server.close()
    assert (reply.outcome, reply.error) == (outcome, error)


async def test_a_list_of_many_models_is_read_to_its_end() -> None:
    names = [{"id": "\x1b[2J"}, *({"id": f"model-{number:0100}"} for number in range(4000))]
    async with scripted(b"", json.dumps({"data": names}).encode()) as url:
        server = http(url, model=names[-1]["id"])
        assert await server.connect() == names[-1]["id"]
        await server.close()
        server = http(url)
        assert await server.connect() == names[1]["id"], "not one that a terminal would obey"
        await server.close()


async def test_a_silent_server_is_an_error() -> None:
    async with scripted(STREAM + CHUNK) as url:
        server = http(url, timeout_s=0.2)
        await server.connect()
        kept: list[asyncio.StreamWriter] = []  # since Python 3.13 a writer that nobody keeps closes its connection
        silent = await asyncio.start_server(lambda reader, writer: kept.append(writer), "127.0.0.1", 0)
        server.address = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
        reply = ServerReply(chunk_s=[])
        await server.send(server.prepare([1, 2], 4), reply)
        await server.close()
        silent.close()
        for one in kept:
            one.close()
    assert (reply.outcome, reply.error) == (BenchOutcome.FAILED, "timeout")


# --- server-sent events ---------------------------------------------------------------------------------------
# Events of a stream, as servers send and split them.


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_may_arrive_in_pieces(size: int) -> None:
    stream = b': ping\n\nevent: x\ndata: {"a": 1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n'
    reader = EventReader()
    pieces = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == ['{"a": 1}', "two", "[DONE]"]


def test_an_event_without_end_is_refused() -> None:
    with pytest.raises(BrokenStream, match="more than"):
        list(EventReader().feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1)))


@pytest.mark.parametrize("event", ["no json", "[1]", "7", "[" * 100_000])
def test_other_data_is_no_event(event: str) -> None:
    with pytest.raises(BrokenStream):
        read_chunk(event)


@pytest.mark.parametrize(
    ("choice", "has_tokens"),
    [
        ({"text": "a", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # a token whose character is incomplete
        ({"text": "", "finish_reason": "length"}, False),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": "", "finish_reason": "stop", "token_ids": [4]}, True),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, True),
        ({"delta": {"content": ""}, "finish_reason": None}, True),
        ({"delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_parts_with_tokens_are_told_from_others(choice: dict[str, object], has_tokens: bool) -> None:
    found = read_chunk(json.dumps({"choices": [choice]}))
    assert (found.has_tokens, found.is_end) == (has_tokens, choice["finish_reason"] is not None)


def test_usage_and_errors_are_read() -> None:
    usage = read_chunk('{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}')
    assert (usage.prompt_tokens, usage.output_tokens, usage.has_tokens) == (5, 7, False)
    cached = read_chunk('{"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}')
    assert (cached.cached_tokens, usage.cached_tokens) == (4, None)
    assert read_chunk('{"error": {"message": "broken\\nworker"}}').error == "broken worker"
    assert read_chunk('{"choices": [], "usage": {"prompt_tokens": -1}}').prompt_tokens is None


def test_words_and_counts_of_a_server_are_bounded() -> None:
    assert error_message({"message": "\x1b]0;title\x07 no\n room"}) == "?]0;title? no room"
    assert len(error_message("x" * 100_000)) == 400
    assert read_chunk('{"usage": {"completion_tokens": 1' + "0" * 400 + "}}").output_tokens is None
