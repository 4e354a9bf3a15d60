"""The events of a router: every input of RouterState.handle. Pure data.

Workers' messages are defined in pdserve/core/protocol.py, all other events here. The simulator creates the same events.
`router.recording.replay` can encode and decode all of them. No event contains prompt text or prompt token ids, so a
recording of a live router reveals no prompts. It does contain the output tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.cost.latency import CostPrior
from pdserve.core.protocol import WorkerMessage
from pdserve.core.types import RequestAttributes, Role, Sampling, Slo

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """The client closed its stream or cancelled. It receives no further messages."""

    request_id: str


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


ClientEvent = RequestArrived | ClientLeft | StopMatched
WorkerEvent = WorkerConnected | WorkerLost | WorkerForgotten | WorkerMessage
Event = ClientEvent | WorkerEvent | DrainRequested | UndrainRequested | RouterClosing | DrainEnded | TimePassed
