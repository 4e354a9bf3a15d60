"""The interface of RouterState: its inputs (events), its outputs (commands) and its settings. Pure data.

Workers' messages and commands to workers are defined in pdserve/core/protocol.py, all other events and commands here.
All are frozen, and `router.recording.replay` can encode and decode them. The simulator creates the same events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdserve.core import errors
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError
from pdserve.core.kv.tier_reads import TierDepths
from pdserve.core.protocol import WorkerCommand, WorkerMessage
from pdserve.core.results import Slice, Timings, Usage
from pdserve.core.types import FinishReason, RequestAttributes, Role, Sampling, Slo, TokenOut

# --- events ---------------------------------------------------------------------------------------------------
# No event contains prompt text or prompt token ids, so a recording of a live router reveals no prompts. It does contain
# the output tokens.

# -- from clients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived(RequestAttributes):
    """A validated and tokenized request, after the lookup in the prefix index.

    `request_id` is unique among the requests that this router still knows. `sampling` always has a seed. The runtime
    keeps the prompt itself, and adds it to Reserve and Prefill when it sends them.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: Sampling
    slo: Slo
    spent_s: float = 0.0  # time since the call arrived (tokenizing, index lookup); part of the TTFT
    lookup_s: float = 0.0  # the part of `spent_s` for the index lookup
    deadline_s: float | None = None  # remaining time at arrival; None: no deadline
    tenant: str = ""
    block_hashes: tuple[bytes, ...] = ()  # hashes of the prompt's full blocks
    cached_blocks: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading prompt blocks it may hold
    cached_tiers: Mapping[str, TierDepths] = field(default_factory=dict)  # of the workers whose pool lacks some of them
    adapter: str = ""  # fingerprint of its LoRA adapter; empty: the model alone
    adapter_name: str = ""
    weights: str = ""  # identity of those that should compute it, whose blocks `block_hashes` are
    keeps_weights: bool = False  # also before its first token, because of other answers of its call
    output_ids: tuple[int, ...] = ()  # of a resumed answer: the tokens that its client has from another router
    finish: FinishReason | None = None  # the answer ends with `output_ids`, and only its end is missing
    expected_tokens: int | None = None  # of the answer, by its client
    slo_task_s: float | None = None  # deadline of its task, from the task's first turn on; `slo` follows from it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """The client closed its stream or cancelled. It receives no further messages."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """A client expects no further turn of its session."""

    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """The runtime found a stop string in the text.

    `num_output_tokens` is the number of output tokens that belong to the answer, including the one that completed the
    stop string. Later tokens are not counted in the usage.
    """

    request_id: str
    num_output_tokens: int


# -- from workers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConnected:
    """Router and worker have exchanged hellos. If the router knew the worker before, its old attempts are lost."""

    worker_id: str
    incarnation: str
    role: Role
    endpoint: str = ""
    block_size: int
    num_blocks: int
    max_context_tokens: int
    max_batch: int  # sequences in one step
    max_batch_tokens: int  # prompt tokens in one step
    inbox_depth: int
    block_bytes: int = 0  # 0: unknown
    version: str = ""  # with its build; empty if unknown
    cost: CostPrior = field(default_factory=CostPrior)
    adapters: tuple[str, ...] = ()  # fingerprints of the LoRA adapters that it can compute
    sends_kv: bool = False  # a decode worker that can send the KV of its answers to another one
    pulls_kv: bool = False  # it pulls cached KV from other workers, and gives them its own
    ends_texts: bool = False  # it reads EndText
    weights: str = ""  # their identity
    revision: str = ""  # name of the weights for operators; empty: those of the cluster's start


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersChanged:
    """The worker has loaded or freed LoRA adapters. `adapters` are all fingerprints that it can compute now."""

    worker_id: str
    adapters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to the worker ended. The worker has cancelled all requests of this router, or is dead."""

    worker_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten:
    """The worker has left the registry, so the runtime no longer connects to it."""

    worker_id: str


# -- from operators and the clock --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """An operator stops new work on a worker."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainRequested:
    """An operator undoes DrainRequested, through any router."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterClosing:
    """The router accepts no new requests, and finishes those that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    """The router ends. Requests that have not ended fail, so that their clients get an error rather than a lost
    connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The time of a WakeAt has come. Has no effect at other times."""


ClientEvent = RequestArrived | ClientLeft | StopMatched | SessionEnded
WorkerEvent = WorkerConnected | AdaptersChanged | WorkerLost | WorkerForgotten | WorkerMessage
Event = ClientEvent | WorkerEvent | DrainRequested | UndrainRequested | RouterClosing | DrainEnded | TimePassed


# --- commands -------------------------------------------------------------------------------------------------
# The runtime executes the commands of one call in order. It drops a command for a worker whose stream has ended; a
# WorkerLost event follows and corrects the state.


