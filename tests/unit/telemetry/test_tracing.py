import subprocess
import sys
import threading
import time
from dataclasses import fields

import pytest

from pdserve.core.errors import ConfigError, NoWorkers
from pdserve.core.phases import Phase
from pdserve.core.types import RequestAttributes
from pdserve.telemetry import names
from pdserve.telemetry.propagate import parse
from pdserve.telemetry.tracing import make_tracing
from tests.unit.telemetry.otlp_sink import OtlpSink

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"


def test_each_attribute_of_a_request_has_a_name_in_spans() -> None:
    assert list(names.REQUEST_ATTRIBUTES) == [one.name for one in fields(RequestAttributes)]


def test_spans_of_one_request_make_one_tree(sink: OtlpSink) -> None:
    router = make_tracing("router", sink.endpoint, {"service.instance.id": "router-0"})
    worker = make_tracing("worker", sink.endpoint)
    with router.span(names.SPAN_REQUEST, PARENT, {names.REQUEST_ID: "r1"}) as span:
        span.set(names.OUTPUT_TOKENS, 7)
        span.set(names.RESPONSE_FINISH_REASONS, "stop")
        router.record(names.PHASE_SPANS[Phase.QUEUE], span.traceparent, 0.001)
        worker.record(
            names.PHASE_SPANS[Phase.PREFILL], span.traceparent, 0.25, {names.WORKER_ID: "p0"}, end_unix_ns=2_000_000_000
        )
    worker.close()
    router.close()
    queue, request = sink.named(names.PHASE_SPANS[Phase.QUEUE])[0], sink.named(names.SPAN_REQUEST)[0]
    prefill = sink.named(names.PHASE_SPANS[Phase.PREFILL])[0]
    assert {span.trace_id for span in sink.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert request.parent_id == "b7ad6b7169203331"
    assert prefill.parent_id == queue.parent_id == request.span_id
    assert (request.kind, prefill.kind) == ("server", "internal")
    assert (prefill.start_ns, prefill.end_ns) == (1_750_000_000, 2_000_000_000)
    assert request.attributes == {
        names.REQUEST_ID: "r1",
        names.OUTPUT_TOKENS: 7,
        names.RESPONSE_FINISH_REASONS: ["stop"],
    }
    assert request.schema_url == names.SCHEMA_URL
    assert sink.trees() == [
        {
            "name": names.SPAN_REQUEST,
            "service": "router",
            "children": [
                {"name": names.PHASE_SPANS[Phase.PREFILL], "service": "worker", "children": []},
                {"name": names.PHASE_SPANS[Phase.QUEUE], "service": "router", "children": []},
            ],
        }
    ]


def test_an_error_marks_the_span_by_its_reason(sink: OtlpSink) -> None:
    tracing = make_tracing("t", sink.endpoint)
    with pytest.raises(NoWorkers), tracing.span("broken", PARENT):
        raise NoWorkers("decode")
    tracing.record("failed", PARENT, 0.1, {names.ERROR_TYPE: "KV_LOST"})
    tracing.close()
    assert {(span.name, span.attributes["error.type"], span.is_failed) for span in sink.spans} == {
        ("broken", "NO_WORKERS", True),
        ("failed", "KV_LOST", True),
    }


def test_a_stream_that_its_reader_closes_has_not_failed(sink: OtlpSink) -> None:
    tracing = make_tracing("t", sink.endpoint)

    def stream():
        with tracing.span("stream", PARENT):
            yield 1
            yield 2

    pieces = stream()
    next(pieces)
    pieces.close()
    tracing.close()
    assert [(span.name, span.is_failed) for span in sink.spans] == [("stream", False)]


def test_without_a_sampled_parent_nothing_is_recorded(sink: OtlpSink) -> None:
    tracing = make_tracing("t", sink.endpoint)
    for traceparent in ("", "nonsense", UNSAMPLED):
        tracing.record("orphan", traceparent, 0.1)
    with tracing.span("unsampled", UNSAMPLED) as span:
        context = parse(span.traceparent)
        assert context is not None
        assert not context.is_sampled
    tracing.record("kept", PARENT, 0.1)
    tracing.close()
    assert [span.name for span in sink.spans] == ["kept"]


def test_the_ratio_chooses_among_traces_that_begin_here(sink: OtlpSink) -> None:
    tracing = make_tracing("t", sink.endpoint, sample_ratio=0.0)
    with tracing.span("root") as root:
        assert parse(root.traceparent) is not None
        tracing.record("child", root.traceparent, 0.1)
    with tracing.span("arrived", PARENT):
        pass
    tracing.close()
    assert [span.name for span in sink.spans] == ["arrived"]
    with pytest.raises(ConfigError, match="sample_ratio"):
        make_tracing("t", sink.endpoint, sample_ratio=1.5)


def test_off_passes_the_context_through_and_imports_nothing() -> None:
    code = f"""
import sys
from pdserve.telemetry.tracing import Tracing, make_tracing
for tracing in (Tracing.off(), make_tracing("t", "")):
    assert not tracing.is_on
    with tracing.span("a", {PARENT!r}, {{"k": 1}}) as span:
        span.set("k", 2)
        span.fail("X")
        assert span.traceparent == {PARENT!r}
    tracing.record("b", {PARENT!r}, 1.0)
    tracing.close()
print(any(name.startswith(("opentelemetry", "grpc")) for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_process_without_the_extra_goes_on_and_says_so(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert not make_tracing("t", "127.0.0.1:1").is_on
    assert "pdserve[otel]" in caplog.text


def test_closing_is_bounded_without_a_collector() -> None:
    tracing = make_tracing("t", "127.0.0.1:9")
    tracing.record("lost", PARENT, 0.1)
    began_s = time.monotonic()
    tracing.close(timeout_s=0.5)
    assert time.monotonic() - began_s < 4.0  # an export tries for five
    tracing.close()
    tracing.record("after the end", PARENT, 0.1)


def test_spans_are_taken_from_any_thread(sink: OtlpSink) -> None:
    tracing = make_tracing("t", sink.endpoint)
    threads = [
        threading.Thread(target=lambda: [tracing.record("s", PARENT, 0.01) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracing.close()
    assert len(sink.spans) == 800


def test_every_span_hangs_under_one_that_is_declared() -> None:
    assert all(spec.parent is None or spec.parent in names.SPANS for spec in names.SPANS.values())
    assert {spec.name: spec for spec in names.SPANS.values()} == names.SPANS
