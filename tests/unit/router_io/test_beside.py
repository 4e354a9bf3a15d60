"""A router with Redis, a trace collector, Prometheus, and a real model's text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import pdserve
from pdserve.core.errors import InvalidRequest
from pdserve.core.results import Phase
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.telemetry import names
from pdserve.telemetry.metrics import Metrics
from pdserve.text.tokenizer import load_tokenizer
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink
from tests.unit.telemetry.test_metrics import OPEN_METRICS, scrape

BUNDLED = str(Path(pdserve.__file__).parent / "models" / "stdlib-5m")
PROMPT = "a prompt of more than sixteen tokens, read by a prefill worker "


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with running_sink() as sink:
        yield sink


async def test_workers_stay_connected_without_redis(
    connect: Connect, start: Start, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_REDIS", redis.url)
    flags = ("--model=toy", "--heartbeat-s=0.05")
    start("decode_worker", "--worker-id=d0", *flags)
    start("prefill_worker", "--worker-id=p0", *flags)
    front = await connect(redis=redis.url, prefix_lookup_s=1.0)
    await until(lambda: front.num_workers == 2)
    first = await front.client.generate(PROMPT, max_tokens=8, temperature=0)
    assert first.timings.path == "remote"

    async def is_found() -> bool:
        again = await front.client.generate(PROMPT, max_tokens=8, temperature=0)
        assert again.text == first.text
        return again.usage.cached_prompt_tokens > 0 and again.timings.path == "local"

    await until(is_found)  # the index knows where the prefix is
    redis.kill()
    done = await asyncio.gather(
        *(front.client.generate(f"{PROMPT} {number}", max_tokens=8, temperature=0) for number in range(20))
    )
    for number, one in enumerate(done):
        assert one.text.encode() == bytes(answer(list(f"{PROMPT} {number}".encode()), 8))


async def test_the_spans_of_a_request_add_up_to_its_total(
    connect: Connect, decode: Program, prefill: Program, sink: OtlpSink
) -> None:
    front = await connect(decode, prefill, otlp=sink.endpoint)
    done = await front.client.generate(
        PROMPT + "traced", max_tokens=4, temperature=0, session_id="s", priority=-1, reuse_within_s=0
    )
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST)
    [request] = sink.named(names.SPAN_REQUEST)
    model = (await front.client.model()).name
    assert (request.name, request.kind, request.service) == (f"text_completion {model}", "server", "pdserve-router")
    assert not request.is_failed
    expected = {
        names.OPERATION: "text_completion",
        names.PROVIDER: "pdserve",
        names.CONVERSATION_ID: "s",
        names.REQUEST_MODEL: model,
        names.REQUEST_MAX_TOKENS: 4,
        names.REQUEST_TEMPERATURE: 0.0,
        names.RESPONSE_MODEL: model,
        names.RESPONSE_ID: done.request_id,
        names.RESPONSE_FINISH_REASONS: ["length"],
        names.INPUT_TOKENS: len(PROMPT) + 6,
        names.OUTPUT_TOKENS: 4,
        names.REQUEST_ID: done.request_id,
        names.REQUEST_ATTRIBUTES["priority"]: -1,
        names.REQUEST_ATTRIBUTES["reuse_within_s"]: 0.0,
        names.PATH: "remote",
        names.PREFILL_WORKER: "p0",
        names.DECODE_WORKER: "d0",
        names.RPC_STATUS: "OK",
    }
    assert {key: request.attributes.get(key) for key in expected} == expected
    host, _, port = front.server.address.rpartition(":")
    assert (request.attributes[names.SERVER_ADDRESS], request.attributes[names.SERVER_PORT]) == (host, int(port))
    parts = sorted((one for one in sink.spans if one.parent_id == request.span_id), key=lambda one: one.start_ns)
    assert {one.trace_id for one in parts} == {request.trace_id}
    # One follows the other, without a gap: the phases, and the delivery of the last message.
    edges = [request.start_ns, *(one.start_ns for one in parts[1:]), request.end_ns]
    assert [(one.start_ns, one.end_ns) for one in parts] == list(pairwise(edges))
    assert parts[-1].name == names.SPAN_DELIVER
    assert sum(one.duration_s for one in parts[:-1]) == pytest.approx(done.timings.total_s, abs=1e-6)
    for phase, span_name in names.PHASE_SPANS.items():
        spent_s = sum(one.duration_s for one in parts if one.name == span_name)
        assert spent_s == pytest.approx(getattr(done.timings.phases, f"{phase.value}_s"), abs=1e-6)
    by_worker = {one.name: (one.service, one.instance) for one in parts if names.WORKER_ID in one.attributes}
    assert by_worker["pdserve.prefill"] == ("pdserve-prefill", "p0")
    assert by_worker["pdserve.decode"] == ("pdserve-decode", "d0")


async def test_several_answers_are_one_trace(connect: Connect, decode: Program, sink: OtlpSink) -> None:
    front = await connect(decode, otlp=sink.endpoint)
    done = await front.client.generate("hello", n=2, max_tokens=3, ignore_eos=True)
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST)
    [request] = sink.named(names.SPAN_REQUEST)
    assert request.attributes[names.RESPONSE_FINISH_REASONS] == ["length", "length"]
    assert request.attributes[names.OUTPUT_TOKENS] == done.usage.completion_tokens == 6
    assert request.attributes[names.REQUEST_CHOICE_COUNT] == 2
    assert sum(one.name == "pdserve.decode" for one in sink.spans) >= 2


async def test_a_failed_request_marks_its_span_with_the_reason(
    connect: Connect, decode: Program, sink: OtlpSink
) -> None:
    front = await connect(decode, otlp=sink.endpoint, trace_share=0.0)
    await front.client.generate("hello", max_tokens=1)
    with pytest.raises(InvalidRequest):
        await front.client.generate("hello", temperature=-1.0)
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST)
    [request] = sink.named(names.SPAN_REQUEST)  # that of the request that was served is not kept
    assert request.is_failed
    assert request.attributes[names.ERROR_TYPE] == "INVALID_REQUEST"
    assert request.attributes[names.RPC_STATUS] == "INVALID_ARGUMENT"
    [prepare] = sink.named(names.PHASE_SPANS[Phase.PREPARE])
    assert (prepare.parent_id, prepare.start_ns) == (request.span_id, request.start_ns)


async def test_exemplars_link_histograms_to_traces(connect: Connect, decode: Program, sink: OtlpSink) -> None:
    metrics = Metrics("router")
    front = await connect(decode, otlp=sink.endpoint, metrics=metrics)
    await front.client.generate("hello", max_tokens=4, temperature=0)
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST)
    [request] = sink.named(names.SPAN_REQUEST)
    text = await asyncio.to_thread(scrape, metrics.serve(0), OPEN_METRICS)
    metrics.close()
    linked = {line.partition("_bucket")[0] for line in text.splitlines() if request.trace_id in line}
    assert linked == {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "pdserve_queue_seconds",
        "pdserve_tenant_ttft_seconds",
        "pdserve_tpot_seconds",
        "pdserve_ttft_seconds",
    }


async def test_prometheus_gets_requests_errors_and_workers(connect: Connect, decode: Program) -> None:
    metrics = Metrics("router")
    front = await connect(decode, metrics=metrics)
    await front.client.generate("hello", max_tokens=4, temperature=0)
    with pytest.raises(InvalidRequest):
        await front.client.generate("hello", temperature=-1.0)
    await until(lambda: 'pdserve_workers{role="decode"} 1.0' in metrics.text())
    text = metrics.text()
    for line in (
        'pdserve_requests_total{outcome="served"} 1.0',
        'pdserve_request_errors_total{reason="INVALID_REQUEST"} 1.0',
        'pdserve_placements_total{path="local"} 1.0',
        'pdserve_ttft_seconds_count{path="local"} 1.0',
        'pdserve_tpot_seconds_count{path="local"} 1.0',
        "pdserve_output_tokens_total 4.0",
        "pdserve_requests_running 0.0",
    ):
        assert line in text, line


async def test_a_real_models_text_matches_its_tokens(connect: Connect, start: Start) -> None:
    flags = (f"--model={BUNDLED}", "--kv-memory-bytes=32000000", "--threads=1")
    decode = start("decode_worker", "--worker-id=d0", *flags)
    front = await connect(decode, model=BUNDLED)
    tokenizer = load_tokenizer(BUNDLED)
    prompt = "def read(path):\n"
    stream = front.client.stream(prompt, max_tokens=32, temperature=0)
    pieces = [piece async for piece in stream]
    done = stream.completion
    assert "".join(piece.text for piece in pieces) == done.text == tokenizer.decode(done.token_ids)
    assert done.usage.prompt_tokens == len(tokenizer.encode(prompt))
    ids = await front.client.generate(tokenizer.encode(prompt), max_tokens=32, temperature=0)
    assert ids.text == done.text
    chat = await front.client.generate([{"role": "user", "content": "read a file"}], max_tokens=8, temperature=0)
    assert chat.token_ids
    assert (await front.client.model()).has_chat_template
    with pytest.raises(InvalidRequest) as caught:
        await front.client.generate([{"role": "", "content": "x"}])
    assert caught.value.field == "chat.messages[0].role"
