"""What the live view shows of a router: one frame at a time, without the text of prompts and answers. Pure data.

Times without another origin are seconds of the router's own monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.types import Role

PERIOD_S: Final = 0.25  # between two frames, unless a viewer asks for another


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePhase:
    phase: str  # of pdserve.core.phases
    begin_s: float  # after the request's arrival
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that is in progress or has ended. The last phase of one in progress is still open."""

    request_id: str
    stage: str  # "ended" after the end
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    prefill_worker: str  # empty while there is none, and on the local path
    decode_worker: str
    attempt: int
    preemptions: int
    arrived_s: float
    ended_s: float | None
    outcome: str  # empty while it is in progress
    why: str  # if it did not get its whole answer
    retry_after_s: float | None  # of a rejection
    ttft_s: float | None
    tpot_s: float | None  # over the tokens so far
    slo_ttft_s: float
    slo_tpot_s: float
    predicted_ttft_s: float | None  # of the placement that was chosen, from the decision on
    predicted_tpot_s: float | None
    transfer_bytes: int
    transfer_s: float
    phases: tuple[LivePhase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    worker_id: str
    role: Role
    endpoint: str
    is_connected: bool
    is_draining: bool
    is_drained: bool  # by an operator
    running: int
    waiting: int
    booked: int  # requests of this router
    num_blocks: int
    free_blocks: int
    cached_blocks: int  # of the prefix cache, which no sequence uses
    context_tokens: int
    pending_prefill_tokens: int
    steps: int
    step_s: float  # of the last step that it reported; 0: none
    silent_s: float
    preemptions: int  # of sequences, for lack of KV blocks, since the worker's start


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTotals:
    """Counts since the start of the router."""

    arrived: int = 0
    served: int = 0
    late: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    output_tokens: int = 0  # of ended requests
    transfer_bytes: int = 0  # of ended requests


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFrame:
    at_s: float
    queued: int
    running: int
    omitted: int  # requests in progress, beyond the most of one frame
    totals: LiveTotals
    workers: tuple[LiveWorker, ...]
    requests: tuple[LiveRequest, ...]  # in progress, and ended since the frame before
