"""Inputs and results of a simulation. Pure data.

Seconds are simulated seconds since the start of the trace unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pdserve.core.access.key_file import Tenant
from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError, shortened
from pdserve.core.types import Path, Role, Slo
from router.service.tenants import BURST_S
from router.state.interface import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `block_ids`: one id per `Trace.block_tokens` prompt tokens; equal ids mean an equal
    prefix. Empty if the trace has none."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    slo: Slo | None = None  # None: the run's
    slo_task_s: float | None = None  # deadline of the task to which it belongs by its prefix; `slo` stays as it is
    cancel_after_s: float | None = None  # the client disconnects this long after its arrival
    max_tokens: int | None = None  # max_tokens of its client; None: the run's
    #: It arrives this long after the end of an earlier request, by its number in the trace, and not before `arrival_s`.
    follows: int | None = None
    pause_s: float = 0.0
    session: str = ""  # the name that its client gives its session; empty: none
    ends_session: bool = False  # once it has ended, however, its client says that the session has ended


NumberedLine = tuple[int, str]  # lines count from 1, as editors do


class TraceError(ConfigError):
    """A trace file has an invalid value: names the line, the column, and the allowed values."""

    reason = "TRACE"

    def __init__(self, trace: str, line: int, column: str, seen: object, expected: str) -> None:
        super().__init__(f"{trace}, line {line}, {column}", shortened(seen, 60), expected)
        self.trace, self.line, self.column = trace, line, column


class Trace(Protocol):
    """Requests in order of arrival, read as a stream, so that a trace may be larger than memory."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int:
        """Prompt tokens per block id; 0: the trace has no ids."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
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
    """One simulated worker. `cost` is its true cost. The router starts from `prior` (None: the true cost) and
    learns."""

    worker_id: str
    role: Role
    cost: CostPrior
    prior: CostPrior | None = None
    slowness: float = 1.0  # every step takes this many times as long
    kv_capacity_tokens: int = 400_000
    kv_bytes_per_token: int = 131_072
    link: NetworkLink = field(default_factory=NetworkLink)
    max_batch: int = 256
    max_batch_tokens: int = 2048
    inbox_depth: int = 16
    max_context_tokens: int = 131_072 + 8192
    host_bytes: int = 0  # memory of the host for KV blocks that have left the pool
    host_bytes_per_s: float = 25e9  # of copies to it and back
    copies_beside_steps: bool = False  # as on a GPU; on a CPU, the engine's thread makes them
    disk_bytes: int = 0  # for KV blocks that have left memory
    disk_bytes_per_s: float = 3e9  # of reads
    disk_latency_s: float = 0.001  # of a read, beside its bytes
    pulls_kv: bool = True  # it pulls cached KV from other workers, and gives them its own

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for name in ("kv_capacity_tokens", "kv_bytes_per_token", "max_batch", "max_batch_tokens", "inbox_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.worker_id}.{name}", getattr(self, name), "at least 1")
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{self.worker_id}.{name}", getattr(self, name), "at least 0")
        if not 0.0 <= self.disk_latency_s < math.inf:
            raise ConfigError(f"{self.worker_id}.disk_latency_s", self.disk_latency_s, "a finite number, at least 0")
        for name in ("host_bytes_per_s", "disk_bytes_per_s", "slowness"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{self.worker_id}.{name}", getattr(self, name), "a finite number above 0")


class WorkerFaultKind(Enum):
    DIE = "die"  # the process ends; with `for_s` an empty successor connects after that time
    SLOW = "slow"  # steps take `factor` times as long, for `for_s`
    STALL = "stall"  # nothing moves for `for_s`
    DRAIN = "drain"  # an operator drains the worker, and undoes that after `for_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFault:
    at_s: float
    worker_id: str
    kind: WorkerFaultKind
    for_s: float = math.inf
    factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for name in ("for_s", "factor"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"fault.{name}", getattr(self, name), "a number above 0")
        if not 0.0 <= self.at_s < math.inf:
            raise ConfigError("fault.at_s", self.at_s, "a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Everything that determines a run besides its trace: equal configs and traces give equal results."""

    workers: tuple[WorkerShape, ...]
    slo: Slo
    router: RouterSettings = field(default_factory=RouterSettings)
    num_routers: int = 1  # requests go to each in turn; each learns of the others' work only from the workers' reports
    block_size: int = 512  # tokens of one KV block; must divide the trace's block_tokens if it has any
    seed: int = 0
    noise: float = 0.0  # relative standard deviation of a step's time
    message_s: float = 2e-4  # one way between router and worker
    heartbeat_s: float = 0.25  # between a worker's reports
    index_delay_s: float = 0.01  # until the prefix index has a worker's new blocks
    report_s: float = 0.25  # a decode worker's tokens are reported in batches, at most this late
    deadline_s: float | None = None
    # max_tokens if the trace has none; a multiple of it for longer answers. Routers plan with it, because the answer's
    # length would reveal what a router cannot know.
    max_tokens: int = 4096
    faults: tuple[WorkerFault, ...] = ()
    tenants: tuple[Tenant, ...] = ()  # with quotas, in each router; requests of others have none
    quota_burst_s: float = BURST_S  # of its quota that a tenant may use at once

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
    """The result of one request. `outcome` is a value of router.state.interface.Outcome."""

    number: int  # in the trace
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # requested by the trace
    slo: Slo
    tenant: str = ""
    outcome: str = "unfinished"
    ttft_s: float | None = None
    tpot_s: float | None = None  # 0 for a single token
    ended_s: float | None = None
    tokens: int = 0  # received by the client
    path: Path | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    cached_tokens: int = 0
    pulled_tokens: int = 0  # of the prompt, from another worker
    queue_s: float = 0.0
    transfer_s: float = 0.0
    transfer_exposed_s: float = 0.0  # the part after the prefill
    transfer_bytes: int = 0
    attempts: int = 0
    preemptions: int = 0
    predicted_ttft_s: float | None = None  # predicted at placement, including the wait before
    predicted_tpot_s: float | None = None
    retry_after_s: float | None = None  # of a refusal

    @property
    def has_met_slo(self) -> bool:
        """Whether the whole answer was received within both targets."""
        return self.outcome == "served"


