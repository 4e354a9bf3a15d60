"""Spans of this process, sent over OTLP. Without an endpoint it does nothing and imports nothing.

The process that did the work measures a span's duration by its monotonic clock; only the end comes from the wall clock.
So no duration mixes the clocks of two hosts.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self, final

from pdserve.core.errors import ConfigError
from pdserve.telemetry import names
from pdserve.telemetry.propagate import AttributeValue, TraceContext, as_otel, parse, render

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 5.0
EXPORT_INTERVAL_S: Final = 0.5
EXPORT_BATCH: Final = 512
QUEUE_SPANS: Final = 8192  # more spans are dropped, so that requests never wait for a collector
_NONE: Final[Mapping[str, AttributeValue]] = {}


class OpenSpan:
    """A running span. `traceparent` is the parent for its children and for other processes."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def without_attributes(self) -> Self:
        """For work under the same span that must not overwrite its attributes."""
        return type(self)(None, self.traceparent)

    def set(self, key: str, value: AttributeValue) -> None:
        if self._span is not None:
            self._span.set_attributes(as_otel({key: value}))

    def fail(self, error_type: str) -> None:
        """Marks the span as failed; `error_type` is a PdserveError's reason or an exception's name."""
        self.set(names.ERROR_TYPE, error_type)
        if self._span is not None:
            self._span.set_status(_error_status())


@final
class Tracing:
    """Records the spans of a process. Thread-safe; never blocks on the network."""

    __slots__ = ("_exporter", "_provider", "_tracer")

    def __init__(self, tracer: Any = None, provider: Any = None, exporter: Any = None) -> None:
        self._tracer, self._provider, self._exporter = tracer, provider, exporter

    @classmethod
    def off(cls) -> Self:
        return cls()

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def record(
        self,
        name: str,
        traceparent: str,
        duration_s: float,
        attributes: Mapping[str, AttributeValue] = _NONE,
        end_unix_ns: int | None = None,
    ) -> None:
        """Records a finished span under `traceparent`, which ended at `end_unix_ns` (None: now).

        Without a sampled parent it is dropped, because a worker's span alone explains no request.
        """
        tracer = self._tracer
        if tracer is None:
            return
        parent = parse(traceparent)
        if parent is None or not parent.is_sampled:
            return
        end_ns = time.time_ns() if end_unix_ns is None else end_unix_ns
        span = _start(tracer, name, parent, attributes, end_ns - int(max(0.0, duration_s) * 1e9))
        if names.ERROR_TYPE in attributes:
            span.set_status(_error_status())
        span.end(end_ns)

    @contextmanager
    def span(
        self, name: str, traceparent: str = "", attributes: Mapping[str, AttributeValue] = _NONE
    ) -> Iterator[OpenSpan]:
        """A span over the block, under `traceparent` or a new root; an exception marks it as failed.

        Never made the current context, because the block may be a generator that is closed in another one. If tracing
        is off, the caller's traceparent is passed through.
        """
        tracer = self._tracer
        if tracer is None:
            yield OpenSpan(None, traceparent)
            return
        started_ns, started_s = time.time_ns(), time.monotonic()
        span = _start(tracer, name, parse(traceparent), attributes, started_ns)
        context = span.get_span_context()
        opened = OpenSpan(span, render(TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled)))
        try:
            yield opened
        except GeneratorExit:  # the reader has stopped, which is not a failure
            raise
        except BaseException as error:
            opened.fail(str(getattr(error, "reason", type(error).__name__)))
            raise
        finally:
            span.end(started_ns + int((time.monotonic() - started_s) * 1e9))

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends queued spans, for at most `timeout_s`. Idempotent."""
        provider, exporter = self._provider, self._exporter
        self._tracer = self._provider = self._exporter = None
        if provider is None:
            return
        # The SDK's flush has no time limit, so it runs on a daemon thread for which this waits at most `timeout_s`.
        flusher = threading.Thread(target=provider.shutdown, name="otlp-flush", daemon=True)
        flusher.start()
        flusher.join(timeout_s)
        if flusher.is_alive():
            log.warning("spans were lost: the collector did not take them in time", extra={"timeout_s": timeout_s})
            exporter.shutdown()


def make_tracing(
    service_name: str,
    otlp_endpoint: str,
    attributes: Mapping[str, AttributeValue] = _NONE,
    *,
    sample_ratio: float = 1.0,
) -> Tracing:
    """Tracing to an OTLP gRPC endpoint (HOST:PORT or http(s)://HOST:PORT); empty turns it off.

    `attributes` describe the process. `sample_ratio` is the share of sampled traces among those that begin here; for
    others the caller's choice applies.
    """
    if not otlp_endpoint:
        return Tracing.off()
    if not 0.0 <= sample_ratio <= 1.0:
        raise ConfigError("sample_ratio", sample_ratio, "between 0 and 1")
    try:
        exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        log.warning("no traces: install pdserve[otel]", extra={"missing": error.name, "otlp": otlp_endpoint})
        return Tracing.off()
    exporter = exporters.OTLPSpanExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=EXPORT_TIMEOUT_S,
    )
    provider = sdk.TracerProvider(
        resource=resources.Resource.create({"service.name": service_name, **attributes}, names.SCHEMA_URL),
        sampler=sampling.ParentBased(sampling.TraceIdRatioBased(sample_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        export.BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_S * 1e3,
            max_export_batch_size=EXPORT_BATCH,
        )
    )
    return Tracing(provider.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL), provider, exporter)


def _start(
    tracer: Any, name: str, parent: TraceContext | None, attributes: Mapping[str, AttributeValue], start_ns: int
) -> Any:
    spec = names.SPANS.get(name)
    kind = _otel().SpanKind[spec.kind.upper()] if spec else _otel().SpanKind.INTERNAL
    return tracer.start_span(
        name, context=_context(parent), kind=kind, attributes=as_otel(attributes), start_time=start_ns
    )


@functools.cache
def _otel() -> Any:
    return importlib.import_module("opentelemetry.trace")


@functools.cache
def _empty_context() -> Any:
    return importlib.import_module("opentelemetry.context").Context()


def _error_status() -> Any:
    otel = _otel()
    return otel.Status(otel.StatusCode.ERROR)


def _context(parent: TraceContext | None) -> Any:
    # An empty context instead of the current one: the given parent is a span's only parent.
    empty = _empty_context()
    if parent is None:
        return empty
    otel = _otel()
    flags = otel.TraceFlags(otel.TraceFlags.SAMPLED if parent.is_sampled else otel.TraceFlags.DEFAULT)
    remote = otel.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return otel.set_span_in_context(otel.NonRecordingSpan(remote), empty)
