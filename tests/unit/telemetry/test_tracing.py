import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields

import pytest

from pdserve.core.errors import ConfigError, NoWorkers
from pdserve.core.results import Phase
from pdserve.core.types import RequestAttributes
from pdserve.telemetry import names
from pdserve.telemetry import tracing as tracing_module
from pdserve.telemetry.trace_context import parse
from pdserve.telemetry.tracing import Service, Tracing, make_tracing
from tests.unit.telemetry.otlp_sink import OtlpSink

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
WAIT_S = 60.0  # the collector of a test may be slow to take spans, because the machine is busy
ROUTER = Service("pdserve-router", "router-0")
QUEUE, PREFILL, TRANSFER_WAIT = (names.PHASE_SPANS[one] for one in (Phase.QUEUE, Phase.PREFILL, Phase.TRANSFER_WAIT))


def call(tracing: Tracing, traceparent: str = "", *, is_slow: bool = False) -> str:
    """The trace id of a call with one part."""
    with tracing.span(names.SPAN_REQUEST, "chat m", traceparent) as span:
        span.add(QUEUE, span.started_s, span.started_s + 0.5)
        if is_slow:
            span.keep()
    return span.trace_id


def test_each_attribute_of_a_request_has_a_name_in_spans() -> None:
    assert list(names.REQUEST_ATTRIBUTES) == [one.name for one in fields(RequestAttributes)]


