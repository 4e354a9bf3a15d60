"""Every error that pdserve raises on purpose. Pure: standard library only.

    PdserveError
    ├── InvalidRequest        a field of the request is wrong; a retry cannot succeed
    │   └── ContextLengthExceeded   the prompt is too long for the model
    ├── NotFound              no such request, worker or model
    │   ├── UnknownMethod     the server does not implement the method that was called
    │   └── UnknownModel      the cluster serves no model or LoRA adapter of this name
    ├── IdInUse               a running request has the same id
    ├── ConfigError           a setting is wrong
    │   └── ModelError        the model folder cannot be served
    ├── Overloaded            no placement meets the targets now; retry after retry_after_s
    │   ├── QuotaExceeded     the tenant has used up one of its quotas
    │   └── LoadShed          rejected before any work for it, because the server is overloaded
    ├── Unavailable           no process can do the work now
    │   ├── NoWorkers         no worker of a needed role
    │   └── ShuttingDown      the server drains or ends
    ├── DeadlineExceeded      the request's deadline has passed
    ├── Cancelled             the client cancelled
    ├── Unauthenticated       no valid token
    ├── PermissionDenied      the token is valid, but not for this method
    ├── ChangeFailed          a change of the workers has stopped before its end
    ├── TransferFailed        KV could not be transferred; the router places the request again
    ├── KvLost                KV was lost and could not be recomputed
    └── InternalError         a defect of pdserve

`pdserve.wire.status` maps each to one gRPC status and back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Self

from pdserve.core.urls import hide_password

MAX_REPEATED_CHARS: Final = 256  # of a caller's text, in the message of an error
MAX_SEEN_CHARS: Final = 1024  # of a setting's value
NONE_YET: Final = "none has connected yet"  # of NoWorkers


def shortened(value: object, most: int = MAX_REPEATED_CHARS) -> str:
    """`value` as text of at most `most` characters. Every message that repeats a caller's text uses it."""
    try:
        text = str(value)
    except ValueError:  # Python converts no integers of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= most else text[: most - 3] + "..."


class PdserveError(Exception):
    """Base of the tree. `reason` never changes, so it can be a metric label."""

    reason = "INTERNAL"

    @property
    def message(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with its message and fields, because a helper process may fail with any of these errors."""
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[PdserveError], args: tuple[Any, ...]) -> PdserveError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class InvalidRequest(PdserveError):
    """`field` has the value `seen`; `expected` describes the allowed values.

    A caller chooses the values and the names in an object, so the message shortens both.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, seen: object, expected: str) -> None:
        field = shortened(field)
        super().__init__(f"{field}: got {shortened(seen)}, expected {expected}")
        self.field, self.seen, self.expected = field, seen, expected

    def renamed(self, field: str) -> Self:
        """The same error, for a caller to whom the field has another name."""
        return type(self)(field, self.seen, self.expected)


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the model's context window; a shorter one may succeed."""

    reason = "CONTEXT_LENGTH_EXCEEDED"  # in lower case, OpenAI's code of this error


class NotFound(PdserveError):
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"no {kind} named {shortened(repr(name))}")
        self.kind, self.name = kind, name


class IdInUse(PdserveError):
    """Running requests have the id `name`. A retry may succeed when they have ended."""

    reason = "ID_IN_USE"

    def __init__(self, name: str) -> None:
        super().__init__(f"the request_id {shortened(repr(name))} is in use; wait for its end, or choose another one")
        self.name = name


class UnknownMethod(NotFound):
    """`name` is the full name of the method; empty if the server does not repeat it."""

    reason = "UNKNOWN_METHOD"

    def __init__(self, name: str) -> None:
        super().__init__("method", name)
        if not name:
            self.args = ("the server does not implement the method that was called",)


MAX_SERVED: Final = 16  # names in one message
MAX_SERVED_CHARS: Final = 256  # of them; gRPC rejects errors over 8 KiB, of which each may take 12 bytes


