"""Span and metrics of one call of the SDK, by the GenAI conventions, if the caller's program uses OpenTelemetry.

The SDK must not require OpenTelemetry. So this module only checks whether the program has already imported
`opentelemetry.trace` and `opentelemetry.metrics`. If not, a call costs two dictionary look-ups.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, final

from pdserve.telemetry import names
from pdserve.telemetry.metric_names import GEN_AI_DURATION_BUCKETS, GEN_AI_TOKEN_BUCKETS
from pdserve.telemetry.propagate import AttributeValue, traceparent_of

DURATION: Final = "gen_ai.client.operation.duration"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.client.operation.time_to_first_chunk"
TIME_PER_CHUNK: Final = "gen_ai.client.operation.time_per_output_chunk"
BUCKETS: Final[Mapping[str, tuple[float, ...]]] = {
    DURATION: GEN_AI_DURATION_BUCKETS,
    TOKEN_USAGE: GEN_AI_TOKEN_BUCKETS,
    TIME_TO_FIRST_CHUNK: GEN_AI_DURATION_BUCKETS,
    TIME_PER_CHUNK: GEN_AI_DURATION_BUCKETS,
}
TOKEN_TYPE: Final = "gen_ai.token.type"
#: Attributes that both the span and the metrics have.
LABELS: Final = (
    names.OPERATION, names.PROVIDER, names.REQUEST_MODEL, names.RESPONSE_MODEL, names.SERVER_ADDRESS,
    names.SERVER_PORT, names.ERROR_TYPE,
)  # fmt: skip


@final
class ClientCall:
    """The span is never made the current context, because a stream's generator may be closed in another one."""

    def __init__(self, attributes: Mapping[str, AttributeValue], *, is_stream: bool) -> None:
        self._trace: Any = sys.modules.get("opentelemetry.trace")
        self._metrics: Any = sys.modules.get("opentelemetry.metrics")
        self._is_on = self._trace is not None or self._metrics is not None
        self._is_stream = is_stream
        self._has_ended = False
        self._attributes: dict[str, Any] = {**attributes, **({names.REQUEST_STREAM: True} if is_stream else {})}
        self._began_s = time.monotonic()
        self._chunk_s: float | None = None  # when the last piece arrived
        self._span: Any = None
        self.traceparent: str | None = None
        if self._trace is not None:
            tracer = self._trace.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL)
            name = str(attributes[names.OPERATION])
            self._span = tracer.start_span(name, kind=self._trace.SpanKind.CLIENT, attributes=self._attributes)
            self.traceparent = traceparent_of(self._span)

    def answered_by(self, model: str) -> None:
        self.set({names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model} if model else {})
        if self._span is not None:
            self._span.update_name(names.call_name(self._attributes[names.OPERATION], model))

    def set(self, attributes: Mapping[str, Any]) -> None:
        if self._is_on:
            self._attributes.update(attributes)

    def took_chunk(self) -> None:
        """A piece of a stream has reached the caller."""
        if not (self._is_on and self._is_stream):
            return
        now_s, last_s = time.monotonic(), self._chunk_s
        self._chunk_s = now_s
        if last_s is None:
            self.set({names.RESPONSE_TTFC_S: now_s - self._began_s})
            self._record(TIME_TO_FIRST_CHUNK, now_s - self._began_s)
        else:
            self._record(TIME_PER_CHUNK, now_s - last_s)

    def fail(self, error_type: str, message: str = "") -> None:
        self.set({names.ERROR_TYPE: error_type})
        if self._span is not None:
            self._span.set_status(self._trace.StatusCode.ERROR, message)
        self.end()

    def end(self) -> None:
        """Idempotent."""
        if self._has_ended or not self._is_on:
            return
        self._has_ended = True
        self._record(DURATION, time.monotonic() - self._began_s)
        for token_type, name in (("input", names.INPUT_TOKENS), ("output", names.OUTPUT_TOKENS)):
            if name in self._attributes:
                self._record(TOKEN_USAGE, self._attributes[name], {TOKEN_TYPE: token_type})
        if self._span is not None:
            self._span.set_attributes(self._attributes)
            self._span.end()

    def _record(self, metric: str, value: float, more: Mapping[str, str] | None = None) -> None:
        if self._metrics is None:
            return
        labels = {name: self._attributes[name] for name in LABELS if name in self._attributes}
        context = None if self._span is None else self._trace.set_span_in_context(self._span)  # for exemplars
        _instruments(self._metrics)[metric].record(value, {**labels, **(more or {})}, context)


@functools.cache
def _instruments(metrics: Any) -> Mapping[str, Any]:
    """Made once. They belong to the program's provider, even if the program sets it later."""
    meter = metrics.get_meter(names.SCOPE, schema_url=names.SCHEMA_URL)
    return {
        name: meter.create_histogram(
            name, unit="{token}" if name == TOKEN_USAGE else "s", explicit_bucket_boundaries_advisory=buckets
        )
        for name, buckets in BUCKETS.items()
    }
