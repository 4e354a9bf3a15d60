"""The SDK's span, where the caller's program uses OpenTelemetry."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve import AsyncClient, Client, Retries, Unavailable

from .conftest import Script, delta, finished, started

QUICK = Retries(first_backoff_s=0.01)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_one_call_is_one_span_whatever_its_retries(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    script.fails(Unavailable("gone"))
    script.says(started("abc"), delta("a", 1), finished())
    with Client(target, retries=QUICK) as client:
        client.generate("hi")
    [span] = spans.get_finished_spans()
    assert span.name == "pdserve.client"
    context = span.get_span_context()
    assert context is not None
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert [metadata["traceparent"] for metadata in script.metadata] == [expected, expected]
    assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET


def test_a_failed_call_marks_its_span(script: Script, target: str, spans: InMemorySpanExporter) -> None:
    script.fails(Unavailable("gone"), started(), delta("a", 1))
    with Client(target) as client, pytest.raises(Unavailable):
        client.generate("hi")
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert (span.status.status_code, span.attributes["error.type"]) == (trace.StatusCode.ERROR, "UNAVAILABLE")


async def test_a_stream_that_is_left_ends_its_span(script: Script, target: str, spans: InMemorySpanExporter) -> None:
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
