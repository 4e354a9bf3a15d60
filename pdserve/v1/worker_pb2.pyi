from pdserve.v1 import inference_pb2 as _inference_pb2
from pdserve.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_INBOX_FULL: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_BLOCKS: _ClassVar[RefusalReason]
    REFUSAL_REASON_DRAINING: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_LARGE: _ClassVar[RefusalReason]
    REFUSAL_REASON_DEADLINE: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_ADAPTER: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_KV: _ClassVar[RefusalReason]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_DEADLINE: _ClassVar[FailureKind]
    FAILURE_KIND_INTERNAL: _ClassVar[FailureKind]
    FAILURE_KIND_INVALID: _ClassVar[FailureKind]
    FAILURE_KIND_TRANSFER: _ClassVar[FailureKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_INBOX_FULL: RefusalReason
REFUSAL_REASON_NO_BLOCKS: RefusalReason
REFUSAL_REASON_DRAINING: RefusalReason
REFUSAL_REASON_TOO_LARGE: RefusalReason
REFUSAL_REASON_DEADLINE: RefusalReason
REFUSAL_REASON_NO_ADAPTER: RefusalReason
REFUSAL_REASON_NO_KV: RefusalReason
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_DEADLINE: FailureKind
FAILURE_KIND_INTERNAL: FailureKind
FAILURE_KIND_INVALID: FailureKind
FAILURE_KIND_TRANSFER: FailureKind

class ChangeRoleRequest(_message.Message):
    __slots__ = ("role", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    settings: _containers.ScalarMap[str, str]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ("needs_restart", "incarnation")
    NEEDS_RESTART_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    incarnation: str
    def __init__(self, needs_restart: _Optional[_Iterable[str]] = ..., incarnation: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "reserve", "prefill", "admit", "cancel", "drain", "batch", "undrain", "read_log", "load_adapter", "drop_load", "set_adapter", "set_pace", "end_text")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    READ_LOG_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DROP_LOAD_FIELD_NUMBER: _ClassVar[int]
    SET_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SET_PACE_FIELD_NUMBER: _ClassVar[int]
    END_TEXT_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    reserve: Reserve
    prefill: Prefill
    admit: Admit
    cancel: Cancel
    drain: DrainWorker
    batch: AttachRequests
    undrain: UndrainWorker
    read_log: ReadLog
    load_adapter: LoadAdapter
    drop_load: DropLoad
    set_adapter: Adapter
    set_pace: SetPace
    end_text: EndText
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[DrainWorker, _Mapping]] = ..., batch: _Optional[_Union[AttachRequests, _Mapping]] = ..., undrain: _Optional[_Union[UndrainWorker, _Mapping]] = ..., read_log: _Optional[_Union[ReadLog, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., drop_load: _Optional[_Union[DropLoad, _Mapping]] = ..., set_adapter: _Optional[_Union[Adapter, _Mapping]] = ..., set_pace: _Optional[_Union[SetPace, _Mapping]] = ..., end_text: _Optional[_Union[EndText, _Mapping]] = ...) -> None: ...

class AttachRequests(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[AttachRequest]
    def __init__(self, messages: _Optional[_Iterable[_Union[AttachRequest, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "wants_kv_events", "reads_batches", "version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WANTS_KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    READS_BATCHES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: str
    wants_kv_events: bool
    reads_batches: bool
    version: str
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[str] = ..., wants_kv_events: _Optional[bool] = ..., reads_batches: _Optional[bool] = ..., version: _Optional[str] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_token_ids", "output_token_ids", "sampling", "deadline_s", "traceparent", "cache_salt", "tpot_s", "priority", "session_id", "itl_s", "ttft_s", "waited_s", "adapter", "reuse_within_s", "source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REUSE_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    deadline_s: float
    traceparent: str
    cache_salt: bytes
    tpot_s: float
    priority: int
    session_id: str
    itl_s: float
    ttft_s: float
    waited_s: float
    adapter: str
    reuse_within_s: float
    source: PrefixSource
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., tpot_s: _Optional[float] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., itl_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., adapter: _Optional[str] = ..., reuse_within_s: _Optional[float] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker_id", "incarnation", "endpoint", "num_tokens", "predicted_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    endpoint: str
    num_tokens: int
    predicted_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., endpoint: _Optional[str] = ..., num_tokens: _Optional[int] = ..., predicted_s: _Optional[float] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("sequence", "is_local")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    is_local: bool
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., is_local: _Optional[bool] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("sequence", "grant")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    grant: bytes
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., grant: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("request_id", "attempt", "first_token_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    first_token_id: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class DrainWorker(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainWorker(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndText(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReadLog(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPace(_message.Message):
    __slots__ = ("interval_s", "tokens_interval_s")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    tokens_interval_s: float
    def __init__(self, interval_s: _Optional[float] = ..., tokens_interval_s: _Optional[float] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint", "version", "folder")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    version: int
    folder: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("name", "folder", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    version: int
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class DropLoad(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("name", "version", "fingerprint", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    fingerprint: str
    error: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("named", "loaded")
    NAMED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    named: _containers.RepeatedCompositeFieldContainer[Adapter]
    loaded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, named: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., loaded: _Optional[_Iterable[str]] = ...) -> None: ...

class RecentLog(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("at_unix_s", "level", "text")
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    at_unix_s: float
    level: str
    text: str
    def __init__(self, at_unix_s: _Optional[float] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("hello", "load", "granted", "refused", "first_token", "transfer_ended", "tokens", "failed", "released", "kv_events", "batch_timed", "prompt_scored", "batch", "kv_links", "log", "adapters", "adapter_loaded", "pull_ended")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TIMED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    KV_LINKS_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    PULL_ENDED_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    load: Load
    granted: Granted
    refused: Refused
    first_token: FirstToken
    transfer_ended: TransferEnded
    tokens: Tokens
    failed: Failed
    released: Released
    kv_events: KvEvents
    batch_timed: BatchTimed
    prompt_scored: PromptScored
    batch: AttachResponses
    kv_links: KvLinks
    log: RecentLog
    adapters: Adapters
    adapter_loaded: AdapterLoaded
    pull_ended: PullEnded
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., transfer_ended: _Optional[_Union[TransferEnded, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., batch_timed: _Optional[_Union[BatchTimed, _Mapping]] = ..., prompt_scored: _Optional[_Union[PromptScored, _Mapping]] = ..., batch: _Optional[_Union[AttachResponses, _Mapping]] = ..., kv_links: _Optional[_Union[KvLinks, _Mapping]] = ..., log: _Optional[_Union[RecentLog, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., adapter_loaded: _Optional[_Union[AdapterLoaded, _Mapping]] = ..., pull_ended: _Optional[_Union[PullEnded, _Mapping]] = ...) -> None: ...

class AttachResponses(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[AttachResponse]
    def __init__(self, messages: _Optional[_Iterable[_Union[AttachResponse, _Mapping]]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "model", "fingerprint", "block_size", "num_blocks", "max_context_tokens", "vocab_size", "eos_token_ids", "max_batch", "max_batch_tokens", "inbox_depth", "cost", "hash_seed", "reads_batches", "version", "adapters", "grammar_library", "sends_kv", "revision", "pulls_kv", "ends_texts")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INBOX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    READS_BATCHES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_LIBRARY_FIELD_NUMBER: _ClassVar[int]
    SENDS_KV_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PULLS_KV_FIELD_NUMBER: _ClassVar[int]
    ENDS_TEXTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    model: str
    fingerprint: _transfer_pb2.Fingerprint
    block_size: int
    num_blocks: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_batch: int
    max_batch_tokens: int
    inbox_depth: int
    cost: CostPrior
    hash_seed: bytes
    reads_batches: bool
    version: str
    adapters: Adapters
    grammar_library: str
    sends_kv: bool
    revision: str
    pulls_kv: bool
    ends_texts: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[_transfer_pb2.Fingerprint, _Mapping]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_batch: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., inbox_depth: _Optional[int] = ..., cost: _Optional[_Union[CostPrior, _Mapping]] = ..., hash_seed: _Optional[bytes] = ..., reads_batches: _Optional[bool] = ..., version: _Optional[str] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., grammar_library: _Optional[str] = ..., sends_kv: _Optional[bool] = ..., revision: _Optional[str] = ..., pulls_kv: _Optional[bool] = ..., ends_texts: _Optional[bool] = ...) -> None: ...

class CostPrior(_message.Message):
    __slots__ = ("prefill_base_s", "prefill_per_token_s", "prefill_per_token_context_s", "decode_base_s", "decode_per_row_s", "decode_per_context_token_s")
    PREFILL_BASE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PER_TOKEN_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PER_ROW_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_PER_CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token_context_s: float
    decode_base_s: float
    decode_per_row_s: float
    decode_per_context_token_s: float
    def __init__(self, prefill_base_s: _Optional[float] = ..., prefill_per_token_s: _Optional[float] = ..., prefill_per_token_context_s: _Optional[float] = ..., decode_base_s: _Optional[float] = ..., decode_per_row_s: _Optional[float] = ..., decode_per_context_token_s: _Optional[float] = ...) -> None: ...

class KvLinks(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[KvLink]
    def __init__(self, links: _Optional[_Iterable[_Union[KvLink, _Mapping]]] = ...) -> None: ...

class KvLink(_message.Message):
    __slots__ = ("decode_worker", "transport", "reason")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    transport: str
    reason: str
    def __init__(self, decode_worker: _Optional[str] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("steps", "free_blocks", "evictable_blocks", "running", "waiting", "context_tokens", "pending_prefill_tokens", "is_draining", "is_drained", "preemptions", "tiers")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    free_blocks: int
    evictable_blocks: int
    running: int
    waiting: int
    context_tokens: int
    pending_prefill_tokens: int
    is_draining: bool
    is_drained: bool
    preemptions: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierSpeed]
    def __init__(self, steps: _Optional[int] = ..., free_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., context_tokens: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., is_draining: _Optional[bool] = ..., is_drained: _Optional[bool] = ..., preemptions: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierSpeed, _Mapping]]] = ...) -> None: ...

class TierSpeed(_message.Message):
    __slots__ = ("tier", "block_s", "fixed_s", "queue_s", "is_at_once", "most_given")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    IS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    MOST_GIVEN_FIELD_NUMBER: _ClassVar[int]
    tier: int
    block_s: float
    fixed_s: float
    queue_s: float
    is_at_once: bool
    most_given: int
    def __init__(self, tier: _Optional[int] = ..., block_s: _Optional[float] = ..., fixed_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., is_at_once: _Optional[bool] = ..., most_given: _Optional[int] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("request_id", "attempt", "grant", "grant_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GRANT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    grant: bytes
    grant_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., grant: _Optional[bytes] = ..., grant_s: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "attempt", "reason", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: RefusalReason
    retry_after_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_inference_pb2.TopLogprob, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("request_id", "attempt", "token", "queue_s", "prefill_s", "cached_tokens", "finish")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token: Token
    queue_s: float
    prefill_s: float
    cached_tokens: int
    finish: _inference_pb2.FinishReason
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("request_id", "attempt", "scores")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    scores: _inference_pb2.PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., scores: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class TransferEnded(_message.Message):
    __slots__ = ("request_id", "attempt", "is_committed", "transfer_s", "num_bytes", "error", "busy_s", "exposed_s", "saved_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    is_committed: bool
    transfer_s: float
    num_bytes: int
    error: str
    busy_s: float
    exposed_s: float
    saved_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., is_committed: _Optional[bool] = ..., transfer_s: _Optional[float] = ..., num_bytes: _Optional[int] = ..., error: _Optional[str] = ..., busy_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., saved_bytes: _Optional[int] = ...) -> None: ...

class PullEnded(_message.Message):
    __slots__ = ("request_id", "attempt", "source", "num_tokens", "num_bytes", "busy_s", "pull_s", "error", "is_unreachable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    source: str
    num_tokens: int
    num_bytes: int
    busy_s: float
    pull_s: float
    error: str
    is_unreachable: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., source: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., pull_s: _Optional[float] = ..., error: _Optional[str] = ..., is_unreachable: _Optional[bool] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("rows", "plain")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[TokenRow]
    plain: PlainTokens
    def __init__(self, rows: _Optional[_Iterable[_Union[TokenRow, _Mapping]]] = ..., plain: _Optional[_Union[PlainTokens, _Mapping]] = ...) -> None: ...

class PlainTokens(_message.Message):
    __slots__ = ("request_ids", "attempts", "output_indexes", "token_ids")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    output_indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., output_indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenRow(_message.Message):
    __slots__ = ("request_id", "attempt", "output_index", "tokens", "finish", "decode_s", "preemptions", "queue_s", "prefill_s", "cached_tokens", "decode_queue_s", "preempted_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    output_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish: _inference_pb2.FinishReason
    decode_s: float
    preemptions: int
    queue_s: float
    prefill_s: float
    cached_tokens: int
    decode_queue_s: float
    preempted_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., output_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., decode_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., decode_queue_s: _Optional[float] = ..., preempted_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "attempt", "kind", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    kind: FailureKind
    message: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("sequence", "is_snapshot", "stored", "removed", "tiers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    is_snapshot: bool
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    tiers: bytes
    def __init__(self, sequence: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class BatchTimed(_message.Message):
    __slots__ = ("rows", "prefill_tokens", "prefill_token_context", "context_tokens", "step_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    rows: int
    prefill_tokens: int
    prefill_token_context: float
    context_tokens: int
    step_s: float
    def __init__(self, rows: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_token_context: _Optional[float] = ..., context_tokens: _Optional[int] = ..., step_s: _Optional[float] = ...) -> None: ...
