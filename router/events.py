"""What can happen to a router: every input of RouterState.handle. Pure data.

The runtime turns client calls and worker messages into these; the simulator makes the same ones. All are frozen
and survive `router.replay.encode` and back. None holds prompt text or prompt token ids, so a recording of a
live router can be shared; it does hold the tokens that were answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtransfer.transport import Grant
from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.latency import CostPrior
from pdserve.core.types import FinishReason, RequestAttributes, Role, Sampling, Slo, TokenOut

# -- from clients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived(RequestAttributes):
    """A validated, tokenised request, after the prefix index was asked.

    `request_id` is unique among the requests that this router still knows. `sampling` is complete (seed
    included). The runtime keeps the prompt itself and adds it to Reserve and Prefill when it sends them.
    """

    request_id: str
    num_prompt_tokens: int
    sampling: Sampling
    slo: Slo
    spent_s: float = 0.0  # since the call came in: tokenising, asking the index; part of the TTFT
    lookup_s: float = 0.0  # of it, asking the index
    deadline_s: float | None = None  # time that remains at arrival; None: none
    tenant: str = ""
    block_hashes: tuple[bytes, ...] = ()  # of the prompt's full blocks
    cached_blocks: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading prompt blocks it may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """The caller closed its stream or cancelled. Nothing more is sent to it."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatched:
    """The runtime found a stop string in the text.

    `num_output_tokens` is the number of output tokens that belong to the answer (the one that completed the stop
    string included); tokens after it are not counted as used.
    """

    request_id: str
    num_output_tokens: int


# -- from workers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConnected:
    """Both sides said hello. A worker that was known before comes back empty: its old attempts are lost."""

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
    block_bytes: int = 0  # 0: not known
    cost: CostPrior = field(default_factory=CostPrior)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to the worker ended. The worker has cancelled everything of this router, or is dead."""

    worker_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten:
    """The runtime gave up dialling: the worker left the registry for good."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """The worker's own account, sent on every heartbeat."""

    worker_id: str
    steps: int
    free_blocks: int
    evictable_blocks: int = 0  # unreferenced blocks of the prefix cache
    running: int = 0
    waiting: int = 0
    context_tokens: int = 0
    pending_prefill_tokens: int = 0
    is_draining: bool = False
    is_drained: bool = False  # by an operator, who may take it back


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimed:
    """One finished batch, or the mean of consecutive decode batches of as many rows, for the cost model."""

    worker_id: str
    rows: int  # decode rows
    prefill_tokens: int
    prefill_token_context: float  # sum over prefill rows of tokens * (cached + tokens / 2)
    context_tokens: int  # of the decode rows
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The decode worker holds a landing place (`grant`) or, for a local attempt, a seat (None)."""

    worker_id: str
    request_id: str
    attempt: int
    grant: Grant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The worker did not take the attempt and holds nothing for it. Either role may refuse."""

    worker_id: str
    request_id: str
    attempt: int
    reason: RefusalReason
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prefill worker drew the first token; durations are its own."""

    worker_id: str
    request_id: str
    attempt: int
    token: TokenOut
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    finish: FinishReason | None = None  # set when it is also the last


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEnded:
    """KV is verified and committed, or is not to be had. May come before FirstToken: the streams differ.

    From the prefill worker, committed: all is acknowledged, and `exposed_s` is what its computing did not hide.
    """

    worker_id: str
    request_id: str
    attempt: int
    is_committed: bool
    transfer_s: float = 0.0
    busy_s: float = 0.0  # of it, with chunks on their way
    exposed_s: float = 0.0
    num_bytes: int = 0
    saved_bytes: int = 0  # that the decode worker had already
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Tokens of one request out of one decode step."""

    request_id: str
    attempt: int
    output_index: int  # of the first of these tokens among the request's output tokens
    tokens: tuple[TokenOut, ...]
    finish: FinishReason | None = None
    decode_s: float = 0.0  # decoding since what was reported before; with the last row, and after a preemption
    decode_queue_s: float = 0.0  # with a remote attempt's first row: KV and first token were there, no step was free
    preempted_s: float = 0.0  # with the first row after a preemption; its decode_s is what was before
    preemptions: int = 0
    queue_s: float = 0.0  # with a local attempt's first row, as the next two
    prefill_s: float = 0.0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """One decode step of one worker, all of this router's requests in it."""

    worker_id: str
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """The attempt is over on this worker; Released follows."""

    worker_id: str
    request_id: str
    attempt: int
    kind: FailureKind
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The worker holds nothing more of the attempt."""

    worker_id: str
    request_id: str
    attempt: int


# -- from operators and the clock --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """An operator wants no new work on a worker."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainRequested:
    """An operator takes DrainRequested back, whichever router it came to."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterClosing:
    """The router takes no new requests; known ones go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The answer to WakeAt. Harmless at any other time."""


ClientEvent = RequestArrived | ClientLeft | StopMatched
AttemptEvent = Granted | Refused | FirstToken | TransferEnded | AttemptFailed | Released
WorkerEvent = WorkerConnected | WorkerLost | WorkerForgotten | LoadReported | BatchTimed | TokensArrived | AttemptEvent
Event = ClientEvent | WorkerEvent | DrainRequested | UndrainRequested | RouterClosing | TimePassed
