"""What a policy is given and what it answers. Pure.

A policy is called for the request at the head of the queue and sees only workers that may be asked at all:
connected, not draining, heard of lately, large enough. It never changes a view.
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

Links = Callable[[str, str], LinkModel]  # (prefill worker, decode worker) -> what is known of the way between them


class Choice(Enum):
    REMOTE = "remote"
    LOCAL = "local"
    WAIT = "wait"
    REFUSE = "refuse"


class Obstacle(Enum):
    """What a request that waits is waiting for."""

    NONE = "none"
    PREFILL = "prefill"  # no prefill worker can start it soon; a later request may still go local
    WORKERS = "workers"  # those that could take it are away; it is set aside
    ROOM = "room"  # no decode worker has room for it; smaller ones behind it may go on taking what there is
    DECODE = "decode"  # no decode worker has room; later requests wait behind it, or it would starve


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request as a policy sees it. Nobody changes it; frozen, it would take three times as long to make."""

    request_id: str
    num_tokens: int  # to have KV: prompt and what was already answered
    max_new_tokens: int
    slo: Slo
    waited_s: float  # since arrival; of a resumed request, since its last token
    expected_tokens: float = 256.0  # that will still be answered, by the mean of answers like it
    is_resumed: bool = False  # the client already has tokens
    answer_left_s: float = math.inf  # that the rest of a resumed answer may take to meet its TPOT target
    deadline_left_s: float | None = None
    priority: int = 0
    tenant: str = ""
    bound_to: str = ""  # the prefill worker that an earlier decision bound it to
    cached_tokens: Mapping[str, int] = field(default_factory=dict)  # worker id -> leading tokens it may hold
    # It failed there before: not again while there are others.
    avoid_workers: frozenset[str] = frozenset()
    avoid_pairs: frozenset[tuple[str, str]] = frozenset()

    def cached_on(self, view: WorkerView) -> int:
        """At least one token is always computed, so that there are logits."""
        return min(self.cached_tokens.get(view.hello.worker_id, 0), self.num_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a request could get were it alone: no queue, no residents. Nobody can do better than this."""

    ttft_s: float  # from now, on the worker that would be the fastest
    band_s: float  # the truth is surely within so much of `ttft_s`, if is_sure
    is_sure: bool  # that worker has shown enough batches to call anything sure
    tpot_s: float
    work_s: float  # GPU-seconds that it takes from the others: its prefill, and its share of the decode steps


class Candidate(NamedTuple):
    """One way to serve the request now, as predicted; prefill_worker is empty on the local path."""

    prefill_worker: str
    decode_worker: str
    ttft_s: float  # from now
    tpot_s: float
    slack: float  # min over both SLOs of (SLO - prediction) / SLO, waiting so far included
    is_feasible: bool  # every promised TPOT there is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    choice: Choice
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    candidates: tuple[Candidate, ...] = ()
    obstacle: Obstacle = Obstacle.NONE
    bound_to: str = ""  # with WAIT for PREFILL: it waits for this very prefill worker, in its line, and nobody else
    retry_in_s: float | None = None  # with WAIT: when it is worth asking again; with REFUSE: what the client is told


class Policy(Protocol):
    def __call__(
        self, ask: Ask, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        """Chooses. `decodes` is not empty; `prefills` may be."""
        ...
