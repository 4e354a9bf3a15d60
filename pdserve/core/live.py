"""Frames of the live view of one router, without the text of prompts and answers; their JSON; and lines of a process's
log. Pure.

Times are seconds of the router's monotonic clock, unless another origin is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

from pdserve.core.types import Role

FIRST_REVISION: Final = "first"  # of the weights of a cluster's start, for operators
PERIOD_S: Final = 0.25  # default time between two frames


class LivePhase(NamedTuple):
    phase: str  # a name from pdserve.core.results
    begin_s: float  # after the request's arrival
    seconds: float


@dataclass(frozen=True, slots=True)
class LivePhases:
    """The fields of all phases of a request, in the order of time."""

    names: tuple[str, ...] = ()
    begins_s: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def __iter__(self) -> Iterator[LivePhase]:
        return map(LivePhase, self.names, self.begins_s, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that is in progress or has ended. While it is in progress, its last phase is open."""

    request_id: str
    stage: str  # stage of the lifecycle, or "ended"
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    prefill_worker: str  # empty while there is none, and on the local path
    decode_worker: str
    attempt: int
    preemptions: int
    arrived_s: float
    ended_s: float | None
    outcome: str  # empty while it is in progress
    why: str  # why the answer is incomplete
    retry_after_s: float | None  # retry time of a rejected request
    ttft_s: float | None
    tpot_s: float | None  # over the tokens so far
    slo_ttft_s: float
    slo_tpot_s: float
    predicted_ttft_s: float | None  # of the chosen placement, counted from the decision
    predicted_tpot_s: float | None
    transfer_bytes: int
    transfer_s: float
    phases: LivePhases


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    worker_id: str
    role: Role
    endpoint: str
    is_connected: bool
    is_draining: bool
    is_drained: bool  # an operator drains it
    running: int
    waiting: int
    booked: int  # this router's requests on the worker
    num_blocks: int
    free_blocks: int
    cached_blocks: int  # blocks of the prefix cache that no sequence uses
    context_tokens: int
    pending_prefill_tokens: int
    steps: int
    step_s: float  # duration of the last reported step; 0: none was reported
    silent_s: float
    preemptions: int  # sequences preempted for lack of KV blocks, since the worker's start
    version: str = ""  # with its build; empty if unknown
    revision: str = ""  # of its weights; empty: that of the cluster's start


def revisions_text(revisions: Iterable[str]) -> str:
    """How many workers have each revision of the weights; empty if all have those of the cluster's start."""
    counts = Counter(one or FIRST_REVISION for one in revisions)
    if counts.keys() <= {FIRST_REVISION}:
        return ""
    return f"revision {', '.join(f'{name[:32]} of {count}' for name, count in sorted(counts.items()))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTotals:
    """Counts since the start of the router."""

    arrived: int = 0
    served: int = 0
    late: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    output_tokens: int = 0  # of ended requests
    transfer_bytes: int = 0  # of ended requests


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFrame:
    at_s: float
    queued: int
    running: int
    omitted: int  # requests in progress that did not fit into the frame
    totals: LiveTotals
    workers: tuple[LiveWorker, ...]
    requests: tuple[LiveRequest, ...]  # in progress, and ended since the frame before
    version: str = ""  # of the router, with its build; empty if unknown
    incarnation: str = ""  # of the router's process, since whose start the totals count


# --- JSON of a frame ------------------------------------------------------------------------------------------
# The page reads it.

DIGITS: Final = 6  # decimals of seconds, that is, microseconds
_WORKER: Final = tuple(one.name for one in fields(LiveWorker) if one.name != "role")
_REQUEST: Final = tuple(one.name for one in fields(LiveRequest) if one.name != "phases")


def frame_to_json(frame: LiveFrame) -> dict[str, Any]:
    return {
        "at_s": frame.at_s,
        "queued": frame.queued,
        "running": frame.running,
        "omitted": frame.omitted,
        "version": frame.version,
        "totals": asdict(frame.totals),
        "workers": [
            {"role": one.role.value, **{name: _rounded(getattr(one, name)) for name in _WORKER}}
            for one in frame.workers
        ],
        "requests": [_request(one) for one in frame.requests],
    }


def _request(one: LiveRequest) -> dict[str, Any]:
    row = {name: _rounded(getattr(one, name)) for name in _REQUEST}
    row["phases"] = [[name, _rounded(begin_s), _rounded(seconds)] for name, begin_s, seconds in one.phases]
    return row


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


# --- log lines ------------------------------------------------------------------------------------------------
# As the live view shows them.

MAX_LINES: Final = 200  # kept by a process, and sent in one answer
MAX_CHARS: Final = 2000  # in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    at_unix_s: float
    level: str  # a level name of Python's logging, for example WARNING
    text: str  # logger, message and fields; several lines if there is a traceback