def test_the_spans_of_a_call_are_one_tree_of_several_services(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint)
    with tracing.span(names.SPAN_REQUEST, "chat m", PARENT) as span:
        span.set({names.REQUEST_ID: "r1"})
        span.set({names.OUTPUT_TOKENS: 7, names.RESPONSE_FINISH_REASONS: ["stop", "length"]})
        at_s = span.started_s
        span.add(QUEUE, at_s, at_s + 0.001)
        span.add(PREFILL, at_s + 0.001, at_s + 0.251, {names.WORKER_ID: "p0"}, Service("pdserve-prefill", "p0"))
        span.ended_s = at_s + 0.251
    tracing.close(WAIT_S)
    [queue], [prefill], [request] = sink.named(QUEUE), sink.named(PREFILL), sink.named(names.SPAN_REQUEST)
    assert {one.trace_id for one in sink.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert request.parent_id == "b7ad6b7169203331"
    assert prefill.parent_id == queue.parent_id == request.span_id == span.traceparent[36:52]
    assert (request.name, request.kind, prefill.kind) == ("chat m", "server", "internal")
    # No gap and no overlap, to the nanosecond.
    assert (queue.start_ns, queue.end_ns, prefill.end_ns) == (request.start_ns, prefill.start_ns, request.end_ns)
    assert prefill.duration_s == pytest.approx(0.25, abs=1e-6)
    assert request.attributes == {
        names.REQUEST_ID: "r1",
        names.OUTPUT_TOKENS: 7,
        names.RESPONSE_FINISH_REASONS: ["stop", "length"],
    }
    assert (request.schema_url, request.instance, prefill.instance) == (names.SCHEMA_URL, "router-0", "p0")
    assert sink.trees() == [
        {
            "key": names.SPAN_REQUEST,
            "service": "pdserve-router",
            "children": [
                {"key": QUEUE, "service": "pdserve-router", "children": []},
                {"key": PREFILL, "service": "pdserve-prefill", "children": []},
            ],
        }
    ]


def test_an_error_marks_the_span_by_its_reason(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint)
    with pytest.raises(NoWorkers), tracing.span(names.SPAN_REQUEST, "raised", PARENT):
        raise NoWorkers("decode")
    with tracing.span(names.SPAN_REQUEST, "failed", PARENT) as span:
        span.fail("KV_LOST")
    tracing.close(WAIT_S)
    assert {(span.name, span.attributes["error.type"], span.is_failed) for span in sink.spans} == {
        ("raised", "NO_WORKERS", True),
        ("failed", "KV_LOST", True),
    }


def test_a_stream_that_its_reader_closes_has_not_failed(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint)
    with contextlib.suppress(asyncio.CancelledError), tracing.span(names.SPAN_REQUEST, "call", PARENT):
        raise asyncio.CancelledError

    def stream():
        with tracing.span(names.SPAN_REQUEST, "stream", PARENT):
            yield 1
            yield 2

    pieces = stream()
    next(pieces)
    pieces.close()
    tracing.close(WAIT_S)
    assert [(span.name, span.is_failed) for span in sink.spans] == [("call", False), ("stream", False)]


def test_a_trace_that_the_caller_does_not_sample_is_passed_through(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint)
    with tracing.span(names.SPAN_REQUEST, "unsampled", UNSAMPLED) as span:
        assert span.traceparent == UNSAMPLED
        span.fail("X")
        assert not span.is_kept
    call(tracing, PARENT)
    tracing.close(WAIT_S)
    assert {span.trace_id for span in sink.spans} == {PARENT[3:35]}


def test_only_notable_traces_are_kept_beyond_the_share(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint, share=0.0)
    dropped = call(tracing)
    slow, arrived = call(tracing, is_slow=True), call(tracing, PARENT)
    with pytest.raises(NoWorkers), tracing.span(names.SPAN_REQUEST, "chat m") as failed:
        raise NoWorkers("decode")
    tracing.close(WAIT_S)
    assert parse(f"00-{dropped}-{'1' * 16}-01") is not None  # other processes may log it
    kept = {span.trace_id: len([one for one in sink.spans if one.trace_id == span.trace_id]) for span in sink.spans}
    assert kept == {slow: 2, arrived: 2, failed.trace_id: 1}
    with pytest.raises(ConfigError, match="trace_share"):
        make_tracing(ROUTER, sink.endpoint, share=1.5)


def test_only_a_kept_trace_becomes_an_exemplar(sink: OtlpSink) -> None:
    tracing = make_tracing(ROUTER, sink.endpoint, share=0.0)
    with tracing.span(names.SPAN_REQUEST, "chat m") as span:
        assert (len(span.trace_id), span.exemplar) == (32, "")
        span.keep()
        assert span.exemplar == span.trace_id
    tracing.close(WAIT_S)


def test_attributes_wait_until_their_trace_is_kept(sink: OtlpSink) -> None:
    tracing, order = make_tracing(ROUTER, sink.endpoint, share=0.0), list[str]()
    with tracing.span(names.SPAN_REQUEST, "dropped") as dropped:
        dropped.set({names.REQUEST_ID: "r0"})
        dropped.when_kept(lambda: order.append("dropped"))
    with tracing.span(names.SPAN_REQUEST, "kept") as kept:
        kept.set({names.REQUEST_ID: "r1"})
        kept.when_kept(lambda: kept.set({names.REQUEST_ID: "r2"}))
        assert (kept.attributes, order) == ({}, [])
        kept.keep()
        assert kept.attributes == {names.REQUEST_ID: "r2"}
        kept.when_kept(lambda: order.append("kept"))
        assert order == ["kept"]
    tracing.close(WAIT_S)
    assert [one.attributes for one in sink.spans] == [{names.REQUEST_ID: "r2"}]
    with Tracing.off().span(names.SPAN_REQUEST, "off") as off:
        off.when_kept(lambda: order.append("off"))
        off.keep()
    assert order == ["kept"]


def test_a_span_that_has_ended_no_longer_changes(sink: OtlpSink) -> None:
    tracing, order = make_tracing(ROUTER, sink.endpoint), list[str]()
    with tracing.span(names.SPAN_REQUEST, "chat m") as span:
        span.set({names.REQUEST_ID: "r1"})
        attributes, part = span.attributes, {names.WORKER_ID: "p0"}
        span.add(PREFILL, span.started_s, span.started_s + 0.5, part)
    # All before the processor encodes the spans.
    span.set({names.REQUEST_ID: "r2"})
    span.fail("LATE")
    span.add(QUEUE, span.started_s, span.started_s + 0.5)
    span.when_kept(lambda: order.append("late"))
    assert (span.attributes, len(span.parts), order) == ({names.REQUEST_ID: "r1"}, 1, [])
    assert span.exemplar == span.trace_id
    attributes[names.REQUEST_ID] = part[names.WORKER_ID] = "changed"
    tracing.close(WAIT_S)
    [request], [prefill] = sink.named(names.SPAN_REQUEST), sink.named(PREFILL)
    assert (request.attributes, prefill.attributes) == ({names.REQUEST_ID: "r1"}, {names.WORKER_ID: "p0"})
    assert len(sink.spans) == 2
    with make_tracing(ROUTER, sink.endpoint, share=0.0).span(names.SPAN_REQUEST, "dropped") as dropped:
        dropped.set({names.REQUEST_ID: "r3"})
    dropped.keep()
    assert (dropped.exemplar, dropped.attributes) == ("", {})


@pytest.mark.parametrize("count_of", ["OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
@pytest.mark.parametrize("length_of", ["OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"])
def test_attributes_have_the_limits_of_the_sdk(
    sink: OtlpSink, monkeypatch: pytest.MonkeyPatch, count_of: str, length_of: str
) -> None:
    monkeypatch.setenv(count_of, "2")
    monkeypatch.setenv(length_of, "3")
    tracing = make_tracing(ROUTER, sink.endpoint)
    given = {names.REQUEST_ID: "long", names.REQUEST_MODEL: "model", names.RESPONSE_FINISH_REASONS: ["length", "stop"]}
    with tracing.span(names.SPAN_REQUEST, "chat m") as span:
        span.set(given)
        part = {names.TRANSFER_S: 1.0, names.TRANSFER_KIND: "shm", names.TRANSFER_REASON: "same host"}
        span.add(TRANSFER_WAIT, span.started_s, span.started_s + 0.5, part)
    tracing.close(WAIT_S)
    [request], [transfer] = sink.named(names.SPAN_REQUEST), sink.named(TRANSFER_WAIT)
    assert request.attributes == {names.REQUEST_MODEL: "mod", names.RESPONSE_FINISH_REASONS: ["len", "sto"]}
    assert transfer.attributes == {names.TRANSFER_KIND: "shm", names.TRANSFER_REASON: "sam"}
    assert request.num_dropped == transfer.num_dropped == 1


def test_disabled_tracing_passes_the_context_through() -> None:
    code = f"""
import sys
from pdserve.telemetry.tracing import Service, Tracing, make_tracing
for tracing in (Tracing.off(), make_tracing(Service("t", "0"), "")):
    assert not tracing.is_on
    with tracing.span("request", "a", {PARENT!r}) as span:
        span.set({{"k": 2}})
        span.add("pdserve.queue", 0.0, 1.0)
        span.fail("X")
        assert (span.traceparent, span.attributes, span.parts) == ({PARENT!r}, {{}}, [])
    tracing.close()
print(any(name.startswith(("opentelemetry", "grpc")) for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_the_extra_tracing_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert not make_tracing(ROUTER, "127.0.0.1:1").is_on
    assert "pdserve[otel]" in caplog.text


def test_closing_does_not_wait_for_a_collector_that_does_not_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, new_threads: Callable[[], list[threading.Thread]]
) -> None:
    monkeypatch.setattr(tracing_module, "EXPORT_TIMEOUT_S", WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never reads
        tracing = make_tracing(ROUTER, f"127.0.0.1:{silent.getsockname()[1]}")
        call(tracing, PARENT)
        tracing.close(timeout_s=0.01)
        assert "spans were lost" in caplog.text  # so the flush still ran
        tracing.close()
        call(tracing, PARENT)
        for flush in [one for one in new_threads() if one.name == "otlp-flush"]:
            flush.join(WAIT_S)
            assert not flush.is_alive()


def test_every_span_has_a_declared_parent() -> None:
    assert all(spec.parent is None or spec.parent in names.SPANS for spec in names.SPANS.values())
    assert {spec.name for spec in names.SPANS.values() if spec.kind != "internal"} == {names.CALL_NAME}
    assert all(spec.name == key for key, spec in names.SPANS.items() if spec.kind == "internal")
    assert (names.call_name("chat", "m"), names.call_name("chat", "")) == ("chat m", "chat")
