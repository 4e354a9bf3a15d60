"""The spans of a router's calls, sent over OTLP. Without an endpoint it does nothing and imports nothing.

A call's spans are collected until the call ends. Only then is it known whether the trace is worth keeping (tail
sampling), so they are sent together or dropped together. Until a trace is known to be kept, its spans are not built:
what they will have is noted only. All times come from the monotonic clock of this process, and the wall clock is read
once, at the beginning of the call.

Spans are passed to OpenTelemetry's processor when they have ended, with the ids that this file has drawn. A tracer
would build a span with locks and limits at the beginning of each call, before it is known whether anybody reads it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
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
    """The span of a running call, and the finished ones below it. It is the context manager of its call: an exception
    marks the span as failed.

    `traceparent` is the parent for other processes. `is_kept` becomes True if the trace turns out to be worth keeping.
    After its end, a span no longer changes.
    """

    __slots__ = (
        "_on_end", "_waiting", "attributes", "ended_s", "is_kept", "is_recording", "parts", "started_s", "traceparent",
    )  # fmt: skip

    def __init__(
        self, traceparent: str = "", *, on_end: Callable[[OpenSpan], None] | None = None, is_kept: bool = False
    ) -> None:
        """Without `on_end`, nothing is recorded."""
        self.traceparent = traceparent
        self.is_recording, self.is_kept = on_end is not None, is_kept
        self.started_s = time.monotonic()
        self.ended_s: float | None = None  # None: when its block ends
        self.attributes: dict[str, Any] = {}
        self.parts: list[Part] = []
        self._on_end = on_end
        self._waiting: list[Callable[[], None]] = []  # until the trace is kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._on_end is None:
            return
        # A reader that has stopped is not a failure.
        if error is not None and not isinstance(error, GeneratorExit | asyncio.CancelledError):
            self.fail(str(getattr(error, "reason", type(error).__name__)))
        self._on_end(self)
        self.is_recording = False
        self._waiting.clear()

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
            self.when_kept(partial(self.attributes.update, attributes))

    def when_kept(self, record: Callable[[], None]) -> None:
        """Calls `record` now or when the trace is kept, in the order of the calls; never if it is dropped or has
        ended."""
        if not self.is_recording:
            return
        if self.is_kept:
            record()
        else:
            self._waiting.append(record)

    def keep(self) -> None:
        if self.is_recording and not self.is_kept:
            self.is_kept = True
            for record in self._waiting:
                record()
            self._waiting.clear()

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

    def __init__(
        self,
        service: Service,
        exporter: Any = None,
        processor: Any = None,
        share: float = 1.0,
        limited: Callable[[Mapping[str, Any]], Any] = dict,
    ) -> None:
        """`limited` copies the attributes of a span, and cuts them to the limits."""
        self._service, self._exporter, self._processor, self.share = service, exporter, processor, share
        self._limited = limited
        self._resource_of = functools.lru_cache(MAX_SERVICES)(_resource_of)

    @classmethod
    def off(cls) -> Self:
        return cls(Service("", ""))

    @property
    def is_on(self) -> bool:
        return self._processor is not None

    def span(self, key: str, name: str, traceparent: str = "") -> OpenSpan:
        """A span over a block, under `traceparent` or a new root.

        `key` is that of names.SPANS. If tracing is off, or the caller has not sampled its trace, the caller's
        traceparent is passed through.
        """
        if not self.is_on:
            return OpenSpan(traceparent)
        parent = parse(traceparent)
        if parent is not None and not parent.is_sampled:
            return OpenSpan(traceparent)
        trace_id = _random_id(128) if parent is None else parent.trace_id
        own = TraceContext(trace_id, _random_id(64), is_sampled=True)
        return OpenSpan(
            render(own),
            on_end=partial(self._end, key, name, own, parent, time.time_ns()),
            is_kept=parent is not None or is_in_share(trace_id, self.share),
        )

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

    def _end(
        self, key: str, name: str, own: TraceContext, parent: TraceContext | None, began_ns: int, opened: OpenSpan
    ) -> None:
        processor = self._processor
        if not opened.is_kept or processor is None:
            return
        ended_s = time.monotonic() if opened.ended_s is None else opened.ended_s

        def at_ns(at_s: float) -> int:
            return began_ns + round((at_s - opened.started_s) * 1e9)

        below = _context(own)
        for part in opened.parts:
            self._send(
                processor,
                part.service or self._service,
                name=part.name,
                context=_context(TraceContext(own.trace_id, _random_id(64), is_sampled=True)),
                parent=below,
                kind=_kind(part.name),
                attributes=part.attributes,
                start_time=at_ns(part.begin_s),
                end_time=at_ns(part.end_s),
            )
        has_failed = names.ERROR_TYPE in opened.attributes
        self._send(
            processor,
            self._service,
            name=name,
            context=below,
            parent=None if parent is None else _context(parent, is_remote=True),
            kind=_kind(key),
            attributes=opened.attributes,
            start_time=began_ns,
            end_time=at_ns(ended_s),
            **({"status": _failed()} if has_failed else {}),
        )

    def _send(self, processor: Any, service: Service, attributes: Mapping[str, Any], **facts: Any) -> None:
        # Copied, because another thread encodes the span later.
        facts |= {"resource": self._resource_of(service), "attributes": self._limited(attributes)}
        processor.on_end(_span_class()(instrumentation_scope=_scope(), **facts))


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
    return Tracing(service, exporter, processor, share, _limits())


def _otel(name: str) -> Any:
    """A module of OpenTelemetry, by its name: the extra `otel` is optional, and the light client imports this file."""
    return importlib.import_module(f"opentelemetry.{name}")


def _limits() -> Callable[[Mapping[str, Any]], Any]:
    """The SDK's limits of a span's attributes. They come from the environment."""
    limits, bounded = _otel("sdk.trace").SpanLimits(), _otel("attributes").BoundedAttributes
    count, length = limits.max_span_attributes, limits.max_span_attribute_length

    def limited(attributes: Mapping[str, Any]) -> Any:
        if length is None and (count is None or len(attributes) <= count):
            return dict(attributes)  # BoundedAttributes takes 2 to 9 us, also if it cuts nothing
        return bounded(count, attributes, max_value_len=length)

    return limited


def _resource_of(service: Service) -> Any:
    attributes = {"service.name": service.name, "service.instance.id": service.instance}
    return _otel("sdk.resources").Resource.create(attributes, names.SCHEMA_URL)


@functools.cache
def _scope() -> Any:
    return _otel("sdk.util.instrumentation").InstrumentationScope(names.SCOPE, schema_url=names.SCHEMA_URL)


@functools.cache
def _kind(key: str) -> Any:
    return _otel("trace").SpanKind[names.SPANS[key].kind.upper()]


@functools.cache
def _failed() -> Any:
    return _otel("trace.status").Status(_otel("trace").StatusCode.ERROR)


@functools.cache
def _span_class() -> Any:
    return _otel("sdk.trace").ReadableSpan


@functools.cache
def _new_context() -> Any:
    trace = _otel("trace")
    return partial(trace.SpanContext, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED))


def _context(context: TraceContext, *, is_remote: bool = False) -> Any:
    return _new_context()(context.trace_id, context.span_id, is_remote=is_remote)


def _random_id(num_bits: int) -> int:
    """Not 0, which is no id."""
    return random.getrandbits(num_bits) or 1
