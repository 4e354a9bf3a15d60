"""The spans of a router's calls, sent over OTLP. Without an endpoint it does nothing and imports nothing.

A call's spans are collected until the call ends. Only then is it known whether the trace is worth keeping (tail
sampling), so they are sent together or dropped together. All times come from the monotonic clock of this process, and
the wall clock is read once, at the beginning of the call.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self, final

from pdserve.core.access.hosts import NO_HTTP_PROXY, is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.telemetry import names
from pdserve.telemetry.trace_context import AttributeValue, TraceContext, is_in_share, parse, render

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S: Final = 5.0
EXPORT_INTERVAL_S: Final = 0.5
EXPORT_BATCH: Final = 512
QUEUE_SPANS: Final = 8192  # more spans are dropped, so that requests never wait for a collector
MAX_SERVICES: Final = 256  # whose OpenTelemetry resources are kept
_NONE: Final[Mapping[str, AttributeValue]] = {}


class Service(NamedTuple):
    """The process that did the work of a span, as backends show it."""

    name: str
    instance: str


class Part(NamedTuple):
    """A finished span below a call's span. Times are those of the monotonic clock."""

    name: str
    begin_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue]
    service: Service | None  # None: this process


class OpenSpan:
    """The span of a running call, and the finished ones below it.

    `traceparent` is the parent for other processes. `is_kept` becomes True if the trace turns out to be worth keeping.
    """

    __slots__ = ("attributes", "ended_s", "is_kept", "is_recording", "parts", "started_s", "traceparent")

    def __init__(self, traceparent: str = "", *, is_recording: bool = False, is_kept: bool = False) -> None:
        self.traceparent = traceparent
        self.is_recording, self.is_kept = is_recording, is_kept
        self.started_s = time.monotonic()
        self.ended_s: float | None = None  # None: when its block ends
        self.attributes: dict[str, Any] = {}
        self.parts: list[Part] = []

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty if the call has no trace."""
        return self.traceparent[3:35]

    @property
    def exemplar(self) -> str:
        """The trace id, if the trace will be found in a backend."""
        return self.trace_id if self.is_kept else ""

    def set(self, attributes: Mapping[str, AttributeValue | list[str]]) -> None:
        if self.is_recording:
            self.attributes.update(attributes)

    def keep(self) -> None:
        self.is_kept = self.is_recording

    def fail(self, error_type: str) -> None:
        """Marks the span as failed; `error_type` is a PdserveError's reason or an exception's name."""
        self.set({names.ERROR_TYPE: error_type})
        self.keep()

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue] = _NONE,
        service: Service | None = None,
    ) -> None:
        """A finished span below this one."""
        if self.is_recording:
            self.parts.append(Part(name, begin_s, end_s, attributes, service))


@final
class Tracing:
    """Exports spans. Never blocks on the network."""

    def __init__(self, service: Service, exporter: Any = None, processor: Any = None, share: float = 1.0) -> None:
        self._service, self._exporter, self._processor, self.share = service, exporter, processor, share
        self._tracer_of = functools.lru_cache(MAX_SERVICES)(self._make_tracer)

    @classmethod
    def off(cls) -> Self:
        return cls(Service("", ""))

    @property
    def is_on(self) -> bool:
        return self._processor is not None

    @contextmanager
    def span(self, key: str, name: str, traceparent: str = "") -> Iterator[OpenSpan]:
        """A span over the block, under `traceparent` or a new root; an exception marks it as failed.

        `key` is that of names.SPANS. If tracing is off, or the caller has not sampled its trace, the caller's
        traceparent is passed through.
        """
        parent = parse(traceparent)
        if not self.is_on or (parent is not None and not parent.is_sampled):
            yield OpenSpan(traceparent)
            return
        began_ns = time.time_ns()
        span = self._tracer_of(self._service).start_span(
            name, context=_context(parent), kind=_kind(key), start_time=began_ns
        )
        context = span.get_span_context()
        opened = OpenSpan(
            render(TraceContext(context.trace_id, context.span_id, is_sampled=True)),
            is_recording=True,
            is_kept=parent is not None or is_in_share(context.trace_id, self.share),
        )
        try:
            yield opened
        except (GeneratorExit, asyncio.CancelledError):  # the reader has stopped, which is not a failure
            raise
        except BaseException as error:
            opened.fail(str(getattr(error, "reason", type(error).__name__)))
            raise
        finally:
            self._end(span, opened, began_ns)

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends queued spans, for at most `timeout_s`. Idempotent."""
        processor, exporter = self._processor, self._exporter
        self._processor = self._exporter = None
        if processor is None:
            return
        # The SDK's flush has no time limit, so it runs on a daemon thread for which this waits at most `timeout_s`.
        flusher = threading.Thread(target=processor.shutdown, name="otlp-flush", daemon=True)
        flusher.start()
        flusher.join(timeout_s)
        if flusher.is_alive():
            log.warning("spans were lost: the collector did not take them in time", extra={"timeout_s": timeout_s})
            exporter.shutdown()

    def _end(self, span: Any, opened: OpenSpan, began_ns: int) -> None:
        if not opened.is_kept or not self.is_on:
            return  # a span of the SDK that never ends is never exported
        ended_s = time.monotonic() if opened.ended_s is None else opened.ended_s

        def at_ns(at_s: float) -> int:
            return began_ns + round((at_s - opened.started_s) * 1e9)

        below = _api().set_span_in_context(span, _empty_context())
        for part in opened.parts:
            self._tracer_of(part.service or self._service).start_span(
                part.name,
                context=below,
                kind=_kind(part.name),
                attributes=part.attributes,
                start_time=at_ns(part.begin_s),
            ).end(at_ns(part.end_s))
        span.set_attributes(opened.attributes)
        if names.ERROR_TYPE in opened.attributes:
            span.set_status(_api().StatusCode.ERROR)
        span.end(at_ns(ended_s))

    def _make_tracer(self, service: Service) -> Any:
        sdk = _otel("sdk.trace")
        sampling = _otel("sdk.trace.sampling")
        resources = _otel("sdk.resources")
        attributes = {"service.name": service.name, "service.instance.id": service.instance}
        provider = sdk.TracerProvider(
            resource=resources.Resource.create(attributes, names.SCHEMA_URL),
            sampler=sampling.ALWAYS_ON,  # is_kept decides
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        return provider.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL)


