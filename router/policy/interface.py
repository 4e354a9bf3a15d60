"""The input and output of a policy, and the names of the goodput policy's rules. Pure.

A policy is called for the request at the head of the queue, with the usable workers only: connected, not draining, not
silent, large enough. It never changes a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from pdserve.core.cost.latency import LinkModel
from pdserve.core.errors import ConfigError
from pdserve.core.kv.tier_reads import TierReads
from pdserve.core.types import Slo
from router.state.interface import RouterSettings
from router.state.view import WorkerView

Links = Callable[[str, str], LinkModel]  # (sending worker, receiving worker) -> cost model of the link between them


class Choice(Enum):
    REMOTE = "remote"
    LOCAL = "local"
    WAIT = "wait"
    REJECT = "reject"


NO_READS: Final[Mapping[str, TierReads]] = {}


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
    expected_tokens: float = 256.0  # expected remaining output tokens
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
    source: WorkerView | None = None  # the worker with the most of its KV, from which others may pull it
    source_tokens: int = 0  # leading tokens whose KV it gives, without the one that must be computed
    source_read_s: float = 0.0  # for which it reads its tiers before
    #: Of the workers whose pools do not have all of their leading blocks. `cached_tokens` has what they do not compute.
    reads: Mapping[str, TierReads] = field(default_factory=dict)

    def read_wait_s(self, worker_id: str, turn_s: float) -> float:
        """How much later its reads and copies let a worker compute the prompt than its turn."""
        reads = self.reads.get(worker_id)
        return 0.0 if reads is None else reads.wait_s(turn_s) + reads.copy_s

    def kept_on(self, view: WorkerView) -> int:
        """Tokens that a worker has without a wait: those that it keeps if another one computes the prompt."""
        reads = self.reads.get(view.worker_id)
        return self.cached_tokens.get(view.worker_id, 0) if reads is None else reads.num_kept * view.hello.block_size

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


class PullChoice(NamedTuple):
    """Two ways to get the KV of a prompt's first tokens, with predicted seconds."""

    source: str  # the worker from which it can be pulled
    num_tokens: int  # that are pulled
    prefix_tokens: int  # leading tokens that the pulling worker has afterwards
    pull_s: float  # until they have arrived
    recompute_s: float  # of computing them instead
    is_pulled: bool  # which of both was chosen
    source_read_s: float = 0.0  # the part of `pull_s` in which the source reads its tiers


class ReadChoice(NamedTuple):
    """Tokens whose KV a worker reads from its tiers, with predicted seconds."""

    num_tokens: int
    read_s: float  # of copies and reads
    recompute_s: float  # of computing them instead


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
    pull: PullChoice | None = None  # by the worker that computes the prompt; None: no other has more of it
    reads: ReadChoice | None = None  # of its tiers, by the same worker; None: it reads nothing


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
    pull: PullChoice | None = None  # what the worker that computes the prompt pulls before


class Policy(Protocol):
    def __call__(
        self, request: PolicyInput, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView], now_s: float
    ) -> Decision:
        """Decides about one request. `decodes` is not empty; `prefills` may be."""
        ...


# --- rules of the goodput policy ------------------------------------------------------------------------------
# `rules_off` switches rules off by name, to measure their effect.

RULES: Final[dict[str, str]] = {
    "path-choice": "a placement is local if that costs less than remote; off: remote if there is a prefill worker",
    "tandem": "TPOT includes arriving requests and their growth; off: only running ones, as the worker reports them",
    "least-slack": "the request whose first token is due first goes first; off: order of arrival",
    "ageing": "a share of the work is reserved for late requests, in order of arrival; off: they wait for idle time",
    "fairness": "tenants share predicted GPU-seconds; off: tenants are ignored",
    "priority": "higher classes go first; off: all are one class",
    "rejection": "under overload, requests that will miss their target are rejected; off: no request is rejected",
    "shortest": "of the requests that do not fit, the longest is given up; off: the last that came",
    "deadline-drop": "a request past its deadline is dropped before prefill or decode; off: it is computed",
    "transfer-price": "the part of the transfer that prefill does not hide counts; off: transfers cost nothing",
    "prefix-value": "a cached prefix counts as the time that it saves; off: caches are ignored",
}


#: The rules of published baselines, which serve in order of arrival. The queue rejects none of their requests.
PLAIN: Final = frozenset({"priority", "deadline-drop"})


def check_rules(names: Iterable[str]) -> None:
    """Raises ConfigError on an unknown name."""
    for name in names:
        if name not in RULES:
            raise ConfigError("rules_off", name, "some of " + ", ".join(RULES))


# --- what a policy declares -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """A placement policy, as its file in router/policy/policies declares it in POLICY."""

    make: Callable[[RouterSettings, Links], Policy]
    rules: frozenset[str] = PLAIN  # of RULES; those of the queue hold beside the policy
    obeys_rules_off: bool = False  # whether `rules_off` applies to `rules`
    uses_prefill: bool = True  # False: it never places a request on a prefill worker

    def rules_on(self, rules_off: Iterable[str]) -> frozenset[str]:
        return self.rules.difference(rules_off) if self.obeys_rules_off else self.rules
