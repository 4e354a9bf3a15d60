from pdserve.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTopologyRequest(_message.Message):
    __slots__ = ("only_this_router",)
    ONLY_THIS_ROUTER_FIELD_NUMBER: _ClassVar[int]
    only_this_router: bool
    def __init__(self, only_this_router: _Optional[bool] = ...) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("router_id", "workers", "queued_requests", "running_requests", "uptime_s", "version", "num_routers", "num_answered")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    queued_requests: int
    running_requests: int
    uptime_s: float
    version: str
    num_routers: int
    num_answered: int
    def __init__(self, router_id: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., uptime_s: _Optional[float] = ..., version: _Optional[str] = ..., num_routers: _Optional[int] = ..., num_answered: _Optional[int] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "endpoint", "is_connected", "is_draining", "load", "num_blocks", "is_drained", "kv_links", "version", "revision")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    KV_LINKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: _worker_pb2.Role
    endpoint: str
    is_connected: bool
    is_draining: bool
    load: _worker_pb2.Load
    num_blocks: int
    is_drained: bool
    kv_links: _containers.RepeatedCompositeFieldContainer[_worker_pb2.KvLink]
    version: str
    revision: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., endpoint: _Optional[str] = ..., is_connected: _Optional[bool] = ..., is_draining: _Optional[bool] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., num_blocks: _Optional[int] = ..., is_drained: _Optional[bool] = ..., kv_links: _Optional[_Iterable[_Union[_worker_pb2.KvLink, _Mapping]]] = ..., version: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "only_this_router")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_THIS_ROUTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    only_this_router: bool
    def __init__(self, request_id: _Optional[str] = ..., only_this_router: _Optional[bool] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "candidates", "decision", "reason", "actual_ttft_s", "actual_tpot_s", "waited_s", "slo_ttft_s", "slo_tpot_s", "tenant", "priority", "prompt_tokens", "attempt", "is_resumed", "stage", "outcome", "ended_because", "retry_after_s", "router_id", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ENDED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    decision: str
    reason: str
    actual_ttft_s: float
    actual_tpot_s: float
    waited_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    tenant: str
    priority: int
    prompt_tokens: int
    attempt: int
    is_resumed: bool
    stage: str
    outcome: str
    ended_because: str
    retry_after_s: float
    router_id: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., actual_ttft_s: _Optional[float] = ..., actual_tpot_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., slo_ttft_s: _Optional[float] = ..., slo_tpot_s: _Optional[float] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., attempt: _Optional[int] = ..., is_resumed: _Optional[bool] = ..., stage: _Optional[str] = ..., outcome: _Optional[str] = ..., ended_because: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., router_id: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "predicted_ttft_s", "predicted_tpot_s", "slack", "is_feasible", "is_chosen", "cost", "preference", "pull", "reads")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    SLACK_FIELD_NUMBER: _ClassVar[int]
    IS_FEASIBLE_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    PREFERENCE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    slack: float
    is_feasible: bool
    is_chosen: bool
    cost: float
    preference: float
    pull: PullChoice
    reads: ReadChoice
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_tpot_s: _Optional[float] = ..., slack: _Optional[float] = ..., is_feasible: _Optional[bool] = ..., is_chosen: _Optional[bool] = ..., cost: _Optional[float] = ..., preference: _Optional[float] = ..., pull: _Optional[_Union[PullChoice, _Mapping]] = ..., reads: _Optional[_Union[ReadChoice, _Mapping]] = ...) -> None: ...