def make_tracing(service: Service, otlp_endpoint: str, *, share: float = 1.0) -> Tracing:
    """Tracing to an OTLP gRPC endpoint (HOST:PORT or http(s)://HOST:PORT); empty turns it off.

    `share` is the part of the traces that is kept of those that begin here and have no reason to be kept.
    """
    if not otlp_endpoint:
        return Tracing.off()
    if not 0.0 <= share <= 1.0:
        raise ConfigError("trace_share", share, "between 0 and 1")
    try:
        exporters = _otel("exporter.otlp.proto.grpc.trace_exporter")
        export = _otel("sdk.trace.export")
    except ImportError as error:
        log.warning("no traces: install pdserve[otel]", extra={"missing": error.name, "otlp": otlp_endpoint})
        return Tracing.off()
    host = otlp_endpoint.rpartition("://")[2].rpartition(":")[0]
    exporter = exporters.OTLPSpanExporter(
        endpoint=otlp_endpoint,
        insecure=not otlp_endpoint.startswith("https://"),
        timeout=EXPORT_TIMEOUT_S,
        channel_options=(NO_HTTP_PROXY,) if is_loopback_host(host) else None,
    )
    processor = export.BatchSpanProcessor(
        exporter,
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=EXPORT_INTERVAL_S * 1e3,
        max_export_batch_size=EXPORT_BATCH,
    )
    return Tracing(service, exporter, processor, share)


def _otel(name: str) -> Any:
    """A module of OpenTelemetry, by its name: the extra `otel` is optional, and the light client imports this file."""
    return importlib.import_module(f"opentelemetry.{name}")


@functools.cache
def _api() -> Any:
    return _otel("trace")


@functools.cache
def _empty_context() -> Any:
    return _otel("context").Context()


@functools.cache
def _kind(key: str) -> Any:
    return _api().SpanKind[names.SPANS[key].kind.upper()]


def _context(parent: TraceContext | None) -> Any:
    # An empty context instead of the current one: the given parent is a span's only parent.
    empty = _empty_context()
    if parent is None:
        return empty
    otel = _api()
    remote = otel.SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED)
    )
    return otel.set_span_in_context(otel.NonRecordingSpan(remote), empty)
