"""What a controller of the cluster's size sees, what it decides, and its settings. Pure data.

Observed and Decision hold only numbers, strings, enums and tuples of such records, so `encode_value` and `decode_value`
of router/recording/replay.py store them without loss, and a recording of observations gives the same decisions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role


class Size(NamedTuple):
    """Numbers of workers by role."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


NONE: Final = Size(0, 0)


def of_role(role: Role, count: int) -> Size:
    return Size(count, 0) if role is Role.PREFILL else Size(0, count)


# --- settings -------------------------------------------------------------------------------------------------


MOST_WORKERS: Final = 4096
LONGEST_CHANGE_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """Bounds, and what a change costs. The times should be measured: they are the only hysteresis."""

    min_workers: int = 1
    max_workers: int = 16
    may_change_roles: bool = True  # False: prefill workers are neither added nor removed
    start_s: float = 60.0  # from the order to the first request: process, weights, warm-up
    change_role_s: float = 2.0  # after the drain
    drain_s: float = 10.0  # until the running answers have ended or moved
    horizon_s: float = 600.0
    # A request that misses its targets costs as much as computing it this many times.
    miss_price: float = 20.0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        if not 1 <= self.min_workers <= self.max_workers:
            raise ConfigError("min_workers", self.min_workers, f"1 to max_workers ({self.max_workers})")
        if self.max_workers > MOST_WORKERS:
            raise ConfigError("max_workers", self.max_workers, f"at most {MOST_WORKERS}")
        for name in ("start_s", "change_role_s", "drain_s"):
            if not 0.0 <= getattr(self, name) <= LONGEST_CHANGE_S:
                raise ConfigError(name, getattr(self, name), f"0 to {LONGEST_CHANGE_S:g} seconds")
        for name in ("horizon_s", "miss_price"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "a finite number above 0")


# --- what a controller sees -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Sums over the requests that arrived in [begin_s, end_s), and over the tokens that were sent in it.

    Arrivals count before any rejection: under overload, what was served would look like low demand.
    """

    begin_s: float
    end_s: float
    requests: int = 0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0  # tokens that no worker's prefix cache held
    uncached_squared: float = 0.0
    token_context: float = 0.0  # uncached * (cached + uncached / 2), the work of attention
    ttft_targets_s: float = 0.0
    tpot_targets_s: float = 0.0
    tokens: float = 0.0  # output tokens that clients received
    answers: int = 0  # answers that were completed
    answer_tokens: float = 0.0  # in those
    met: int = 0  # requests that ended in it and met both targets
    missed: int = 0  # requests that ended in it and did not; those that their clients cancelled count as neither

    @property
    def width_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster since the last decision.

    `future` has the true arrivals of the next minutes, with the lengths of their answers in `tokens` and `answers`.
    Only a clairvoyant has it.
    """

    interval: Interval
    ready: Size  # workers that take new requests
    starting: Size = NONE
    draining: Size = NONE  # workers that take no new requests and will end or change their role
    queued: int = 0  # requests that wait for a placement
    running: int = 0
    tokens_so_far: float = 0.0  # mean over the running answers that have a token
    cost: CostPrior = field(default_factory=CostPrior)  # mean of the router's learned costs
    prefill_busy: float = 0.0  # share of the interval in which the prefill workers computed, mean over them
    decode_rows: float = 0.0  # sequences that decode, per decode worker
    kv_tokens: int = 400_000  # of a worker
    max_batch: int = 256
    max_batch_tokens: int = 2048
    busy_because: str = ""  # what runs that must not be disturbed, such as "roll-out"; empty: nothing
    failed: Change | None = None  # a change of the controller that has failed since its last decision
    settings: ScalingSettings | None = None  # from now on, with measured times; None: as before
    future: tuple[Interval, ...] = ()


# --- what it decides ------------------------------------------------------------------------------------------


class ChangeKind(Enum):
    START = "start"  # new workers of the role
    STOP = "stop"  # drain and end workers of the role
    CHANGE_ROLE = "change-role"  # drain workers of the other role, and start them as this role


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`role` is the role that gains workers, or loses them with STOP. The launcher chooses the workers whose loss costs
    least."""

    kind: ChangeKind
    role: Role
    count: int

    def __str__(self) -> str:
        match self.kind:
            case ChangeKind.START:
                return f"start {self.count} {self.role.value}"
            case ChangeKind.STOP:
                return f"stop {self.count} {self.role.value}"
            case ChangeKind.CHANGE_ROLE:
                return f"change {self.count} from {self.role.other.value} to {self.role.value}"


def resized(size: Size, change: Change) -> Size:
    """The size after the change."""
    sign = -1 if change.kind is ChangeKind.STOP else 1
    own = sign * change.count
    other = -change.count if change.kind is ChangeKind.CHANGE_ROLE else 0
    if change.role is Role.PREFILL:
        return Size(size.prefill + own, size.decode + other)
    return Size(size.prefill + other, size.decode + own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One change that was compared."""

    change: str  # "keep", or as Change prints
    size: Size  # after the change
    attainment: float  # predicted until a change that is decided next could have its effect
    cost_s: float  # worker-seconds over the horizon if the best plan follows; includes misses and all changes
    change_cost_s: float  # the part that this change takes
    refused: str = ""  # why it may not be chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The predicted load at one time from now."""

    at_s: float  # from now
    rate_rps: float
    error: float  # relative standard deviation of the rate
    prompt_tokens: float  # means of a request
    uncached_tokens: float
    token_context: float
    output_tokens: float
    prompt_spread: float  # mean of the squared uncached tokens over the square of their mean
    dispersion: float  # variance over mean of the number of arrivals; 1: Poisson
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a change: the prediction, and what was measured from its effect on."""

    decided_s: float
    change: str
    expected_attainment: float
    seen_attainment: float | None  # None: no request ended
    expected_rate_rps: float
    seen_rate_rps: float
    took_s: float  # until the change had its effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`changes` is empty if the size stays. The rest explains it."""

    at_s: float
    changes: tuple[Change, ...] = ()
    reason: str
    size: Size
    demand: tuple[Demand, ...] = ()  # now, and at the end of the horizon
    alternatives: tuple[Alternative, ...] = ()  # the cheapest first
    outcome: Outcome | None = None  # of the last change, once its effect was seen
    capacity_share: float = 1.0  # what the cluster reaches of the predicted capacity, as learned from misses

    @property
    def wanted(self) -> Size:
        """The size after the changes."""
        return functools.reduce(resized, self.changes, self.size)


class ScalingController(Protocol):
    def decide(self, observed: Observed, now_s: float) -> Decision: ...