class PullChoice(_message.Message):
    __slots__ = ("source", "num_tokens", "pull_s", "recompute_s", "is_pulled", "source_read_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    IS_PULLED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_READ_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_tokens: int
    pull_s: float
    recompute_s: float
    is_pulled: bool
    source_read_s: float
    def __init__(self, source: _Optional[str] = ..., num_tokens: _Optional[int] = ..., pull_s: _Optional[float] = ..., recompute_s: _Optional[float] = ..., is_pulled: _Optional[bool] = ..., source_read_s: _Optional[float] = ...) -> None: ...

class ReadChoice(_message.Message):
    __slots__ = ("num_tokens", "read_s", "recompute_s")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    read_s: float
    recompute_s: float
    def __init__(self, num_tokens: _Optional[int] = ..., read_s: _Optional[float] = ..., recompute_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("period_s", "only_this_router")
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    ONLY_THIS_ROUTER_FIELD_NUMBER: _ClassVar[int]
    period_s: float
    only_this_router: bool
    def __init__(self, period_s: _Optional[float] = ..., only_this_router: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: LiveFrame
    def __init__(self, frame: _Optional[_Union[LiveFrame, _Mapping]] = ...) -> None: ...

class GetWorkerLogRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "folder")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChangeWorkersRequest(_message.Message):
    __slots__ = ("scale", "roll", "role")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    scale: ScaleWorkers
    roll: RollWorkers
    role: SetWorkerRole
    def __init__(self, scale: _Optional[_Union[ScaleWorkers, _Mapping]] = ..., roll: _Optional[_Union[RollWorkers, _Mapping]] = ..., role: _Optional[_Union[SetWorkerRole, _Mapping]] = ...) -> None: ...

class ScaleWorkers(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class RollWorkers(_message.Message):
    __slots__ = ("worker_ids", "surge", "settings", "is_undo", "model")
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    SURGE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IS_UNDO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    surge: int
    settings: str
    is_undo: bool
    model: str
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ..., surge: _Optional[int] = ..., settings: _Optional[str] = ..., is_undo: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class SetWorkerRole(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ...) -> None: ...

class ChangeWorkersResponse(_message.Message):
    __slots__ = ("worker_id", "text")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    text: str
    def __init__(self, worker_id: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GetDemandRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDemandResponse(_message.Message):
    __slots__ = ("incarnation", "sums", "queued", "running", "answers", "answer_tokens", "workers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sums: ArrivalSums
    queued: int
    running: int
    answers: int
    answer_tokens: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCapacity]
    def __init__(self, incarnation: _Optional[str] = ..., sums: _Optional[_Union[ArrivalSums, _Mapping]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., answers: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerCapacity, _Mapping]]] = ...) -> None: ...

class ArrivalSums(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "uncached_tokens", "uncached_squared", "token_context", "ttft_targets_s", "tpot_targets_s", "tokens", "answers", "answer_tokens", "met", "missed")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_SQUARED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGETS_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGETS_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: float
    uncached_tokens: float
    uncached_squared: float
    token_context: float
    ttft_targets_s: float
    tpot_targets_s: float
    tokens: float
    answers: int
    answer_tokens: float
    met: int
    missed: int
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[float] = ..., uncached_tokens: _Optional[float] = ..., uncached_squared: _Optional[float] = ..., token_context: _Optional[float] = ..., ttft_targets_s: _Optional[float] = ..., tpot_targets_s: _Optional[float] = ..., tokens: _Optional[float] = ..., answers: _Optional[int] = ..., answer_tokens: _Optional[float] = ..., met: _Optional[int] = ..., missed: _Optional[int] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("worker_id", "role", "is_connected", "is_draining", "is_drained", "rows", "kv_tokens", "max_batch", "max_batch_tokens", "cost")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    is_connected: bool
    is_draining: bool
    is_drained: bool
    rows: int
    kv_tokens: int
    max_batch: int
    max_batch_tokens: int
    cost: _worker_pb2.CostPrior
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., is_connected: _Optional[bool] = ..., is_draining: _Optional[bool] = ..., is_drained: _Optional[bool] = ..., rows: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., cost: _Optional[_Union[_worker_pb2.CostPrior, _Mapping]] = ...) -> None: ...

class GetScalingRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class GetScalingResponse(_message.Message):
    __slots__ = ("min_workers", "max_workers", "may_change_roles", "every_s", "trouble", "decisions")
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAY_CHANGE_ROLES_FIELD_NUMBER: _ClassVar[int]
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    min_workers: int
    max_workers: int
    may_change_roles: bool
    every_s: float
    trouble: str
    decisions: _containers.RepeatedCompositeFieldContainer[ScalingDecision]
    def __init__(self, min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., may_change_roles: _Optional[bool] = ..., every_s: _Optional[float] = ..., trouble: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[ScalingDecision, _Mapping]]] = ...) -> None: ...

class ScalingDecision(_message.Message):
    __slots__ = ("age_s", "change", "reason", "prefill", "decode", "seen_rate_rps", "queued", "running", "met", "missed", "now", "later", "alternatives", "outcome", "failure", "capacity_share")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SEEN_RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SHARE_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    change: str
    reason: str
    prefill: int
    decode: int
    seen_rate_rps: float
    queued: int
    running: int
    met: int
    missed: int
    now: ScalingDemand
    later: ScalingDemand
    alternatives: _containers.RepeatedCompositeFieldContainer[ScalingAlternative]
    outcome: ScalingOutcome
    failure: str
    capacity_share: float
    def __init__(self, age_s: _Optional[float] = ..., change: _Optional[str] = ..., reason: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., seen_rate_rps: _Optional[float] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., met: _Optional[int] = ..., missed: _Optional[int] = ..., now: _Optional[_Union[ScalingDemand, _Mapping]] = ..., later: _Optional[_Union[ScalingDemand, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[ScalingAlternative, _Mapping]]] = ..., outcome: _Optional[_Union[ScalingOutcome, _Mapping]] = ..., failure: _Optional[str] = ..., capacity_share: _Optional[float] = ...) -> None: ...

