"""What the router's spans record of a request, and which traces are kept. Pure.

The attributes are those of the GenAI conventions, read from a GenerateRequest. They never contain a text of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.core.results import Timings
from pdserve.core.types import Slo
from pdserve.telemetry import names
from pdserve.telemetry.propagate import AttributeValue

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