class Outcome(Enum):
    """How a request ended; used as a metric label."""

    SERVED = "served"  # finished within its SLO
    LATE = "late"  # finished, but missed its SLO
    REJECTED = "rejected"  # never placed: overload, or no worker
    CANCELLED = "cancelled"  # the client disconnected
    EXPIRED = "expired"  # its deadline passed
    FAILED = "failed"


class FailKind(Enum):
    """Which error of pdserve.core.errors the client receives."""

    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    UNAVAILABLE = "unavailable"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE = "deadline"
    INVALID = "invalid"
    TRANSFER = "transfer"
    KV_LOST = "kv_lost"
    INTERNAL = "internal"


# -- to clients --------------------------------------------------------------------------------------------------


# Never changed, but not frozen, as TokenOut.
@dataclass(slots=True, kw_only=True)
class EmitTokens:
    """Tokens for the client; contiguous over all attempts of a request."""

    request_id: str
    first_index: int  # position of tokens[0] among the request's output tokens
    tokens: tuple[TokenOut, ...]
    weights: str = ""  # that compute the answer; only with the first tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """The answer is complete. The last message to this client."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    outcome: Outcome
    slices: tuple[Slice, ...] = ()  # the phases in order; they become spans


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """The request ends with an error (`to_error`). The last message to this client."""

    request_id: str
    kind: FailKind
    message: str
    outcome: Outcome
    retry_after_s: float | None = None
    role: str = ""  # NO_WORKERS: the missing role
    stage: str = ""  # DEADLINE: the request's stage
    field: str = ""  # INVALID: the request's field
    timings: Timings | None = None
    slices: tuple[Slice, ...] = ()

    def to_error(self) -> errors.PdserveError:
        match self.kind:
            case FailKind.OVERLOADED:
                return errors.Overloaded(self.message, self.retry_after_s if self.retry_after_s is not None else 1.0)
            case FailKind.NO_WORKERS:
                return errors.NoWorkers.from_message(self.message, self.role, self.retry_after_s)
            case FailKind.UNAVAILABLE:
                return errors.Unavailable(self.message, self.retry_after_s)
            case FailKind.SHUTTING_DOWN:
                return errors.ShuttingDown(self.retry_after_s)
            case FailKind.DEADLINE:
                return errors.DeadlineExceeded(self.stage)
            case FailKind.INVALID:
                expected = (
                    "one that a worker can run" if self.field == "request" else "one that compiles and can be met"
                )
                return errors.InvalidRequest(self.field, self.message, expected)
            case FailKind.TRANSFER:
                return errors.TransferFailed(self.message)
            case FailKind.KV_LOST:
                return errors.KvLost(self.message)
            case FailKind.INTERNAL:
                return errors.InternalError(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCancelled:
    """The request ends without a message, because the client has disconnected. For metrics and traces."""

    request_id: str
    num_output_tokens: int
    timings: Timings
    slices: tuple[Slice, ...] = ()


# -- to the clock ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Asks for a TimePassed event at `at_s`, by the clock of now_s. It replaces all earlier WakeAt commands."""

    at_s: float


ClientCommand = EmitTokens | FinishRequest | FailRequest | EndCancelled
Command = WorkerCommand | ClientCommand | WakeAt


# --- settings -------------------------------------------------------------------------------------------------
# The first line of every recording.


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything that influences a router's decisions. A recording needs no other settings."""

    policy: str = "goodput"
    rules_off: tuple[str, ...] = ()  # names of router.policy.interface, for the goodput policy
    local_max_uncached_tokens: int = 16  # a decode worker preferably computes prompts up to this length itself
    max_queue: int = 1024
    # Attempts that may be lost without progress before the request fails. Those that are declined do not count, nor
    # those that are lost with a worker that was not computing the request.
    max_attempts: int = 4
    max_worker_deaths: int = 2  # a request fails if so many workers have crashed while they computed it
    worker_silence_s: float = 5.0  # then a worker gets no new requests; after twice the time its attempts are moved
    # How long requests wait for a decode worker to reconnect. Longer than the watchdog takes to end a hung worker
    # (WorkerConfig.stall_s) plus the load time of its successor. Clients that cannot wait set a deadline.
    workers_grace_s: float = 60.0
    explain_capacity: int = 1024  # number of requests whose explanation is kept
    is_strict: bool = False  # raise IllegalMove instead of counting it

    def __post_init__(self) -> None:
        for name, low in (
            ("local_max_uncached_tokens", 0),
            ("max_queue", 0),
            ("max_attempts", 1),
            ("max_worker_deaths", 1),
            ("explain_capacity", 0),
        ):
            if getattr(self, name) < low:
                raise ConfigError(name, getattr(self, name), f"at least {low}")
        for name in ("worker_silence_s", "workers_grace_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(name, getattr(self, name), "at least 0")
