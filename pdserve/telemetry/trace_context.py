"""The trace context of a call, the span and metrics of the SDK's call, and what spans record of a request.

The SDK must not require OpenTelemetry. So this module only checks whether the caller's program has already imported
`opentelemetry.trace` and `opentelemetry.metrics`. If not, a call costs two dictionary look-ups.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.results import Timings
from pdserve.core.types import Slo
from pdserve.telemetry import names
from pdserve.telemetry.metric_names import GEN_AI_DURATION_BUCKETS, GEN_AI_TOKEN_BUCKETS

# --- W3C trace context ----------------------------------------------------------------------------------------
# In and out of gRPC metadata.

HEADER: Final = "traceparent"
AttributeValue = str | int | float | bool

# version 00 ends after the flags; a later version may add fields after another dash.
_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,256})?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: int
    span_id: int
    is_sampled: bool


def parse(traceparent: str | None) -> TraceContext | None:
    """The context of a traceparent header; None if it is absent or malformed."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "00" and rest is not None:
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))
    return context if context.trace_id and context.span_id else None


def trace_id_of(traceparent: str) -> str:
    """32 hex digits; empty if the header is absent or malformed."""
    return "" if parse(traceparent) is None else traceparent[3:35]


def render(context: TraceContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{'01' if context.is_sampled else '00'}"


def extract(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The traceparent of a call; empty if it is absent or malformed."""
    for key, value in metadata or ():
        if key.lower() == HEADER and isinstance(value, str) and parse(value) is not None:
            return value
    return ""


def inject(
    metadata: Iterable[tuple[str, str | bytes]] | None, traceparent: str | None
) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` with this traceparent; unchanged when there is none or the caller set one already."""
    pairs = tuple((key, value) for key, value in metadata or ())
    if not traceparent or any(key.lower() == HEADER for key, _ in pairs):
        return pairs
    return (*pairs, (HEADER, traceparent))


def current_traceparent() -> str | None:
    """The traceparent of the active span of the user's program; None if there is none."""
    otel = sys.modules.get("opentelemetry.trace")
    return None if otel is None else traceparent_of(otel.get_current_span())


def traceparent_of(span: Any) -> str | None:
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return render(TraceContext(context.trace_id, context.span_id, bool(context.trace_flags.sampled)))


# --- call of the SDK ------------------------------------------------------------------------------------------
# Span and metrics by the GenAI conventions.

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

    def __init__(self, attributes: Callable[[], Mapping[str, AttributeValue]], *, is_stream: bool) -> None:
        """`attributes` is called only if something is recorded."""
        self._trace: Any = sys.modules.get("opentelemetry.trace")
        self._metrics: Any = sys.modules.get("opentelemetry.metrics")
        self.traceparent: str | None = current_traceparent()
        if self._trace is not None and _is_only_api(self._trace.get_tracer_provider()):
            self._trace = None
        self.is_on = self._trace is not None or self._metrics is not None
        self._is_stream = is_stream
        self._has_ended = False
        self._attributes: dict[str, Any] = {}
        self._began_s = time.monotonic()
        self._chunk_s: float | None = None  # when the last piece arrived
        self._span: Any = None
        if self.is_on:
            self._attributes = {**attributes(), **({names.REQUEST_STREAM: True} if is_stream else {})}
        if self._trace is not None:
            tracer = self._trace.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL)
            name = str(self._attributes[names.OPERATION])
            self._span = tracer.start_span(name, kind=self._trace.SpanKind.CLIENT, attributes=self._attributes)
            self.traceparent = traceparent_of(self._span)

    def answered_by(self, model: str) -> None:
        self.set({names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model} if model else {})
        if self._span is not None:
            self._span.update_name(names.call_name(self._attributes[names.OPERATION], model))

    def set(self, attributes: Mapping[str, Any]) -> None:
        if self.is_on:
            self._attributes.update(attributes)

    def took_chunk(self) -> None:
        """A piece of a stream has reached the caller."""
        if not (self.is_on and self._is_stream):
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
        if self._has_ended or not self.is_on:
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


def _is_only_api(provider: Any) -> bool:
    """Whether no span is recorded: the program has not set a provider, so this is one of OpenTelemetry's API. Other
    libraries may have loaded it."""
    return type(provider).__module__ == "opentelemetry.trace"


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


# --- attributes of a request ----------------------------------------------------------------------------------
# Those of the GenAI conventions, read from a GenerateRequest. They never contain a text of the caller.

_SAMPLING: Final[Mapping[str, str]] = {
    "frequency_penalty": names.REQUEST_FREQUENCY_PENALTY,
    "max_tokens": names.REQUEST_MAX_TOKENS,
    "presence_penalty": names.REQUEST_PRESENCE_PENALTY,
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
}
_DIGITS: Final = 6  # of a float32
_MAX_INT: Final = 2**63 - 1  # of an attribute


def operation_of(request: Any) -> str:
    return names.CHAT if request.WhichOneof("prompt") == "chat" else names.TEXT_COMPLETION


def request_attributes(request: Any) -> dict[str, AttributeValue]:
    """Of a GenerateRequest that may be invalid, so only numbers and constants."""
    sampling = request.sampling
    found: dict[str, AttributeValue] = {
        names.OPERATION: operation_of(request),
        names.PROVIDER: names.PROVIDER_NAME,
        **{name: round(getattr(sampling, one), _DIGITS) for one, name in _SAMPLING.items() if sampling.HasField(one)},
    }
    if request.HasField("n") and request.n != 1:
        found[names.REQUEST_CHOICE_COUNT] = request.n
    if sampling.HasField("top_k"):
        found[names.REQUEST_TOP_K] = float(sampling.top_k)  # a double by the conventions
    if sampling.HasField("seed") and sampling.seed <= _MAX_INT:
        found[names.REQUEST_SEED] = sampling.seed
    if sampling.HasField("structured_output"):
        kind = sampling.structured_output.WhichOneof("kind") or ""
        found[names.OUTPUT_TYPE] = "json" if kind.startswith("json") else "text"
    return found


# --- tail sampling --------------------------------------------------------------------------------------------
# A trace is kept if the caller had sampled it, if its request was rejected, failed, slow or retried, or if it belongs
# to the share of all others that the operator keeps (docs/decisions/0023-one-process-records-a-trace.md).


def is_in_share(trace_id: int, share: float) -> bool:
    """Whether a trace is one of the `share` (0 to 1) that is kept without a further reason.

    Decided by the trace id, as OpenTelemetry's TraceIdRatioBased does, so all routers choose the same traces.
    """
    return trace_id % 2**64 < round(share * 2**64)


def is_notable(timings: Timings, slo: Slo) -> bool:
    """Whether a request that ended without an error was slow, or needed a second attempt."""
    waited_s = timings.ttft_s or timings.total_s  # without a first token, it waited until its end
    return timings.attempts > 1 or waited_s > slo.ttft_s or timings.tpot_s > slo.tpot_s
