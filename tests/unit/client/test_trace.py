"""The SDK's span and metrics, if the caller's program uses OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve import AsyncClient, Client, Retries, Unavailable
from pdserve.telemetry import names, trace_context
from pdserve.v1 import inference_pb2

from .conftest import Script, delta, finished, started

QUICK = Retries(first_backoff_s=0.01)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics._internal, "get_meter_provider", lambda: provider)  # type: ignore[attr-defined]
    trace_context._instruments.cache_clear()
    yield reader
    trace_context._instruments.cache_clear()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    [scope] = data.resource_metrics[0].scope_metrics
    return {one.name: list(one.data.data_points) for one in scope.metrics}


def test_one_call_is_one_span_whatever_its_retries(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    script.fails(Unavailable("gone"))
    script.says(started("abc"), delta("a", 1), finished())
    with Client(target, retries=QUICK) as client:
        client.generate("hi")
    [span] = spans.get_finished_spans()
    assert span.name == "text_completion"  # this server does not name its model
    context = span.get_span_context()
    assert context is not None
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert [metadata["traceparent"] for metadata in script.metadata] == [expected, expected]
    assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET


def test_a_call_says_what_it_asked_for_and_got(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=1, cached_prompt_tokens=2)
    script.says(started("abc", model="m"), delta("a", 1), finished(usage=usage))
    with Client(target) as client:
        options = {"temperature": 0.7, "top_k": 5, "seed": 7, "session_id": "s"}
        client.generate([{"role": "user", "content": "secret"}], max_tokens=9, stop="secret", **options)
    [span] = spans.get_finished_spans()
    host, _, port = target.rpartition(":")
    assert span.name == "chat m"
    assert dict(span.attributes or {}) == {
        names.OPERATION: "chat",
        names.PROVIDER: "pdserve",
        names.CONVERSATION_ID: "s",
        names.REQUEST_MODEL: "m",
        names.REQUEST_MAX_TOKENS: 9,
        names.REQUEST_TEMPERATURE: 0.7,
        names.REQUEST_TOP_K: 5.0,
        names.REQUEST_SEED: 7,
        names.RESPONSE_ID: "abc",
        names.RESPONSE_MODEL: "m",
        names.RESPONSE_FINISH_REASONS: ("length",),
        names.INPUT_TOKENS: 3,
        names.OUTPUT_TOKENS: 1,
        names.CACHED_TOKENS: 2,
        names.SERVER_ADDRESS: host,
        names.SERVER_PORT: int(port),
    }


def test_a_stream_is_measured(
    script: Script, target: str, spans: InMemorySpanExporter, measured: InMemoryMetricReader
) -> None:
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    script.says(started(model="m"), delta("a", 1), delta("b", 2), finished(usage=usage))
    with Client(target) as client:
        assert len(list(client.stream("hi"))) == 2
    found, [span] = points(measured), spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes[names.REQUEST_STREAM] is True
    assert float(span.attributes[names.RESPONSE_TTFC_S]) > 0.0  # type: ignore[arg-type]
    assert {name: sum(one.count for one in data) for name, data in found.items()} == {
        trace_context.DURATION: 1,
        trace_context.TIME_TO_FIRST_CHUNK: 1,
        trace_context.TIME_PER_CHUNK: 1,
        trace_context.TOKEN_USAGE: 2,
    }
    host, _, port = target.rpartition(":")
    labels = {
        names.OPERATION: "text_completion",
        names.PROVIDER: "pdserve",
        names.REQUEST_MODEL: "m",
        names.RESPONSE_MODEL: "m",
        names.SERVER_ADDRESS: host,
        names.SERVER_PORT: int(port),
    }
    for name, data in found.items():
        kinds = {"input": 3, "output": 2} if name == trace_context.TOKEN_USAGE else {None: None}
        assert {one.attributes.get(trace_context.TOKEN_TYPE) for one in data} == set(kinds)
        for one in data:
            assert tuple(one.explicit_bounds) == trace_context.BUCKETS[name]
            assert {key: value for key, value in one.attributes.items() if key != trace_context.TOKEN_TYPE} == labels
            [exemplar] = one.exemplars
            assert exemplar.trace_id == span.get_span_context().trace_id  # type: ignore[union-attr]


def test_a_failed_call_is_measured_with_its_reason(script: Script, target: str, measured: InMemoryMetricReader) -> None:
    script.fails(Unavailable("gone"), started(), delta("a", 1))
    with Client(target) as client, pytest.raises(Unavailable):
        client.generate("hi")
    [[one]] = points(measured).values()
    assert one.attributes[names.ERROR_TYPE] == "UNAVAILABLE"


def test_a_failed_call_marks_its_span(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    script.fails(Unavailable("gone"), started(), delta("a", 1))
    with Client(target) as client, pytest.raises(Unavailable):
        client.generate("hi")
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert (span.status.status_code, span.attributes["error.type"]) == (trace.StatusCode.ERROR, "UNAVAILABLE")


async def test_an_abandoned_stream_ends_its_span(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    script.hangs(started(), delta("a", 1))
    async with AsyncClient(target) as client:
        async with client.stream("hi") as stream:
            await anext(stream)
        [span] = spans.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_caller_without_a_tracer_sends_no_context(script: Script, target: str) -> None:
    with Client(target) as client:
        client.model()
    assert "traceparent" not in script.metadata[0]


def test_the_trace_context_of_a_caller_without_a_tracer_is_passed_on(script: Script, target: str) -> None:
    script.says(started(), delta("a", 1), finished())
    given = f"00-{'a' * 32}-{'b' * 16}-01"
    with Client(target) as client:
        client.generate("hi", traceparent=given)
    assert script.metadata[0]["traceparent"] == given
