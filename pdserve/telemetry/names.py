"""The table of all spans and attributes: name, process that emits it, and meaning.

Metrics are in metric_names.py.

Names of the OpenTelemetry GenAI conventions are used where they exist. Those are in development and have
left the main repository after 1.41; SCHEMA_URL pins the last release that holds them.
docs/reference/metrics.md is generated from both tables (`make reference`).
Standard library and pdserve.core only: reading a name loads no exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.phases import MEANING, MEASURED_BY, Phase

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.1"
SCOPE: Final = "pdserve"

Process = Literal["client", "router", "worker", "gateway", "launcher"]

# --- attributes -----------------------------------------------------------------------------------------------

ATTRIBUTES: Final[dict[str, str]] = {}  # what each attribute means, by its name


def _attribute(name: str, help_text: str) -> str:
    ATTRIBUTES[name] = help_text
    return name


OPERATION: Final = _attribute("gen_ai.operation.name", "`chat` or `text_completion`")
PROVIDER: Final = _attribute("gen_ai.provider.name", "always `pdserve`")
REQUEST_MODEL: Final = _attribute("gen_ai.request.model", "name of the model")
RESPONSE_MODEL: Final = _attribute("gen_ai.response.model", "name of the model; a cluster serves only one")
REQUEST_MAX_TOKENS: Final = _attribute("gen_ai.request.max_tokens", "maximum number of tokens to generate")
RESPONSE_ID: Final = _attribute("gen_ai.response.id", "request id in the response")
RESPONSE_FINISH_REASONS: Final = _attribute(
    "gen_ai.response.finish_reasons", "why generation ended: `stop` or `length`"
)
INPUT_TOKENS: Final = _attribute("gen_ai.usage.input_tokens", "number of prompt tokens")
OUTPUT_TOKENS: Final = _attribute("gen_ai.usage.output_tokens", "number of generated tokens")
CACHED_TOKENS: Final = _attribute(
    "gen_ai.usage.cache_read.input_tokens", "number of prompt tokens whose KV came from a prefix cache"
)
# A span that carries it is marked as failed.
ERROR_TYPE: Final = _attribute("error.type", "reason of the error; set only on failed spans")
RPC_STATUS: Final = _attribute("rpc.response.status_code", "name of the gRPC status code")

REQUEST_ID: Final = _attribute("pdserve.request.id", "request id")
TENANT: Final = _attribute("pdserve.tenant", "tenant of the request, if it has one")
ATTEMPT: Final = _attribute(
    "pdserve.attempt", "attempt that the span belongs to, from 1; on `pdserve.request` the number of attempts"
)
PATH: Final = _attribute(
    "pdserve.path", "`remote` (a prefill worker computed the prompt) or `local` (the decode worker did)"
)
WORKER_ID: Final = _attribute("pdserve.worker.id", "name of the worker that recorded the span")
WORKER_ROLE: Final = _attribute("pdserve.worker.role", "role of that worker: `prefill` or `decode`")
#: By the field of RequestAttributes; on spans of workers, if the client has set it.
REQUEST_ATTRIBUTES: Final[Mapping[str, str]] = {
    "priority": _attribute("pdserve.priority", "priority of the request, if it is not 0"),
    "session_id": _attribute("session.id", "session id of the request, if it has one"),
}
PREFILL_WORKER: Final = _attribute("pdserve.prefill_worker.id", "name of the last attempt's prefill worker")
DECODE_WORKER: Final = _attribute("pdserve.decode_worker.id", "name of the last attempt's decode worker")
TTFT_S: Final = _attribute("pdserve.ttft_s", "time to first token, in seconds")
TPOT_S: Final = _attribute("pdserve.tpot_s", "mean time per output token after the first, in seconds")
QUEUE_S: Final = _attribute("pdserve.queue_s", "time that the request waited for a placement, in seconds")
SLO_TTFT_S: Final = _attribute("pdserve.slo.ttft_s", "TTFT target, in seconds")
SLO_TPOT_S: Final = _attribute("pdserve.slo.tpot_s", "TPOT target, in seconds")
TRANSFER_BYTES: Final = _attribute("pdserve.transfer.bytes", "number of KV bytes transferred")
TRANSFER_S: Final = _attribute(
    "pdserve.transfer.duration_s",
    "time from the first byte to commit, measured by the receiver, in seconds; overlaps the prefill",
)
TRANSFER_BUSY_S: Final = _attribute("pdserve.transfer.busy_s", "part of that time with bytes in flight, in seconds")
TRANSFER_KIND: Final = _attribute("pdserve.transfer.transport", "transport that carried the KV")
TRANSFER_REASON: Final = _attribute("pdserve.transfer.transport_reason", "why that transport was chosen and no other")
PREFIX_BLOCKS: Final = _attribute(
    "pdserve.prefix.blocks", "largest number of the prompt's leading KV blocks that one worker holds"
)

# Lists by the conventions; one answer per request makes them lists of one.
LISTS: Final = frozenset({RESPONSE_FINISH_REASONS})

PROVIDER_NAME: Final = "pdserve"  # value of PROVIDER
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"

# --- spans ----------------------------------------------------------------------------------------------------

SpanKind = Literal["client", "server", "internal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpec:
    name: str
    by: Process
    kind: SpanKind
    parent: str | None  # name of the span above it
    help: str
    attributes: tuple[str, ...]  # those that it may have


SPAN_CLIENT: Final = "pdserve.client"
SPAN_REQUEST: Final = "pdserve.request"
SPAN_DELIVER: Final = "pdserve.deliver"
PHASE_SPANS: Final[dict[Phase, str]] = {phase: f"pdserve.{phase.value}" for phase in Phase}


def _span(
    name: str, by: Process, kind: SpanKind, parent: str | None, help_text: str, attributes: tuple[str, ...]
) -> tuple[str, SpanSpec]:
    return name, SpanSpec(name=name, by=by, kind=kind, parent=parent, help=help_text, attributes=attributes)


_BY_WORKER: Final = (REQUEST_ID, ATTEMPT, WORKER_ID, WORKER_ROLE, *REQUEST_ATTRIBUTES.values())
_TRANSPORT: Final = (TRANSFER_KIND, TRANSFER_REASON)
_OF_CALL: Final = (
    OPERATION, PROVIDER, REQUEST_MODEL, RESPONSE_MODEL, REQUEST_MAX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS, REQUEST_ID,
    ERROR_TYPE,
)  # fmt: skip
_OF_REQUEST: Final = (
    *_OF_CALL, RPC_STATUS, RESPONSE_FINISH_REASONS, CACHED_TOKENS, TENANT, ATTEMPT, PATH, PREFILL_WORKER, DECODE_WORKER,
    TTFT_S, TPOT_S, QUEUE_S, SLO_TTFT_S, SLO_TPOT_S, TRANSFER_BYTES, *_TRANSPORT,
)  # fmt: skip
_OF_PHASE: Final[Mapping[Phase, tuple[str, ...]]] = {
    Phase.PREPARE: (),
    Phase.PREFIX_LOOKUP: (PREFIX_BLOCKS,),
    Phase.PREFILL: (*_BY_WORKER, CACHED_TOKENS),
    Phase.TRANSFER_WAIT: (ATTEMPT, TRANSFER_S, TRANSFER_BUSY_S, *_TRANSPORT),
}

SPANS: Final[dict[str, SpanSpec]] = dict(
    (
        _span(
            SPAN_CLIENT, "client", "client", None, "one call of the SDK, including retries", (*_OF_CALL, RESPONSE_ID)
        ),
        _span(
            SPAN_REQUEST,
            "router",
            "server",
            SPAN_CLIENT,
            "one Generate call, from arrival to its last message",
            _OF_REQUEST,
        ),
        *(
            _span(
                name,
                MEASURED_BY[phase],
                "internal",
                SPAN_REQUEST,
                MEANING[phase],
                _OF_PHASE.get(phase, _BY_WORKER if MEASURED_BY[phase] == "worker" else (ATTEMPT,)),
            )
            for phase, name in PHASE_SPANS.items()
        ),
        _span(
            SPAN_DELIVER,
            "router",
            "internal",
            SPAN_REQUEST,
            "write the last messages to the client after the end of the response",
            (),
        ),
    )
)
