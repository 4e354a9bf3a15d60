"""What stands beside a router: Redis, the trace, Prometheus, and a real model's text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdserve
from pdserve.core.errors import InvalidRequest
from pdserve.core.phases import Phase
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.telemetry import names
from pdserve.telemetry.metrics import Metrics
from pdserve.text.tokenizer import load_tokenizer
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink

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


async def test_workers_are_found_in_the_registry_and_stay_when_redis_dies(
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


async def test_a_request_is_one_span_with_its_parts_below(
    connect: Connect, decode: Program, prefill: Program, sink: OtlpSink
) -> None:
    front = await connect(decode, prefill, otlp=sink.endpoint)
    done = await front.client.generate(PROMPT + "traced", max_tokens=4, temperature=0)
    # Not TRANSFER_WAIT: it has no length where the KV was there before the first token.
    phases = (Phase.PREPARE, Phase.PREFIX_LOOKUP, Phase.RESERVE)
    parts = (*(names.PHASE_SPANS[one] for one in phases), names.SPAN_DELIVER)
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST, *parts)
    [request] = sink.named(names.SPAN_REQUEST)
    assert request.kind == "server"
    assert not request.is_failed
    expected = {
        names.REQUEST_ID: done.request_id,
        names.PATH: "remote",
        names.PREFILL_WORKER: "p0",
        names.DECODE_WORKER: "d0",
        names.INPUT_TOKENS: len(PROMPT) + 6,
        names.OUTPUT_TOKENS: 4,
        names.RESPONSE_FINISH_REASONS: ["length"],
        names.RPC_STATUS: "OK",
        names.PROVIDER: "pdserve",
        names.REQUEST_MODEL: (await front.client.model()).name,
        names.RESPONSE_MODEL: (await front.client.model()).name,
    }
    assert {key: request.attributes.get(key) for key in expected} == expected
    for part in parts:
        [span] = sink.named(part)
        assert (span.trace_id, span.parent_id) == (request.trace_id, request.span_id)


async def test_a_failed_request_marks_its_span_with_the_reason(
    connect: Connect, decode: Program, sink: OtlpSink
) -> None:
    front = await connect(decode, otlp=sink.endpoint)
    with pytest.raises(InvalidRequest):
        await front.client.generate("hello", temperature=-1.0)
    await asyncio.to_thread(sink.wait_for, names.SPAN_REQUEST)
    [request] = sink.named(names.SPAN_REQUEST)
    assert request.is_failed
    assert request.attributes[names.ERROR_TYPE] == "INVALID_REQUEST"
    assert request.attributes[names.RPC_STATUS] == "INVALID_ARGUMENT"


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


async def test_a_real_models_text_is_that_of_its_tokens(connect: Connect, start: Start) -> None:
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
    assert caught.value.field == "chat.messages.role"
