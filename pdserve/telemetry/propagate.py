"""W3C trace context in and out of gRPC metadata. Standard library only.

The SDK must not require OpenTelemetry, so this module only checks whether the user's program has already imported it.
If not, a call has no trace context, and the check costs two dictionary look-ups.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

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
