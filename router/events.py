"""The events of a router: every input of RouterState.handle. Pure data.

The messages of workers are those of pdserve/core/protocol.py; what else can happen is here. The simulator makes the
same ones. All survive `router.replay.encode` and back. None contains prompt text or prompt token ids, so a recording of
a live router can be shared. It does contain the output tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.latency import CostPrior
from pdserve.core.protocol import WorkerMessage
from pdserve.core.types import RequestAttributes, Role, Sampling, Slo

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
    spent_s: float = 0.0  # since the call arrived: tokenising, index lookup; part of the TTFT
    lookup_s: float = 0.0  # the part for the index lookup
    deadline_s: float | None = None  # time that remains at arrival; None: none
    tenant: str = ""
    block_hashes: tuple[bytes, ...] = ()  # hashes of the prompt's full blocks
    cached_blocks: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading prompt blocks it may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """The client closed its stream or cancelled. Nothing more is sent to it."""

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
    """Both sides have exchanged hellos. A known worker comes back empty: its old attempts are lost."""

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
    cost: CostPrior = field(default_factory=CostPrior)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The stream to the worker ended. The worker has cancelled everything of this router, or is dead."""

    worker_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten:
    """The runtime no longer connects: the worker has left the registry for good."""

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
    """The router takes no new requests; known ones go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The answer to WakeAt. Has no effect at other times."""


ClientEvent = RequestArrived | ClientLeft | StopMatched
WorkerEvent = WorkerConnected | WorkerLost | WorkerForgotten | WorkerMessage
Event = ClientEvent | WorkerEvent | DrainRequested | UndrainRequested | RouterClosing | TimePassed
