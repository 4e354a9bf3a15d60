"""The table of all spans and attributes: name, process that emits it, and meaning.

Metrics are in metric_names.py.

Names of the OpenTelemetry GenAI conventions are used where they exist. They are in development: SCHEMA_URL is the last
release of the common conventions that contains them, and a test compares them with the package of that release.
docs/reference/metrics.md is generated from both tables (`make reference`).
Standard library and pdserve.core only: reading a name loads no exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.results import MEANING, MEASURED_BY, Phase

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
CONVERSATION_ID: Final = _attribute("gen_ai.conversation.id", "session id of the request, if it has one")
OUTPUT_TYPE: Final = _attribute("gen_ai.output.type", "`json` or `text`; only with structured output")
REQUEST_MODEL: Final = _attribute("gen_ai.request.model", "name of the model")
REQUEST_CHOICE_COUNT: Final = _attribute("gen_ai.request.choice.count", "number of answers, if it is not 1")
REQUEST_FREQUENCY_PENALTY: Final = _attribute("gen_ai.request.frequency_penalty", "frequency penalty, if given")
REQUEST_MAX_TOKENS: Final = _attribute("gen_ai.request.max_tokens", "maximum number of tokens to generate")
REQUEST_PRESENCE_PENALTY: Final = _attribute("gen_ai.request.presence_penalty", "presence penalty, if given")
REQUEST_SEED: Final = _attribute("gen_ai.request.seed", "seed, if given and below 2^63")
REQUEST_STREAM: Final = _attribute("gen_ai.request.stream", "`true` if the caller reads a stream")
REQUEST_TEMPERATURE: Final = _attribute("gen_ai.request.temperature", "temperature, if given")
REQUEST_TOP_K: Final = _attribute("gen_ai.request.top_k", "top-k, if given")
REQUEST_TOP_P: Final = _attribute("gen_ai.request.top_p", "top-p, if given")
RESPONSE_FINISH_REASONS: Final = _attribute(
    "gen_ai.response.finish_reasons", "why each answer ended: `stop` or `length`"
)
RESPONSE_ID: Final = _attribute("gen_ai.response.id", "request id in the response")
RESPONSE_MODEL: Final = _attribute("gen_ai.response.model", "name of the model; a cluster serves only one")
RESPONSE_TTFC_S: Final = _attribute(
    "gen_ai.response.time_to_first_chunk", "time from the call to the first piece of a stream, in seconds"
)
CACHED_TOKENS: Final = _attribute(
    "gen_ai.usage.cache_read.input_tokens", "number of prompt tokens whose KV came from a prefix cache"
)
INPUT_TOKENS: Final = _attribute("gen_ai.usage.input_tokens", "number of prompt tokens")
OUTPUT_TOKENS: Final = _attribute("gen_ai.usage.output_tokens", "number of generated tokens of all answers")
SERVER_ADDRESS: Final = _attribute("server.address", "host of the router, as the process knows it")
SERVER_PORT: Final = _attribute("server.port", "port of the router")
# A span that carries it is marked as failed.
ERROR_TYPE: Final = _attribute("error.type", "reason of the error; set only on failed spans")
RPC_STATUS: Final = _attribute("rpc.response.status_code", "name of the gRPC status code")

REQUEST_ID: Final = _attribute("pdserve.request.id", "request id")
TENANT: Final = _attribute("pdserve.tenant", "tenant of the request, if it has one")
ATTEMPT: Final = _attribute(
    "pdserve.attempt", "attempt that the span belongs to, from 1; on the request's span the number of attempts"
)
MIGRATIONS: Final = _attribute("pdserve.migrations", "how often the answer moved from a draining worker, if it did")
REVISION: Final = _attribute("pdserve.revision", "revision of the weights, if it is not that of the cluster's start")
PATH: Final = _attribute(
    "pdserve.path", "`remote` (a prefill worker computed the prompt) or `local` (the decode worker did)"
)
WORKER_ID: Final = _attribute("pdserve.worker.id", "name of the worker that did the work")
#: By the field of RequestAttributes; on a request's span, if the client has set it.
REQUEST_ATTRIBUTES: Final[Mapping[str, str]] = {
    "priority": _attribute("pdserve.priority", "priority of the request, if it is not 0"),
    "session_id": CONVERSATION_ID,
    "reuse_within_s": _attribute(
        "pdserve.reuse_within_s", "seconds within which the prefix is used again, as the client expects"
    ),
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

PROVIDER_NAME: Final = "pdserve"  # value of PROVIDER
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"

# --- spans ----------------------------------------------------------------------------------------------------

SpanKind = Literal["client", "server", "internal"]


#: The conventions' name of a call to a model. Without a known model, it is only the operation.
CALL_NAME: Final = f"{{{OPERATION}}} {{{REQUEST_MODEL}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpec:
    name: str
    service: Process  # process that did the work
    kind: SpanKind
    parent: str | None  # key of the span above it
    help: str
    attributes: tuple[str, ...]  # those that it may have


#: Keys of SPANS.
SPAN_CLIENT: Final = "client"
SPAN_REQUEST: Final = "request"
SPAN_DELIVER: Final = "pdserve.deliver"
PHASE_SPANS: Final[dict[Phase, str]] = {phase: f"pdserve.{phase.value}" for phase in Phase}

_OF_CALL: Final = (
    OPERATION, PROVIDER, CONVERSATION_ID, OUTPUT_TYPE, REQUEST_MODEL, REQUEST_CHOICE_COUNT, REQUEST_FREQUENCY_PENALTY,
    REQUEST_MAX_TOKENS, REQUEST_PRESENCE_PENALTY, REQUEST_SEED, REQUEST_TEMPERATURE, REQUEST_TOP_K, REQUEST_TOP_P,
    RESPONSE_FINISH_REASONS, RESPONSE_ID, RESPONSE_MODEL, CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS, SERVER_ADDRESS,
    SERVER_PORT, ERROR_TYPE, REQUEST_ID,
)  # fmt: skip
_TRANSPORT: Final = (TRANSFER_KIND, TRANSFER_REASON)
_OF_REQUEST: Final = (
    *_OF_CALL, RPC_STATUS, REQUEST_ATTRIBUTES["priority"], REQUEST_ATTRIBUTES["reuse_within_s"], TENANT, ATTEMPT,
    MIGRATIONS, REVISION, PATH,
    PREFILL_WORKER, DECODE_WORKER, PREFIX_BLOCKS, TTFT_S, TPOT_S, QUEUE_S, SLO_TTFT_S, SLO_TPOT_S, TRANSFER_BYTES,
    *_TRANSPORT,
)  # fmt: skip


def _of_phase(phase: Phase) -> tuple[str, ...]:
    if phase is Phase.TRANSFER_WAIT:
        return ATTEMPT, TRANSFER_S, TRANSFER_BUSY_S, *_TRANSPORT
    return (ATTEMPT, WORKER_ID) if MEASURED_BY[phase] == "worker" else (ATTEMPT,)


def _internal(name: str, service: Process, help_text: str, attributes: tuple[str, ...]) -> SpanSpec:
    return SpanSpec(
        name=name, service=service, kind="internal", parent=SPAN_REQUEST, help=help_text, attributes=attributes
    )


SPANS: Final[dict[str, SpanSpec]] = {
    SPAN_CLIENT: SpanSpec(
        name=CALL_NAME,
        service="client",
        kind="client",
        parent=None,
        help="one call of the SDK, including retries",
        attributes=(*_OF_CALL, REQUEST_STREAM, RESPONSE_TTFC_S),
    ),
    SPAN_REQUEST: SpanSpec(
        name=CALL_NAME,
        service="router",
        kind="server",
        parent=SPAN_CLIENT,
        help="one Generate call, from arrival to its last message",
        attributes=_OF_REQUEST,
    ),
    **{
        name: _internal(name, MEASURED_BY[phase], MEANING[phase], _of_phase(phase))
        for phase, name in PHASE_SPANS.items()
    },
    SPAN_DELIVER: _internal(
        SPAN_DELIVER, "router", "write the last messages to the client after the end of the response", ()
    ),
}


def call_name(operation: str, model: str) -> str:
    """CALL_NAME of one call; `model` is empty if it is not known."""
    return f"{operation} {model}" if model else operation
