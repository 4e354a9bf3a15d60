"""What a simulation is given and what it answers. Pure data.

Seconds are simulated seconds since the start of the trace unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.latency import CostPrior
from pdserve.core.types import Path, Role, Slo
from router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `block_ids`: one id per `Trace.block_tokens` prompt tokens; equal ids mean an equal
    prefix. Empty where the trace does not say."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    slo: Slo | None = None  # None: the run's
    cancel_after_s: float | None = None  # the client leaves so long after its arrival
    max_tokens: int | None = None  # that its client allowed; None: the run's


class Trace(Protocol):
    """Requests in order of arrival; read as a stream, so that a trace may be larger than memory."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int:
        """Prompt tokens that one of `block_ids` stands for; 0: the trace has none."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between a prefill and a decode worker. A worker's transfers share its bandwidth, in both directions."""

    latency_s: float = 5e-5
    bytes_per_s: float = 4e10

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        if not 0.0 <= self.latency_s < math.inf:
            raise ConfigError("link.latency_s", self.latency_s, "a finite number, at least 0")
        if not self.bytes_per_s > 0.0:
            raise ConfigError("link.bytes_per_s", self.bytes_per_s, "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """One simulated worker. `cost` is the truth; the router believes `prior` (None: the truth) until it has learnt."""

    worker_id: str
    role: Role
    cost: CostPrior
    prior: CostPrior | None = None
    slowness: float = 1.0  # every step takes so many times as long
    kv_capacity_tokens: int = 400_000
    kv_bytes_per_token: int = 131_072
    link: Link = field(default_factory=Link)
    max_batch: int = 256
    max_batch_tokens: int = 2048
    inbox_depth: int = 16
    max_context_tokens: int = 131_072 + 8192

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for name in ("kv_capacity_tokens", "kv_bytes_per_token", "max_batch", "max_batch_tokens", "inbox_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.worker_id}.{name}", getattr(self, name), "at least 1")
        if not 0.0 < self.slowness < math.inf:
            raise ConfigError(f"{self.worker_id}.slowness", self.slowness, "a finite number above 0")


class DisturbanceKind(Enum):
    DIE = "die"  # the process ends; with `for_s` its successor connects after so long, empty
    SLOW = "slow"  # steps take `factor` times as long, for `for_s`
    STALL = "stall"  # nothing moves for `for_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    at_s: float
    worker_id: str
    kind: DisturbanceKind
    for_s: float = math.inf
    factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for name in ("for_s", "factor"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"disturbance.{name}", getattr(self, name), "a number above 0")
        if not 0.0 <= self.at_s < math.inf:
            raise ConfigError("disturbance.at_s", self.at_s, "a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Everything that a run depends on beside its trace: equal configs and traces give equal results."""

    workers: tuple[WorkerShape, ...]
    slo: Slo
    router: RouterSettings = field(default_factory=RouterSettings)
    num_routers: int = 1  # requests go to each in turn; each sees the others' work by worker reports alone
    block_size: int = 512  # tokens of one KV block, a divisor of the trace's block_tokens where it has any
    seed: int = 0
    noise: float = 0.0  # relative standard deviation of a step's time
    message_s: float = 2e-4  # one way between router and worker
    heartbeat_s: float = 0.25  # between a worker's reports
    index_delay_s: float = 0.01  # until the prefix index knows what a worker stored
    report_s: float = 0.25  # a decode worker's tokens are told together, at most so long
    deadline_s: float | None = None
    # That clients allow where the trace does not say; a multiple of it where the answer is longer. Routers plan with
    # it: were it the answer's length, they would know what nobody knows.
    max_tokens: int = 4096
    disturbances: tuple[Disturbance, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        if not any(one.role is Role.DECODE for one in self.workers):
            raise ConfigError("workers", "no decode worker", "at least one: it also serves without prefill workers")
        ids = [one.worker_id for one in self.workers]
        if len(set(ids)) < len(ids):
            raise ConfigError("workers", "an id twice", "ids that differ")
        for one in self.workers:
            if one.role is Role.DECODE and not one.cost.decode_base_s + one.cost.decode_per_row_s > 0.0:
                raise ConfigError(
                    "cost", f"decode steps of {one.worker_id} that take no time", "a base or a time per row"
                )
        for name, low in (("num_routers", 1), ("block_size", 1), ("max_tokens", 1)):
            if getattr(self, name) < low:
                raise ConfigError(name, getattr(self, name), f"at least {low}")
        for one in self.workers:
            if one.kv_capacity_tokens < self.block_size:
                expected = f"at least a block of {self.block_size} tokens"
                raise ConfigError(f"{one.worker_id}.kv_capacity_tokens", one.kv_capacity_tokens, expected)
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            raise ConfigError("deadline_s", self.deadline_s, "a number above 0")
        for name in ("noise", "message_s", "heartbeat_s", "index_delay_s", "report_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "a finite number, at least 0")


@dataclass(slots=True, kw_only=True)
class RequestRow:
    """How one request fared. `outcome` is a value of router.commands.Outcome."""

    number: int  # in the trace
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # that the trace asks for
    slo: Slo
    tenant: str = ""
    outcome: str = "unfinished"
    ttft_s: float | None = None
    tpot_s: float | None = None  # 0 for a single token
    ended_s: float | None = None
    tokens: int = 0  # that the client got
    path: Path | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    cached_tokens: int = 0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0  # of it, after the prefill
    transfer_bytes: int = 0
    attempts: int = 0
    preemptions: int = 0
    predicted_ttft_s: float | None = None  # when it was placed, waiting so far included
    predicted_tpot_s: float | None = None
    retry_after_s: float | None = None  # of a refusal

    @property
    def has_met_slo(self) -> bool:
        """Whole answer, both promises kept. Refused, failed, expired, cancelled and late ones have not."""
        return self.outcome == "served"


@dataclass(slots=True, kw_only=True)
class WorkerRow:
    """What one worker did."""

    worker_id: str
    role: Role
    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    mean_rows: float = 0.0  # of its decode steps
    kv_token_s: float = 0.0  # integral of the tokens whose blocks were held
    stranded_token_s: float = 0.0  # of them, held by what neither computes, moves nor decodes
    preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class Sample:
    """The cluster at one moment, for timelines."""

    at_s: float
    queued: int
    running: int
    busy_prefills: int
    busy_decodes: int
    rows: int  # that decode
    kv_share: float  # of all decode workers' blocks that are held


@dataclass(slots=True, kw_only=True)
class SimResult:
    trace: str
    config: SimConfig
    requests: list[RequestRow]
    workers: list[WorkerRow]
    samples: list[Sample]
    span_s: float  # last arrival - first arrival
    wall_s: float = 0.0  # real time, filled in by whoever has a clock
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        """Share of all requests that met both promises; 0 of none."""
        return sum(one.has_met_slo for one in self.requests) / len(self.requests) if self.requests else 0.0


class Simulate(Protocol):
    """`simulator.world.simulate`.

    `on_ended` is shown each row as it ends, whatever its outcome; where it answers False the run stops there, and who
    has not ended stays "unfinished". So a search need not finish runs whose answer is known.
    """

    def __call__(
        self, trace: Iterable[TraceRequest], config: SimConfig, on_ended: Callable[[RequestRow], bool] | None = None
    ) -> SimResult: ...
