"""An OTLP gRPC collector inside the test: keeps every span that it is sent, and draws them as a tree."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from pdserve.telemetry.names import SPAN_CLIENT, SPAN_REQUEST, SPANS


@dataclass(frozen=True, slots=True)
class SeenSpan:
    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str  # empty for a root
    kind: str  # client, server or internal
    start_ns: int
    end_ns: int
    is_failed: bool
    attributes: dict[str, Any]
    num_dropped: int  # attributes beyond the limit
    schema_url: str

    @property
    def key(self) -> str:
        """Of names.SPANS: the spans of a call are named after its operation and model."""
        return {"client": SPAN_CLIENT, "server": SPAN_REQUEST}.get(self.kind, self.name)

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class OtlpSink:
    endpoint: str = ""  # value for --otlp
    refuses: bool = False  # answers UNAVAILABLE, as a collector that is starting does
    _spans: list[SeenSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def spans(self) -> list[SeenSpan]:
        with self._changed:
            return list(self._spans)

    def named(self, key: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.key == key]

    def wait(self, holds: Callable[[list[SeenSpan]], bool], deadline_s: float = 60.0) -> list[SeenSpan]:
        """The spans, as soon as they satisfy `holds`."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while not holds(self._spans):
                left_s = end_s - time.monotonic()
                assert left_s > 0, f"these came in time: {sorted(span.name for span in self._spans)}"
                self._changed.wait(left_s)
            return list(self._spans)

    def wait_for(self, *keys: str, deadline_s: float = 60.0) -> list[SeenSpan]:
        """The spans, as soon as one of each key is among them."""
        return self.wait(lambda spans: set(keys) <= {span.key for span in spans}, deadline_s)

    def trees(self) -> list[dict[str, Any]]:
        """One nested dictionary per root: {"key": ..., "service": ..., "children": [...]}, children by start."""
        spans = self.spans
        known = {span.span_id for span in spans}
        return [_tree(span, spans) for span in spans if span.parent_id not in known]

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans.extend(_seen(request))
            self._changed.notify_all()


def _tree(span: SeenSpan, spans: list[SeenSpan]) -> dict[str, Any]:
    children = sorted((one for one in spans if one.parent_id == span.span_id), key=lambda one: one.start_ns)
    return {"key": span.key, "service": span.service, "children": [_tree(one, spans) for one in children]}


def _seen(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for resource in request.resource_spans:
        process = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    name=span.name,
                    service=process.get("service.name", ""),
                    instance=process.get("service.instance.id", ""),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    is_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    attributes=_attributes(span.attributes),
                    num_dropped=span.dropped_attributes_count,
                    schema_url=scope.schema_url,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class _Service(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    def Export(self, request: Any, context: Any) -> Any:
        if self._sink.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        self._sink.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def running_sink() -> Iterator[OtlpSink]:
    """A sink on a free port of loopback, for a fixture or a with statement.

    At the end, it fails for a span with an attribute that names.SPANS does not list.
    """
    sink = OtlpSink()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Service(sink), server)
    sink.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink
    finally:
        server.stop(grace=0.2).wait()
    for span in sink.spans:
        if span.key in SPANS:
            assert set(span.attributes) <= set(SPANS[span.key].attributes), span
