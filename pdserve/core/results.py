"""Token counts and times of a finished request, the phases of its time, and percentiles of such values. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final, Literal

from pdserve.core.types import Path

# --- phases of a request --------------------------------------------------------------------------------------
# Every moment between its arrival and its end belongs to exactly one.
#
# router/state/request.py divides the time of a request into intervals, by the router's clock. A worker reports how long
# its own work took, by its own clock, and that part of the interval is assigned to the worker's phase. The rest of the
# interval is MESSAGES. Clocks of two processes are never compared.


class Phase(Enum):
    __hash__ = object.__hash__  # the router looks phases up on every event, and Enum computes its hash in Python

    PREPARE = "prepare"
    PREFIX_LOOKUP = "prefix_lookup"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL = "prefill"
    TRANSFER_WAIT = "transfer_wait"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    PREEMPTED = "preempted"
    MESSAGES = "messages"
    LOST = "lost"


MEASURED_BY: Final[Mapping[Phase, Literal["router", "worker"]]] = {
    Phase.PREPARE: "router",
    Phase.PREFIX_LOOKUP: "router",
    Phase.QUEUE: "router",
    Phase.RESERVE: "worker",
    Phase.PREFILL_QUEUE: "worker",
    Phase.PREFILL: "worker",
    Phase.TRANSFER_WAIT: "router",
    Phase.DECODE_QUEUE: "worker",
    Phase.DECODE: "worker",
    Phase.PREEMPTED: "worker",
    Phase.MESSAGES: "router",
    Phase.LOST: "router",
}
MEANING: Final[Mapping[Phase, str]] = {
    Phase.PREPARE: "validate and tokenize the prompt, compile its grammar, hash its blocks",
    Phase.PREFIX_LOOKUP: "look up which workers hold the prompt's leading blocks",
    Phase.QUEUE: "wait in the router for a placement, including backoff",
    Phase.RESERVE: "wait for the decode worker to reserve KV blocks",
    Phase.PREFILL_QUEUE: "wait on the worker that computes the prompt",
    Phase.PREFILL: "compute the prompt, from the first chunk to the first token",
    Phase.TRANSFER_WAIT: "wait from the first token to committed KV: the part of the transfer after the prefill",
    Phase.DECODE_QUEUE: "wait on the decode worker for the first decode step",
    Phase.DECODE: "run decode steps, up to the last token",
    Phase.PREEMPTED: "wait after an eviction for lack of KV blocks, up to the next token",
    Phase.MESSAGES: "messages between router and workers, and other time that no worker reports",
    Phase.LOST: "time in failed attempts after their last token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of each phase, over all attempts. They add up to the time from arrival to the end."""

    prepare_s: float = 0.0
    prefix_lookup_s: float = 0.0
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_wait_s: float = 0.0
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    messages_s: float = 0.0
    lost_s: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[Phase, float]) -> Phases:
        return cls(**{f"{phase.value}_s": took_s for phase, took_s in seconds.items()})

    def shown(self) -> list[tuple[str, float]]:
        """Name and seconds of every phase that took time, in the order in which a request passes through them."""
        seconds = [(phase.value.replace("_", " "), float(getattr(self, f"{phase.value}_s"))) for phase in Phase]
        return [(name, took_s) for name, took_s in seconds if took_s > 0.0]

    @property
    def total_s(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))


NO_PHASES: Final = Phases()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One interval of one phase. `begin_s` counts from the request's arrival."""

    phase: Phase
    attempt: int  # 0: before the first attempt
    begin_s: float
    seconds: float
    worker_id: str = ""  # that measured it; empty: the router


# --- token counts and times -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a whole call: the prompt once, and the sampled tokens of all answers. In the router, of one
    answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int  # prompt tokens whose KV came from a prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of a request went. ttft_s, tpot_s and total_s are by the router's clock.

    `phases` add up to total_s. Workers report the transfer times, which overlap the phases. Transfer times and bytes
    are sums over the attempts that reached the transfer.
    """

    ttft_s: float  # arrival at the router to the first token
    tpot_s: float  # (last token - first token) / (tokens - 1); 0 for a single token
    total_s: float
    phases: Phases = NO_PHASES
    grant_s: float = 0.0  # time that decode workers took to grant memory, as they reported
    transfer_s: float = 0.0  # from the first byte to the commit; overlaps the prefill
    transfer_busy_s: float = 0.0  # the part of transfer_s with bytes under way
    transfer_exposed_s: float = 0.0  # the part of the transfer after the prefill, which prefill did not hide
    path: Path | None = None  # path of the last attempt
    prefill_worker: str = ""  # empty on the local path
    decode_worker: str = ""
    attempts: int = 0  # placements tried; 1 when nothing went wrong, and the answer did not move
    transfer_bytes: int = 0
    transfer_saved_bytes: int = 0  # KV that the decode worker already had
    preemptions: int = 0  # how often the sequence was evicted for lack of blocks, and recomputed
    migrations: int = 0  # how often the answer moved from a draining worker to another one


# --- sessions -------------------------------------------------------------------------------------------------
# Times are in seconds since 1970.


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    worker_id: str
    tokens: int  # leading tokens of the last prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationView:
    """A chain of turns, each of whose prompts extends the one before."""

    turns: int
    running: int  # requests
    prompt_tokens: int  # of the last turn
    growth_tokens: float  # expected until the next turn
    used_at_s: float
    until_s: float | None  # when the next turn is expected at the latest; None: unknown, or a turn runs
    is_over: bool  # by the client's word, or because it has paused for long
    is_cached_known: bool = False  # False: the prefix index did not answer in time
    cached: tuple[CachedPrefix, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """The turns of a session that have one deadline."""

    state: str  # running, in_time, late, or unknown: the router forgot the session before the task had ended
    began_at_s: float
    due_at_s: float
    turns: int
    turns_left: float | None  # expected after the last turn; None: unknown
    ttft_s: float  # targets of the last turn
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    session_id: str  # the client's, or one that the router made of the prefix
    tenant: str
    is_named: bool  # by the client
    turns: int
    began_at_s: float
    used_at_s: float
    conversations: tuple[ConversationView, ...]  # the least recently used first
    cursor: int  # for the page after it
    task: TaskView | None = None  # the last one
    router_id: str = ""  # that placed these turns; a session has an entry for each such router


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    sessions: tuple[SessionView, ...]  # the last used first
    has_more: bool
    is_partial: bool = False  # without those of a router that has not answered or is busy


# --- percentiles ----------------------------------------------------------------------------------------------
# By nearest rank: always one of the values, never interpolated.


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value such that at least `share` of all values do not exceed it. `ordered` is sorted and not
    empty."""
    # With the margin, a product such as 0.07 * 100 = 7.000000000000001 counts as seven values, not eight.
    return ordered[min(max(math.ceil(share * len(ordered) - 1e-9) - 1, 0), len(ordered) - 1)]
