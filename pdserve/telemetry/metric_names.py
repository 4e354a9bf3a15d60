"""The table of all metrics: name, process that records it, and meaning.

Names and buckets of the OpenTelemetry GenAI conventions are used where they exist (names.py has their release).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pdserve.core import errors
from pdserve.core.attempt import RefusalReason
from pdserve.core.errors import PdserveError
from pdserve.core.types import Path, Role
from pdserve.telemetry.names import CHAT, PROVIDER_NAME, TEXT_COMPLETION, Process

MetricKind = Literal["counter", "gauge", "histogram"]
LabelValues = tuple[str, ...] | str  # all values, or a description of an open set

# Prescribed by the GenAI conventions.
GEN_AI_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
GEN_AI_TPOT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_DURATION_BUCKETS: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
GEN_AI_TOKEN_BUCKETS: Final = tuple(float(4**power) for power in range(14))
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
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()  # histograms only; in the unit of the name
    also_by: Process | None = None


METRICS: Final[dict[str, MetricSpec]] = {}


def _metric(
    name: str,
    kind: MetricKind,
    by: Process,
    help_text: str,
    labels: Mapping[str, LabelValues] | None = None,
    buckets: tuple[float, ...] = (),
    also_by: Process | None = None,
) -> MetricSpec:
    spec = MetricSpec(
        name=name, kind=kind, by=by, help=help_text, labels=labels or {}, buckets=buckets, also_by=also_by
    )
    METRICS[name] = spec
    return spec


# Values that labels take from enumerations.
_PATHS: Final = tuple(one.value for one in Path)
_REASONS: Final = tuple(
    sorted({one.reason for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PdserveError)})
)
_OUTCOMES: Final = ("served", "late", "rejected", "cancelled", "expired", "failed")
_TRANSFER_EVENTS: Final = (
    "cancelled", "expired", "cut", "quarantined", "late_messages", "duplicate_chunks", "silent", "severed",
    "checksum_mismatches", "stamp_mismatches", "stale_source", "stale_target", "refused_opens", "refused_connections",
    "unproven", "protocol_errors", "stuck_nccl_calls", "layer_groups_withheld",
)  # fmt: skip

# Router.
REQUESTS: Final = _metric(
    "pdserve_requests_total", "counter", "router", "requests that ended, by outcome", {"outcome": _OUTCOMES}
)
REQUEST_ERRORS: Final = _metric(
    "pdserve_request_errors_total",
    "counter",
    "router",
    "requests that ended with an error, by the error's reason",
    {"reason": _REASONS},
)
SHED_CAUSES: Final = ("cluster", "front")
SHED: Final = _metric(
    "pdserve_requests_shed_total",
    "counter",
    "router",
    "requests that were rejected before any work for them: because the cluster had rejected most of the latest ones "
    "(cluster), or because this process was short of CPU time (front)",
    {"cause": SHED_CAUSES},
)
CLIENT_DISCONNECTS: Final = _metric(
    "pdserve_client_disconnects_total",
    "counter",
    "router",
    "Generate calls whose client disconnected before the end of the response",
)
CONNECTIONS: Final = _metric(
    "pdserve_connections", "gauge", "router", "open connections to the router's port; router.max_connections limits it"
)
QUEUED: Final = _metric("pdserve_requests_queued", "gauge", "router", "requests waiting in the router")
RUNNING: Final = _metric("pdserve_requests_running", "gauge", "router", "requests running on workers")
PLACEMENTS: Final = _metric(
    "pdserve_placements_total", "counter", "router", "placements of requests on workers, by path", {"path": _PATHS}
)
REPLACEMENTS: Final = _metric(
    "pdserve_replacements_total", "counter", "router", "placements of a request after its first one"
)
MIGRATIONS: Final = _metric(
    "pdserve_migrations_total", "counter", "router", "running answers that moved from a draining decode worker"
)
MIGRATIONS_WITH_KV: Final = _metric(
    "pdserve_migrations_with_kv_total",
    "counter",
    "router",
    "running answers whose KV the draining decode worker has sent; the KV of the others was computed again",
)
TASK_STATES: Final = ("in_time", "late", "unknown")
TASKS: Final = _metric(
    "pdserve_tasks_total",
    "counter",
    "router",
    "tasks with a deadline that ended, by whether that was in time; unknown: the router forgot the session before",
    {"outcome": TASK_STATES},
)
GEN_AI_LABELS: Final[Mapping[str, LabelValues]] = {
    "gen_ai_operation_name": (CHAT, TEXT_COMPLETION),
    "gen_ai_provider_name": (PROVIDER_NAME,),
    "gen_ai_request_model": "name of the model",
    "gen_ai_response_model": "name of the model",
}
GEN_AI_DURATION: Final = _metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "router",
    "time from arrival to the end of the response, including failed requests",
    {**GEN_AI_LABELS, "error_type": ("", *_REASONS)},
    GEN_AI_DURATION_BUCKETS,
)
GEN_AI_TTFT: Final = _metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "router",
    "time to first token, in the buckets of the GenAI conventions",
    GEN_AI_LABELS,
    GEN_AI_TTFT_BUCKETS,
)
GEN_AI_TPOT: Final = _metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "router",
    "mean time per output token after the first, in the buckets of the GenAI conventions",
    GEN_AI_LABELS,
    GEN_AI_TPOT_BUCKETS,
)
TTFT: Final = _metric(
    "pdserve_ttft_seconds", "histogram", "router", "time to first token", {"path": _PATHS}, TTFT_BUCKETS
)
TPOT: Final = _metric(
    "pdserve_tpot_seconds",
    "histogram",
    "router",
    "mean time per output token after the first",
    {"path": _PATHS},
    TPOT_BUCKETS,
)
QUEUE_TIME: Final = _metric(
    "pdserve_queue_seconds",
    "histogram",
    "router",
    "time that a request waits in the router for a placement",
    buckets=TTFT_BUCKETS,
)
SLO_KEPT: Final = _metric(
    "pdserve_slo_total",
    "counter",
    "router",
    "finished requests, by the SLO targets that they met",
    {"kept": ("both", "ttft", "tpot", "none")},
)
PROMPT_TOKENS: Final = _metric("pdserve_prompt_tokens_total", "counter", "router", "prompt tokens of finished requests")
CACHED_PROMPT_TOKENS: Final = _metric(
    "pdserve_cached_prompt_tokens_total", "counter", "router", "prompt tokens whose KV came from a prefix cache"
)
GENERATED_TOKENS: Final = _metric("pdserve_output_tokens_total", "counter", "router", "tokens sent to clients")
DECISION_TIME: Final = _metric(
    "pdserve_decision_seconds",
    "histogram",
    "router",
    "time to process one event in the router's state",
    buckets=SHORT_BUCKETS,
)
LONG_PROMPT_CHARS: Final = _metric(
    "pdserve_long_prompt_characters_total",
    "counter",
    "router",
    "characters of long prompts, by whether their token ids were known from an earlier prompt",
    {"source": ("kept", "tokenizer")},
)
PREFIX_LOOKUPS: Final = _metric(
    "pdserve_prefix_lookups_total",
    "counter",
    "router",
    "lookups in the prefix index, by outcome",
    {"outcome": ("hit", "miss", "unavailable")},
)
PREFIX_LOOKUP_TIME: Final = _metric(
    "pdserve_prefix_lookup_seconds",
    "histogram",
    "router",
    "time of one lookup in the prefix index",
    buckets=SHORT_BUCKETS,
)
WORKERS: Final = _metric(
    "pdserve_workers", "gauge", "router", "workers connected to this router", {"role": tuple(one.value for one in Role)}
)
DESIRED_WORKERS: Final = _metric(
    "pdserve_desired_workers",
    "gauge",
    "router",
    "workers that there should be: decided by the setting router.scaling, or in the launcher by `up --autoscale` and "
    "`--roles auto`",
    {"role": tuple(one.value for one in Role)},
    also_by="launcher",
)
UNREGISTERED_WORKERS: Final = _metric(
    "pdserve_unregistered_workers",
    "gauge",
    "router",
    "connected workers whose registration Redis has lost; they are served while their streams are open",
)
UNPROVEN_WORKERS: Final = _metric(
    "pdserve_unproven_workers_total",
    "counter",
    "router",
    "streams to workers that ended before a message was sent: the worker did not prove the cluster's secret, or "
    "rejected the router's proof",
)
DROPPED_MESSAGES: Final = _metric(
    "pdserve_dropped_messages_total",
    "counter",
    "router",
    "messages of workers that the router ignored: late, illegal in the request's state, or with invalid values",
    {"kind": ("late", "illegal", "invalid")},
)
TENANT_LABEL: Final = "name of the tenant; `default` without one, `other` over router.tenant_labels"
TENANT_REQUESTS: Final = _metric(
    "pdserve_tenant_requests_total",
    "counter",
    "router",
    "requests of a tenant that ended, by outcome",
    {"tenant": TENANT_LABEL, "outcome": _OUTCOMES},
)
TENANT_TOKENS: Final = _metric(
    "pdserve_tenant_tokens_total",
    "counter",
    "router",
    "tokens of a tenant: of the prompts of finished requests, and sent to clients",
    {"tenant": TENANT_LABEL, "kind": ("prompt", "output")},
)
TENANT_TTFT: Final = _metric(
    "pdserve_tenant_ttft_seconds",
    "histogram",
    "router",
    "time to first token of a tenant's finished requests",
    {"tenant": TENANT_LABEL},
    GEN_AI_TTFT_BUCKETS,
)
TENANT_QUOTA_REJECTIONS: Final = _metric(
    "pdserve_tenant_quota_rejections_total",
    "counter",
    "router",
    "calls that were rejected because their tenant had used up a quota",
    {"tenant": TENANT_LABEL, "quota": ("tokens_per_minute", "max_concurrent")},
)
TENANT_RUNNING: Final = _metric(
    "pdserve_tenant_answers_running",
    "gauge",
    "router",
    "answers of a tenant that count for max_concurrent",
    {"tenant": TENANT_LABEL},
)

# Worker, whatever its role.
STEPS: Final = _metric("pdserve_engine_steps_total", "counter", "worker", "engine steps completed")
STEP_TIME: Final = _metric(
    "pdserve_engine_step_seconds", "histogram", "worker", "time of one engine step", buckets=TPOT_BUCKETS
)
WORKER_RUNNING: Final = _metric("pdserve_worker_running", "gauge", "worker", "sequences in the batch")
WORKER_WAITING: Final = _metric("pdserve_worker_waiting", "gauge", "worker", "sequences waiting for the engine")
KV_BLOCKS: Final = _metric(
    "pdserve_kv_blocks",
    "gauge",
    "worker",
    "KV blocks of the pool, by state; a cached block holds a prefix that no sequence uses now",
    {"state": ("free", "cached", "used")},
)
KV_HOST_BLOCKS: Final = _metric("pdserve_kv_host_blocks", "gauge", "worker", "KV blocks in the host tier")
KV_HOST_COPIES: Final = _metric(
    "pdserve_kv_host_copies_total",
    "counter",
    "worker",
    "KV blocks copied to the host tier as they left the pool (saved), and back for a later prompt (loaded)",
    {"direction": ("saved", "loaded")},
)
KV_DISK_BLOCKS: Final = _metric("pdserve_kv_disk_blocks", "gauge", "worker", "KV blocks in the disk tier")
KV_DISK_BYTES: Final = _metric("pdserve_kv_disk_bytes", "gauge", "worker", "size of the disk tier's files")
KV_DISK_EVENTS: Final = _metric(
    "pdserve_kv_disk_events_total",
    "counter",
    "worker",
    "KV blocks that were written to the disk tier, dropped because its queue was full or writing paused, or found "
    "damaged by a read; and writes and reads that failed",
    {"event": ("written", "dropped", "damaged", "failed_writes", "failed_reads")},
)
KV_STORE_EVENTS: Final = _metric(
    "pdserve_kv_store_events_total",
    "counter",
    "worker",
    "KV blocks that were written to the shared store, dropped because its queue was full or writing paused, or found "
    "damaged by a read; and writes, reads and lookups that failed",
    {"event": ("written", "dropped", "damaged", "failed_writes", "failed_reads")},
)
#: Tiers for whose blocks prompts wait. Host memory is one of them for pools on GPUs.
SLOW_TIERS: Final = ("host", "disk", "peer", "store")
KV_FETCHED_BLOCKS: Final = _metric(
    "pdserve_kv_fetched_blocks_total",
    "counter",
    "worker",
    "KV blocks that prompts waited for, by tier; a miss was late, gone or not verified, and was computed",
    {"tier": SLOW_TIERS, "outcome": ("hit", "miss")},
)
KV_FETCH_TIME: Final = _metric(
    "pdserve_kv_fetch_seconds",
    "histogram",
    "worker",
    "time of a fetch of KV blocks, with the wait for earlier ones",
    {"tier": SLOW_TIERS},
    SHORT_BUCKETS,
)
KV_FETCH_PREDICTED: Final = _metric(
    "pdserve_kv_fetch_predicted_seconds_total",
    "counter",
    "worker",
    "predicted time of the fetches that have ended, to compare with the sum of pdserve_kv_fetch_seconds",
    {"tier": SLOW_TIERS},
)
KV_PULL_REQUESTS: Final = _metric(
    "pdserve_kv_pull_requests_total",
    "counter",
    "worker",
    "requests of other workers to pull cached KV, by the answer of this worker",
    {"answer": ("sent", "draining", "busy", "missing", "foreign", "restarted", "invalid")},
)
PREFILLED_TOKENS: Final = _metric("pdserve_prefilled_tokens_total", "counter", "worker", "prompt tokens computed")
REUSED_TOKENS: Final = _metric(
    "pdserve_reused_tokens_total", "counter", "worker", "prompt tokens found in the prefix cache"
)
SAMPLED_TOKENS: Final = _metric("pdserve_sampled_tokens_total", "counter", "worker", "tokens sampled")
DRAFT_TOKENS: Final = _metric(
    "pdserve_draft_tokens_total",
    "counter",
    "worker",
    "draft tokens of speculative decoding that were verified, by outcome",
    {"outcome": ("accepted", "rejected")},
)
SPECULATED_STEPS: Final = _metric(
    "pdserve_speculated_steps_total", "counter", "worker", "engine steps that verified draft tokens"
)
PREEMPTED: Final = _metric(
    "pdserve_preemptions_total", "counter", "worker", "sequences evicted for lack of KV blocks and computed again"
)
REJECTED_CALLS: Final = _metric(
    "pdserve_worker_rejected_calls_total",
    "counter",
    "worker",
    "calls rejected before their handler ran, by the error's reason",
    {"reason": _REASONS},
)
REJECTED_RANK_JOINS: Final = _metric(
    "pdserve_worker_rejected_rank_joins_total",
    "counter",
    "worker",
    "calls to a worker's rendezvous that were rejected, by reason: the error's, or VERSION (of another release), "
    "ALL_JOINED (no rank is missing), RANK_LOST (the worker is about to end)",
    {"reason": (*_REASONS, "VERSION", "ALL_JOINED", "RANK_LOST")},
)
REFUSED_BY_WORKER: Final = _metric(
    "pdserve_worker_refusals_total",
    "counter",
    "worker",
    "reservations and prefills that the worker rejected, by reason",
    {"reason": tuple(one.value for one in RefusalReason)},
)
INVALID_MESSAGES: Final = _metric(
    "pdserve_invalid_messages_total",
    "counter",
    "worker",
    "messages of routers that were rejected for a value out of range",
    {"field": "name of the message's field"},
)
TRANSFERS: Final = _metric(
    "pdserve_kv_transfers_total",
    "counter",
    "worker",
    "KV transfers that ended, by outcome; a cancelled one was no longer needed",
    {"outcome": ("committed", "failed", "cancelled")},
)
KV_MISTAKEN: Final = _metric(
    "pdserve_kv_mistaken_total",
    "counter",
    "worker",
    "sequences computed again because a KV block held other content than expected (worker.kv_check)",
)
TRANSFER_EVENTS: Final = _metric(
    "pdserve_kv_transfer_events_total",
    "counter",
    "worker",
    "unusual events in KV transfers, such as late messages, checksum mismatches and lost connections",
    {"event": _TRANSFER_EVENTS},
)
TRANSFER_BYTES_TOTAL: Final = _metric(
    "pdserve_kv_transfer_bytes_total", "counter", "worker", "KV bytes received and committed"
)
TRANSFER_SAVED_BYTES: Final = _metric(
    "pdserve_kv_transfer_saved_bytes_total",
    "counter",
    "worker",
    "KV bytes that were not transferred because the receiver already had them",
)
PUSHES: Final = _metric(
    "pdserve_kv_pushes_total",
    "counter",
    "worker",
    "prompts by when their KV was planned to be sent (worker.push); cached: answers that left a decode worker",
    {"plan": ("end", "chunk", "layers", "cached")},
)
TRANSFER_SENT_BYTES: Final = _metric(
    "pdserve_kv_sent_bytes_total",
    "counter",
    "worker",
    "KV bytes sent: early ones reached the receiver's host before the prompt's last chunk was computed",
    {"when": ("early", "late")},
)
TRANSFER_WIRE_BYTES: Final = _metric(
    "pdserve_kv_wire_bytes_total",
    "counter",
    "worker",
    "KV bytes sent, by their dtype during the transfer (worker.kv_wire)",
    {"dtype": "dtype of the KV during the transfer"},
)
TRANSFER_EXPOSED_TIME: Final = _metric(
    "pdserve_kv_exposed_seconds",
    "histogram",
    "worker",
    "time from the end of the prefill until the receiver confirmed the transfer, measured by the sender",
    buckets=TTFT_BUCKETS,
)
TRANSFER_BUSY_TIME: Final = _metric(
    "pdserve_kv_busy_seconds",
    "histogram",
    "worker",
    "part of a transfer's time with chunks in flight, measured by the receiver",
    buckets=TTFT_BUCKETS,
)
TRANSFER_HIDDEN_SHARE: Final = _metric(
    "pdserve_kv_hidden_ratio",
    "histogram",
    "worker",
    "share of a transfer's time that overlapped with the prefill: 1 - exposed / busy",
    buckets=SHARE_BUCKETS,
)
TRANSFER_TIME: Final = _metric(
    "pdserve_kv_transfer_seconds",
    "histogram",
    "worker",
    "time of a transfer from its first byte to commit, measured by the receiver",
    buckets=TTFT_BUCKETS,
)

# Launcher.
PROCESS_STARTS: Final = _metric(
    "pdserve_process_starts_total",
    "counter",
    "launcher",
    "starts of a process of the cluster; each start after the first follows an end that nobody asked for",
    {"process": "name of the process, such as p0, d0, router, gateway or redis"},
)

# --- gateway

HTTP_REQUESTS: Final = _metric(
    "pdserve_http_requests_total",
    "counter",
    "gateway",
    "requests, by path and status; 499: the client disconnected",
    {"path": "path of the route", "status": "HTTP status; of a stream that broke, the status of its error"},
)
HTTP_SHED: Final = _metric(
    "pdserve_http_requests_shed_total",
    "counter",
    "gateway",
    "requests that the gateway rejected before it read them, by the causes of pdserve_requests_shed_total",
    {"cause": SHED_CAUSES},
)
HTTP_RUNNING: Final = _metric("pdserve_http_requests_running", "gauge", "gateway", "requests in progress")
HTTP_TTFT: Final = _metric(
    "pdserve_http_ttft_seconds",
    "histogram",
    "gateway",
    "time from the headers of a request for a streamed answer to the first part of it",
    buckets=TTFT_BUCKETS,
)
HTTP_CONNECTIONS: Final = _metric(
    "pdserve_http_connections", "gauge", "gateway", "open connections; gateway.max_connections limits it"
)
HTTP_DROPPED: Final = _metric(
    "pdserve_http_dropped_connections_total",
    "counter",
    "gateway",
    "connections beyond the limit: idle ones that were closed for them, or themselves where none was idle",
)
