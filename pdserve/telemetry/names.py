"""The one table of spans, attributes and metrics: what each is called, who emits it, what it means.

Names of the OpenTelemetry GenAI conventions are used where they exist. Those are in development and have
left the main repository after 1.41; SCHEMA_URL pins the last release that holds them.
Standard library only: whoever reads a name pays for no exporter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pdserve.core.phases import MEANING, MEASURED_BY, Phase

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.1"
SCOPE: Final = "pdserve"

Process = Literal["client", "router", "worker"]

# --- attributes -----------------------------------------------------------------------------------------------

OPERATION: Final = "gen_ai.operation.name"  # CHAT or TEXT_COMPLETION
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"  # a cluster serves one model: the same as of the request
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE: Final = "error.type"  # PdserveError.reason; a span that carries it is marked as failed
RPC_STATUS: Final = "rpc.response.status_code"

REQUEST_ID: Final = "pdserve.request.id"
ATTEMPT: Final = "pdserve.attempt"
PATH: Final = "pdserve.path"  # Path.value
WORKER_ID: Final = "pdserve.worker.id"
WORKER_ROLE: Final = "pdserve.worker.role"  # Role.value
PREFILL_WORKER: Final = "pdserve.prefill_worker.id"
DECODE_WORKER: Final = "pdserve.decode_worker.id"
TTFT_S: Final = "pdserve.ttft_s"
TPOT_S: Final = "pdserve.tpot_s"
QUEUE_S: Final = "pdserve.queue_s"
SLO_TTFT_S: Final = "pdserve.slo.ttft_s"
SLO_TPOT_S: Final = "pdserve.slo.tpot_s"
TRANSFER_BYTES: Final = "pdserve.transfer.bytes"
TRANSFER_S: Final = "pdserve.transfer.duration_s"  # first byte to commit, by the receiver; overlaps the prefill
TRANSFER_BUSY_S: Final = "pdserve.transfer.busy_s"  # of it, with bytes on their way
TRANSFER_KIND: Final = "pdserve.transfer.transport"
TRANSFER_REASON: Final = "pdserve.transfer.transport_reason"  # why no other
PREFIX_BLOCKS: Final = "pdserve.prefix.blocks"  # leading blocks that some worker holds

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


SPAN_CLIENT: Final = "pdserve.client"
SPAN_REQUEST: Final = "pdserve.request"
SPAN_DELIVER: Final = "pdserve.deliver"
PHASE_SPANS: Final[dict[Phase, str]] = {phase: f"pdserve.{phase.value}" for phase in Phase}


def _span(name: str, by: Process, kind: SpanKind, parent: str | None, help_text: str) -> tuple[str, SpanSpec]:
    return name, SpanSpec(name=name, by=by, kind=kind, parent=parent, help=help_text)


SPANS: Final[dict[str, SpanSpec]] = dict(
    (
        _span(SPAN_CLIENT, "client", "client", None, "one call of the SDK, retries included"),
        _span(SPAN_REQUEST, "router", "server", SPAN_CLIENT, "one Generate call, from arrival to its last message"),
        *(
            _span(name, MEASURED_BY[phase], "internal", SPAN_REQUEST, MEANING[phase])
            for phase, name in PHASE_SPANS.items()
        ),
        _span(SPAN_DELIVER, "router", "internal", SPAN_REQUEST, "the answer's end to the last message written"),
    )
)

# --- metrics --------------------------------------------------------------------------------------------------

MetricKind = Literal["counter", "gauge", "histogram"]

# Prescribed by the GenAI conventions for the two server histograms.
GEN_AI_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
GEN_AI_TPOT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_DURATION_BUCKETS: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
# Finer, because the prescribed ones start at 10 ms per token and end at 10 s to the first: about 20 % a step
# where SLOs lie.
TTFT_BUCKETS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25,
    0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0,
)  # fmt: skip
TPOT_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
SHORT_BUCKETS: Final = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
SHARE_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    name: str  # as Prometheus shows it, unit and _total included
    kind: MetricKind
    by: Process
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only; in the unit of the name


METRICS: Final[dict[str, MetricSpec]] = {}


def _metric(
    name: str,
    kind: MetricKind,
    by: Process,
    help_text: str,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> MetricSpec:
    spec = MetricSpec(name=name, kind=kind, by=by, help=help_text, labels=labels, buckets=buckets)
    METRICS[name] = spec
    return spec


# Router. An outcome is served, late, refused, cancelled, expired or failed.
REQUESTS: Final = _metric(
    "pdserve_requests_total", "counter", "router", "requests that ended, by outcome", ("outcome",)
)
REQUEST_ERRORS: Final = _metric(
    "pdserve_request_errors_total", "counter", "router", "requests that ended in an error, by its reason", ("reason",)
)
CLIENT_DISCONNECTS: Final = _metric(
    "pdserve_client_disconnects_total", "counter", "router", "Generate calls whose client left before the end"
)
CONNECTIONS: Final = _metric(
    "pdserve_connections", "gauge", "router", "connections to the router's port, of max_connections at most"
)
QUEUED: Final = _metric("pdserve_requests_queued", "gauge", "router", "requests that wait in the router")
RUNNING: Final = _metric("pdserve_requests_running", "gauge", "router", "requests that are placed on workers")
PLACEMENTS: Final = _metric("pdserve_placements_total", "counter", "router", "requests placed, by path", ("path",))
REPLACEMENTS: Final = _metric(
    "pdserve_replacements_total", "counter", "router", "placements after the first of a request"
)
GEN_AI_LABELS: Final = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
GEN_AI_DURATION: Final = _metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "router",
    "arrival to the end, of requests that failed too",
    (*GEN_AI_LABELS, "error_type"),
    GEN_AI_DURATION_BUCKETS,
)
GEN_AI_TTFT: Final = _metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "router",
    "arrival to the first token, in the conventions' buckets",
    GEN_AI_LABELS,
    GEN_AI_TTFT_BUCKETS,
)
GEN_AI_TPOT: Final = _metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "router",
    "mean seconds per token after the first, in the conventions' buckets",
    GEN_AI_LABELS,
    GEN_AI_TPOT_BUCKETS,
)
TTFT: Final = _metric(
    "pdserve_ttft_seconds", "histogram", "router", "arrival to the first token", ("path",), TTFT_BUCKETS
)
TPOT: Final = _metric(
    "pdserve_tpot_seconds", "histogram", "router", "mean seconds per token after the first", ("path",), TPOT_BUCKETS
)
QUEUE_TIME: Final = _metric(
    "pdserve_queue_seconds", "histogram", "router", "time of a request that waits for a placement", (), TTFT_BUCKETS
)
SLO_KEPT: Final = _metric(
    "pdserve_slo_total", "counter", "router", "requests by which of their promised times they kept", ("kept",)
)  # kept: both, ttft, tpot, none
PROMPT_TOKENS: Final = _metric("pdserve_prompt_tokens_total", "counter", "router", "prompt tokens of served requests")
CACHED_PROMPT_TOKENS: Final = _metric(
    "pdserve_cached_prompt_tokens_total", "counter", "router", "prompt tokens whose KV came from a prefix cache"
)
GENERATED_TOKENS: Final = _metric("pdserve_output_tokens_total", "counter", "router", "tokens sent to clients")
DECISION_TIME: Final = _metric(
    "pdserve_decision_seconds", "histogram", "router", "one event through the router's state", (), SHORT_BUCKETS
)
PREFIX_LOOKUPS: Final = _metric(
    "pdserve_prefix_lookups_total", "counter", "router", "index lookups: hit, miss or unavailable", ("outcome",)
)
PREFIX_LOOKUP_TIME: Final = _metric(
    "pdserve_prefix_lookup_seconds", "histogram", "router", "one index lookup", (), SHORT_BUCKETS
)
WORKERS: Final = _metric("pdserve_workers", "gauge", "router", "workers attached to this router", ("role",))
UNPROVEN_WORKERS: Final = _metric(
    "pdserve_unproven_workers_total",
    "counter",
    "router",
    "streams to workers that ended before a message was sent: the worker did not prove the cluster's secret, or "
    "rejected the router's proof",
)
DROPPED_MESSAGES: Final = _metric(
    "pdserve_dropped_messages_total", "counter", "router", "late or unknown messages of workers", ("kind",)
)

# Worker, whatever its role.
STEPS: Final = _metric("pdserve_engine_steps_total", "counter", "worker", "engine steps finished")
STEP_TIME: Final = _metric("pdserve_engine_step_seconds", "histogram", "worker", "one engine step", (), TPOT_BUCKETS)
WORKER_RUNNING: Final = _metric("pdserve_worker_running", "gauge", "worker", "sequences in the batch")
WORKER_WAITING: Final = _metric("pdserve_worker_waiting", "gauge", "worker", "sequences that wait for the engine")
KV_BLOCKS: Final = _metric(
    "pdserve_kv_blocks", "gauge", "worker", "KV blocks: free, cached (nobody uses them) or used", ("state",)
)
PREFILLED_TOKENS: Final = _metric("pdserve_prefilled_tokens_total", "counter", "worker", "prompt tokens computed")
REUSED_TOKENS: Final = _metric("pdserve_reused_tokens_total", "counter", "worker", "prompt tokens found in the cache")
DRAWN_TOKENS: Final = _metric("pdserve_drawn_tokens_total", "counter", "worker", "tokens drawn")
DRAFT_TOKENS: Final = _metric(
    "pdserve_draft_tokens_total",
    "counter",
    "worker",
    "guessed tokens that were computed, and proved right or wrong",
    ("outcome",),
)  # outcome: accepted, rejected
SPECULATED_STEPS: Final = _metric("pdserve_speculated_steps_total", "counter", "worker", "steps that carried drafts")
PREEMPTED: Final = _metric("pdserve_preemptions_total", "counter", "worker", "sequences recomputed for want of memory")
REJECTED_CALLS: Final = _metric(
    "pdserve_worker_rejected_calls_total",
    "counter",
    "worker",
    "calls rejected before their handler, by the error's reason",
    ("reason",),
)
REFUSED_BY_WORKER: Final = _metric(
    "pdserve_worker_refusals_total", "counter", "worker", "reservations and prefills refused", ("reason",)
)
INVALID_MESSAGES: Final = _metric(
    "pdserve_invalid_messages_total", "counter", "worker", "messages of routers with a value out of bounds", ("field",)
)
TRANSFERS: Final = _metric(
    "pdserve_kv_transfers_total", "counter", "worker", "KV transfers that ended, by outcome", ("outcome",)
)  # outcome: committed, failed, or cancelled: given up since nobody needed it any more
KV_MISTAKEN: Final = _metric(
    "pdserve_kv_mistaken_total", "counter", "worker", "texts recomputed since a block was not theirs (kv_check)"
)
TRANSFER_EVENTS: Final = _metric(
    "pdserve_kv_transfer_events_total",
    "counter",
    "worker",
    "what a worker's KV transfers met: late messages, mismatches, reused blocks, silent peers (kvtransfer.stats), "
    "stuck calls of NCCL, and prompts from which layer groups were withheld because they had failed",
    ("event",),
)
TRANSFER_BYTES_TOTAL: Final = _metric(
    "pdserve_kv_transfer_bytes_total", "counter", "worker", "bytes of KV received and committed"
)
TRANSFER_SAVED_BYTES: Final = _metric(
    "pdserve_kv_transfer_saved_bytes_total",
    "counter",
    "worker",
    "bytes of KV that the receiver had, and did not travel",
)
PUSHES: Final = _metric(
    "pdserve_kv_pushes_total", "counter", "worker", "prompts by how their KV was planned to leave", ("plan",)
)  # plan: end, chunk, layers
TRANSFER_SENT_BYTES: Final = _metric(
    "pdserve_kv_sent_bytes_total",
    "counter",
    "worker",
    "bytes of KV, by whether the receiver's host had them when the prompt's last chunk was computed",
    ("when",),
)  # when: early, late
TRANSFER_WIRE_BYTES: Final = _metric(
    "pdserve_kv_wire_bytes_total",
    "counter",
    "worker",
    "bytes of KV sent, by the dtype as which they travelled",
    ("dtype",),
)  # int8 between pools of floats: kv_wire
TRANSFER_EXPOSED_TIME: Final = _metric(
    "pdserve_kv_exposed_seconds",
    "histogram",
    "worker",
    "prompt computed to the receiver's word that all is there, by the sender: what no computing hid",
    (),
    TTFT_BUCKETS,
)
TRANSFER_BUSY_TIME: Final = _metric(
    "pdserve_kv_busy_seconds",
    "histogram",
    "worker",
    "of a transfer the time with chunks on their way, by the receiver",
    (),
    TTFT_BUCKETS,
)
TRANSFER_HIDDEN_SHARE: Final = _metric(
    "pdserve_kv_hidden_ratio",
    "histogram",
    "worker",
    "1 - exposed / busy seconds of a transfer: what of it was hidden behind the prompt's computing",
    (),
    SHARE_BUCKETS,
)
TRANSFER_TIME: Final = _metric(
    "pdserve_kv_transfer_seconds", "histogram", "worker", "first byte to commit, by the receiver", (), TTFT_BUCKETS
)