@dataclass(slots=True, kw_only=True)
class WorkerRow:
    """Statistics of one worker."""

    worker_id: str
    role: Role
    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    mean_rows: float = 0.0  # of its decode steps
    kv_token_s: float = 0.0  # integral of the tokens whose blocks were held
    stranded_token_s: float = 0.0  # the part that is not computed, transferred or decoded
    preemptions: int = 0
    #: Shares of its time, in intervals of `shares_width_s`: steps that only prefill, mixed ones, and ones that only
    #: decode (simulator/cluster/tally.py).
    shares_width_s: float = 0.0
    shares: Sequence[Sequence[float]] = ()


@dataclass(slots=True, kw_only=True)
class Sample:
    """The cluster at one moment, for timelines."""

    at_s: float
    queued: int
    running: int
    busy_prefills: int
    busy_decodes: int
    rows: int  # sequences that decode
    kv_share: float  # share of all decode workers' blocks that are held


@dataclass(slots=True, kw_only=True)
class SimResult:
    trace: str
    config: SimConfig
    requests: list[RequestRow]
    workers: list[WorkerRow]
    samples: list[Sample]
    span_s: float  # last arrival - first arrival
    wall_s: float = 0.0  # real time, filled in by the caller
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def attainment(self) -> float:
        """Share of all requests that met both targets; 0 without requests."""
        return sum(one.has_met_slo for one in self.requests) / len(self.requests) if self.requests else 0.0


class Simulate(Protocol):
    """`simulator.cluster.world.simulate`.

    `on_ended` is called with each row as it ends, whatever its outcome. If it returns False, the run stops, and the
    remaining requests stay "unfinished". So a search need not complete runs whose result is known.
    """

    def __call__(
        self, trace: Iterable[TraceRequest], config: SimConfig, on_ended: Callable[[RequestRow], bool] | None = None
    ) -> SimResult: ...
