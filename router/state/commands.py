"""The commands of a router: every output of RouterState.handle. Pure data.

The commands of one call are carried out in order. The runtime drops a command for a worker whose stream has ended; a
WorkerLost event follows and corrects the state. All are frozen, and `router.recording.replay` can encode and decode
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.core import errors
from pdserve.core.protocol import WorkerCommand
from pdserve.core.results import Slice, Timings, Usage
from pdserve.core.types import FinishReason, TokenOut


class Outcome(Enum):
    """How a request ended; used as a metric label."""

    SERVED = "served"  # finished within its SLO
    LATE = "late"  # finished, but missed its SLO
    REJECTED = "rejected"  # never placed: overload, or no worker
    CANCELLED = "cancelled"  # the client disconnected
    EXPIRED = "expired"  # its deadline passed
    FAILED = "failed"


class FailKind(Enum):
    """Which error of pdserve.core.errors the client receives."""

    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    UNAVAILABLE = "unavailable"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE = "deadline"
    INVALID = "invalid"
    TRANSFER = "transfer"
    KV_LOST = "kv_lost"
    INTERNAL = "internal"


# -- to clients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitTokens:
    """Tokens for the client; contiguous over all attempts of a request."""

    request_id: str
    first_index: int  # position of tokens[0] among the request's output tokens
    tokens: tuple[TokenOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """The answer is complete. The last message to this client."""

    request_id: str
    reason: FinishReason
    usage: Usage
    timings: Timings
    outcome: Outcome
    slices: tuple[Slice, ...] = ()  # the phases in order; they become spans


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """The request ends with an error (`to_error`). The last message to this client."""

    request_id: str
    kind: FailKind
    message: str
    outcome: Outcome
    retry_after_s: float | None = None
    role: str = ""  # NO_WORKERS: the missing role
    stage: str = ""  # DEADLINE: the request's stage
    field: str = ""  # INVALID: the request's field
    timings: Timings | None = None
    slices: tuple[Slice, ...] = ()

    def to_error(self) -> errors.PdserveError:
        match self.kind:
            case FailKind.OVERLOADED:
                return errors.Overloaded(self.message, self.retry_after_s if self.retry_after_s is not None else 1.0)
            case FailKind.NO_WORKERS:
                return errors.NoWorkers.from_message(self.message, self.role, self.retry_after_s)
            case FailKind.UNAVAILABLE:
                return errors.Unavailable(self.message, self.retry_after_s)
            case FailKind.SHUTTING_DOWN:
                return errors.ShuttingDown(self.retry_after_s)
            case FailKind.DEADLINE:
                return errors.DeadlineExceeded(self.stage)
            case FailKind.INVALID:
                expected = (
                    "one that a worker can run" if self.field == "request" else "one that compiles and can be met"
                )
                return errors.InvalidRequest(self.field, self.message, expected)
            case FailKind.TRANSFER:
                return errors.TransferFailed(self.message)
            case FailKind.KV_LOST:
                return errors.KvLost(self.message)
            case FailKind.INTERNAL:
                return errors.InternalError(self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCancelled:
    """The request ends without a message, because the client has disconnected. For metrics and traces."""

    request_id: str
    num_output_tokens: int
    timings: Timings
    slices: tuple[Slice, ...] = ()


# -- to the clock ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Asks for a TimePassed event at `at_s`, by the clock of now_s. It replaces all earlier WakeAt commands."""

    at_s: float


ClientCommand = EmitTokens | FinishRequest | FailRequest | EndCancelled
Command = WorkerCommand | ClientCommand | WakeAt