class ScalingDemand(_message.Message):
    __slots__ = ("rate_rps", "error", "prompt_tokens", "uncached_tokens", "output_tokens", "ttft_s", "tpot_s")
    RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    rate_rps: float
    error: float
    prompt_tokens: float
    uncached_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    def __init__(self, rate_rps: _Optional[float] = ..., error: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., uncached_tokens: _Optional[float] = ..., output_tokens: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class ScalingAlternative(_message.Message):
    __slots__ = ("change", "prefill", "decode", "attainment", "cost_s", "change_cost_s", "refused")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    CHANGE_COST_S_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    change: str
    prefill: int
    decode: int
    attainment: float
    cost_s: float
    change_cost_s: float
    refused: str
    def __init__(self, change: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., attainment: _Optional[float] = ..., cost_s: _Optional[float] = ..., change_cost_s: _Optional[float] = ..., refused: _Optional[str] = ...) -> None: ...

class ScalingOutcome(_message.Message):
    __slots__ = ("took_s", "expected_attainment", "seen_attainment", "expected_rate_rps", "seen_rate_rps")
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    SEEN_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    SEEN_RATE_RPS_FIELD_NUMBER: _ClassVar[int]
    took_s: float
    expected_attainment: float
    seen_attainment: float
    expected_rate_rps: float
    seen_rate_rps: float
    def __init__(self, took_s: _Optional[float] = ..., expected_attainment: _Optional[float] = ..., seen_attainment: _Optional[float] = ..., expected_rate_rps: _Optional[float] = ..., seen_rate_rps: _Optional[float] = ...) -> None: ...

class GetWorkerLogResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[_worker_pb2.LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[_worker_pb2.LogLine, _Mapping]]] = ...) -> None: ...

class LiveFrame(_message.Message):
    __slots__ = ("at_s", "queued", "running", "omitted", "totals", "workers", "requests", "version", "incarnation")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    queued: int
    running: int
    omitted: int
    totals: LiveTotals
    workers: _containers.RepeatedCompositeFieldContainer[LiveWorker]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    version: str
    incarnation: str
    def __init__(self, at_s: _Optional[float] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., omitted: _Optional[int] = ..., totals: _Optional[_Union[LiveTotals, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[LiveWorker, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., version: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LiveTotals(_message.Message):
    __slots__ = ("arrived", "served", "late", "rejected", "cancelled", "expired", "failed", "output_tokens", "transfer_bytes")
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    arrived: int
    served: int
    late: int
    rejected: int
    cancelled: int
    expired: int
    failed: int
    output_tokens: int
    transfer_bytes: int
    def __init__(self, arrived: _Optional[int] = ..., served: _Optional[int] = ..., late: _Optional[int] = ..., rejected: _Optional[int] = ..., cancelled: _Optional[int] = ..., expired: _Optional[int] = ..., failed: _Optional[int] = ..., output_tokens: _Optional[int] = ..., transfer_bytes: _Optional[int] = ...) -> None: ...

class LiveWorker(_message.Message):
    __slots__ = ("worker_id", "role", "endpoint", "is_connected", "is_draining", "is_drained", "running", "waiting", "booked", "num_blocks", "free_blocks", "cached_blocks", "context_tokens", "pending_prefill_tokens", "steps", "step_s", "silent_s", "preemptions", "version", "revision")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BOOKED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    endpoint: str
    is_connected: bool
    is_draining: bool
    is_drained: bool
    running: int
    waiting: int
    booked: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    context_tokens: int
    pending_prefill_tokens: int
    steps: int
    step_s: float
    silent_s: float
    preemptions: int
    version: str
    revision: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., endpoint: _Optional[str] = ..., is_connected: _Optional[bool] = ..., is_draining: _Optional[bool] = ..., is_drained: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., booked: _Optional[int] = ..., num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., context_tokens: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., silent_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., version: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class LivePhases(_message.Message):
    __slots__ = ("names", "begins_s", "seconds")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    begins_s: _containers.RepeatedScalarFieldContainer[float]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., begins_s: _Optional[_Iterable[float]] = ..., seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "stage", "tenant", "priority", "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens", "prefill_worker", "decode_worker", "attempt", "preemptions", "arrived_s", "ended_s", "outcome", "why", "retry_after_s", "ttft_s", "tpot_s", "slo_ttft_s", "slo_tpot_s", "predicted_ttft_s", "predicted_tpot_s", "transfer_bytes", "transfer_s", "phases")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    stage: str
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    prefill_worker: str
    decode_worker: str
    attempt: int
    preemptions: int
    arrived_s: float
    ended_s: float
    outcome: str
    why: str
    retry_after_s: float
    ttft_s: float
    tpot_s: float
    slo_ttft_s: float
    slo_tpot_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    transfer_bytes: int
    transfer_s: float
    phases: LivePhases
    def __init__(self, request_id: _Optional[str] = ..., stage: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempt: _Optional[int] = ..., preemptions: _Optional[int] = ..., arrived_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., outcome: _Optional[str] = ..., why: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., slo_ttft_s: _Optional[float] = ..., slo_tpot_s: _Optional[float] = ..., predicted_ttft_s: _Optional[float] = ..., predicted_tpot_s: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., phases: _Optional[_Union[LivePhases, _Mapping]] = ...) -> None: ...
