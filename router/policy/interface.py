"""The input and output of a policy. Pure.

A policy is called for the request at the head of the queue, with the usable workers only: connected, not draining, not
silent, large enough. It never changes a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from pdserve.core.latency import LinkModel
from pdserve.core.types import Slo
from router.view import WorkerView

Links = Callable[[str, str], LinkModel]  # (prefill worker, decode worker) -> cost model of the link between them


class Choice(Enum):
    REMOTE = "remote"
    LOCAL = "local"
    WAIT = "wait"
    REJECT = "reject"


class Obstacle(Enum):
    """What a waiting request waits for."""

    NONE = "none"
    PREFILL = "prefill"  # no prefill worker can start it soon; a later request may still go local
    WORKERS = "workers"  # the workers that could take it are disconnected; it is parked
    ROOM = "room"  # no decode worker has room for it; smaller requests behind it may still be placed
    DECODE = "decode"  # no decode worker has room; later requests wait behind it, to prevent starvation


@dataclass(slots=True, kw_only=True)
class PolicyInput:
    """The request, as a policy sees it. It is never changed, but not frozen: creation would take three times as
    long."""

    request_id: str
    num_tokens: int  # tokens that need KV: prompt and output so far
    max_new_tokens: int
    slo: Slo
    waited_s: float  # time since arrival; for a resumed request, since its last token
    expected_tokens: float = 256.0  # expected remaining output tokens, from the mean of similar answers
    is_resumed: bool = False  # the client already has tokens
    answer_left_s: float = math.inf  # time that the rest of a resumed answer may take to meet its TPOT target
    deadline_left_s: float | None = None
    priority: int = 0
    tenant: str = ""
    bound_to: str = ""  # the prefill worker to which an earlier decision bound the request
    cached_tokens: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading tokens it may hold
    # The request failed there before, so these are avoided while there are others.
    avoid_workers: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()

    def cached_on(self, view: WorkerView) -> int:
        """Cached tokens on a worker, less one if that is the whole prompt, because logits are needed."""
        return min(self.cached_tokens.get(view.hello.worker_id, 0), self.num_tokens - 1)


@dataclass(slots=True, kw_only=True)
class UnloadedEstimate:
    """What a request would get on an unloaded cluster, which is the best possible. Never changed, as PolicyInput."""

    ttft_s: float  # from now, on the fastest worker
    band_s: float  # half-width of the error band of `ttft_s`, if is_sure
    is_sure: bool  # that worker's cost model has enough samples
    tpot_s: float
    work_s: float  # GPU-seconds that the request uses: its prefill, and its share of the decode steps


class Candidate(NamedTuple):
    """One predicted placement of the request; prefill_worker is empty on the local path."""

    prefill_worker: str
    decode_worker: str
    ttft_s: float  # from now
    tpot_s: float
    slack: float  # min over both targets of (target - prediction) / target, including the wait so far
    is_feasible: bool  # every TPOT target on the decode worker is met
    cost: float | None = None  # PlacementOption.cost; None for policies that compare nothing of that kind
    preference: float | None = None  # the part of the cost that is no time


@dataclass(slots=True, kw_only=True)
class Decision:
    """Never changed, as PolicyInput."""

    choice: Choice
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    candidates: tuple[Candidate, ...] = ()
    obstacle: Obstacle = Obstacle.NONE
    bound_to: str = ""  # WAIT for PREFILL: the request waits in this prefill worker's queue
    retry_in_s: float | None = None  # WAIT: when to decide again; REJECT: the retry time for the client


class Policy(Protocol):
    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        """Decides about one request. `decodes` is not empty; `prefills` may be."""
        ...
