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
    """The request data for a policy. It is never changed, but not frozen, because creation would take three times as
    long."""

    request_id: str
    num_tokens: int  # tokens that need KV: prompt and output so far
    max_new_tokens: int
    slo: Slo
    waited_s: float  # since arrival; for a resumed request, since its last token
    expected_tokens: float = 256.0  # expected remaining output tokens, from the mean of similar answers
    is_resumed: bool = False  # the client already has tokens
    answer_left_s: float = math.inf  # time that the rest of a resumed answer may take to meet its TPOT target
    deadline_left_s: float | None = None
    priority: int = 0
    tenant: str = ""
    bound_to: str = ""  # the prefill worker that an earlier decision bound it to
    cached_tokens: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading tokens it may hold
    # It failed there before, so these are avoided while there are others.
    avoid_workers: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()

    def cached_on(self, view: WorkerView) -> int:
        """At least one token is always computed, so that there are logits."""
        return min(self.cached_tokens.get(view.hello.worker_id, 0), self.num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadedEstimate:
    """What a request would get on an unloaded cluster, which is the best possible."""

    ttft_s: float  # from now, on the fastest worker
    band_s: float  # the actual value is within this of `ttft_s`, if is_sure
    is_sure: bool  # that worker has enough samples
    tpot_s: float
    work_s: float  # GPU-seconds that it uses: its prefill, and its share of the decode steps


class Candidate(NamedTuple):
    """One predicted placement of the request; prefill_worker is empty on the local path."""

    prefill_worker: str
    decode_worker: str
    ttft_s: float  # from now
    tpot_s: float
    slack: float  # min over both targets of (target - prediction) / target, including the wait so far
    is_feasible: bool  # every TPOT target there is met


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    choice: Choice
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    candidates: tuple[Candidate, ...] = ()
    obstacle: Obstacle = Obstacle.NONE
    bound_to: str = ""  # with WAIT for PREFILL: it waits for this prefill worker only, in its line
    retry_in_s: float | None = None  # with WAIT: when to ask again; with REJECT: the retry time for the client


class Policy(Protocol):
    def __call__(
        self, ask: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        """Chooses. `decodes` is not empty; `prefills` may be."""
        ...