class UnknownModel(NotFound):
    """`served`: what requests may choose; empty if an adapter was unloaded while the request waited."""

    reason = "UNKNOWN_MODEL"

    def __init__(self, name: str, served: Sequence[str] = ()) -> None:
        super().__init__("model", name)
        if isinstance(served, str):  # as it was sent
            self.served = served
        else:
            more = f" and {len(served) - MAX_SERVED} more" if len(served) > MAX_SERVED else ""
            listed = ", ".join(repr(one) for one in served[:MAX_SERVED])
            self.served = shortened(listed, MAX_SERVED_CHARS) + more
        serves = f"; this server serves {self.served}" if self.served else ""
        self.args = (f"the model {shortened(repr(name), 64)} does not exist{serves}",)


class ConfigError(PdserveError):
    """A setting is wrong: its name, its value, and the allowed values."""

    reason = "CONFIG"

    def __init__(self, field: str, seen: object, expected: str) -> None:
        shown = hide_password(shortened(seen, sys.maxsize))  # whole, because a cut URL would show its password
        super().__init__(f"{shortened(field)}: got {shortened(shown, MAX_SEEN_CHARS)}, expected {expected}")
        self.field, self.seen, self.expected = field, seen, expected


class ModelError(ConfigError):
    """The model folder cannot be served; `field` names the file or the config field."""

    reason = "MODEL"


class Overloaded(PdserveError):
    """There is not enough capacity now. A retry after `retry_after_s` may succeed."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """The tenant has used up its `quota`, which is named as in the key file."""

    reason = "QUOTA"

    def __init__(self, quota: str, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class LoadShed(Overloaded):
    """Rejected before any work for it: the cluster has rejected most requests like it ("cluster"), or the process that
    received it is short of CPU time ("front")."""

    reason = "LOAD_SHED"

    def __init__(self, cause: str, retry_after_s: float) -> None:
        super().__init__(_LOAD_SHED.get(cause, "the server is overloaded; retry later"), retry_after_s)
        self.cause = cause


_LOAD_SHED: Final = {
    "cluster": "the cluster is overloaded, and has rejected most of the latest requests; retry later",
    "front": "the router is short of CPU time; retry later",
}


class Unavailable(PdserveError):
    """No process can do the work now. `retry_after_s` is None if the time of recovery is unknown."""

    reason = "UNAVAILABLE"
    is_from_server = True
    """A server has said so. False: the connection has ended, or could not be made."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(Unavailable):
    """`states` says in which states the workers of that role are; empty if that is unknown."""

    reason = "NO_WORKERS"

    def __init__(self, role: str, retry_after_s: float | None = 1.0, states: str = "") -> None:
        super().__init__(f"no {role} worker is available{states and ': '}{states}", retry_after_s)
        self.role, self.states = role, states

    @classmethod
    def from_message(cls, message: str, role: str, retry_after_s: float | None) -> Self:
        return cls(role, retry_after_s, message.partition(": ")[2])


class ShuttingDown(Unavailable):
    """The server drains or ends. A retry reaches another server, or this one after its restart."""

    reason = "SHUTTING_DOWN"

    def __init__(self, retry_after_s: float | None = 1.0) -> None:
        super().__init__("the server is shutting down; retry", retry_after_s)


class DeadlineExceeded(PdserveError):
    reason = "DEADLINE"

    def __init__(self, stage: str) -> None:
        super().__init__(f"the deadline passed while the request was {stage}")
        self.stage = stage


class Cancelled(PdserveError):
    reason = "CANCELLED"


class Unauthenticated(PdserveError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(PdserveError):
    reason = "PERMISSION_DENIED"


class ChangeFailed(PdserveError):
    """A change of the workers has stopped before its end. The message says what was done, and how to undo it."""

    reason = "CHANGE_FAILED"


class TransferFailed(PdserveError):
    """KV could not be transferred between two workers."""

    reason = "TRANSFER_FAILED"


class KvLost(PdserveError):
    reason = "KV_LOST"


class InternalError(PdserveError):
    reason = "INTERNAL"
