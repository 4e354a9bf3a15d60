"""A recording of a live router, read as a trace and as a cluster. Pure: reads lines, opens nothing.

Requests have their recorded arrivals and sampled lengths. So a simulation of the recorded cluster reproduces the run,
and one of another cluster or policy shows how that would have performed. An unknown length (rejected, failed, still
running at the end) is replaced by the mean of the complete answers before it, at most the requested length. If a client
disconnected, the length is the requested one, and the client disconnects again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, Final, final

from pdserve.core.cost.latency import CostModel, LinkModel
from pdserve.core.errors import ConfigError
from pdserve.core.protocol import BatchTimed, Granted, Load, Prefill, Reserve, TransferEnded
from pdserve.core.types import Role, Slo
from router.recording import replay
from router.state.interface import (
    ClientLeft,
    Command,
    EmitTokens,
    EndCancelled,
    Event,
    FailRequest,
    FinishRequest,
    RequestArrived,
    RouterSettings,
    WorkerConnected,
    WorkerForgotten,
    WorkerLost,
)
from simulator.model import (
    NetworkLink,
    NumberedLine,
    SimConfig,
    TraceError,
    TraceRequest,
    WorkerFault,
    WorkerFaultKind,
    WorkerShape,
)
from simulator.traces.rows import json_object

_TRACE_KINDS: Final = (
    WorkerConnected,
    RequestArrived,
    ClientLeft,
    EmitTokens,
    FinishRequest,
    FailRequest,
    EndCancelled,
)
ID_BYTES: Final = 7  # enough to distinguish blocks, and a number below 2**63


def is_recording(first_line: str) -> bool:
    row = json_object(first_line)
    return row is not None and "settings" in row


def block_tokens(lines: Iterable[NumberedLine], name: str) -> int:
    """Tokens per block id of a request; 0 if no worker connected."""
    _, rows = steps(lines, name, (WorkerConnected,))
    return next((item.block_size for _, items in rows for item in items), 0)


@dataclass(slots=True)
class _Seen:
    """One request while the recording is read."""

    number: int
    facts: RequestArrived
    arrival_s: float
    sampled: int = 0
    left_after_s: float | None = None
    is_over: bool = False
    is_complete: bool = False


def read_recording(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Yields requests in order of arrival; holds only running requests and those that wait behind them. Raises
    TraceError at the first invalid line."""
    waiting: deque[_Seen] = deque()
    known: dict[str, _Seen] = {}
    lengths = _Lengths()
    first_s: float | None = None
    number = block_size = 0
    _, rows = steps(lines, name, _TRACE_KINDS)
    for now_s, items in rows:
        for item in items:
            if isinstance(item, WorkerConnected):
                block_size = block_size or item.block_size
                continue
            if isinstance(item, RequestArrived):
                if item.request_id in known:
                    continue  # its id was in use: the router dropped it
                first_s = now_s if first_s is None else first_s
                number += 1
                seen = known[item.request_id] = _Seen(number, item, now_s - first_s)
                waiting.append(seen)
                continue
            found = known.get(item.request_id)
            if found is None:
                continue  # an answer after its end
            match item:
                case EmitTokens():
                    found.sampled = item.first_index + len(item.tokens)
                case ClientLeft():
                    found.left_after_s = now_s - (first_s or 0.0) - found.arrival_s
                case _:
                    found.is_over, found.is_complete = True, isinstance(item, FinishRequest)
                    del known[item.request_id]
        while waiting and waiting[0].is_over:
            yield _request(waiting.popleft(), lengths, block_size)
    for seen in waiting:
        yield _request(seen, lengths, block_size)


class _Lengths:
    """Mean length of the complete answers so far."""

    def __init__(self) -> None:
        self._sum = self._count = 0

    def add(self, tokens: int) -> None:
        self._sum, self._count = self._sum + tokens, self._count + 1

    def mean(self, most: int) -> int:
        return min(round(self._sum / self._count), most) if self._count else most


def _request(seen: _Seen, lengths: _Lengths, block_size: int) -> TraceRequest:
    facts, most = seen.facts, seen.facts.sampling.max_tokens
    if seen.is_complete:
        output = seen.sampled
        lengths.add(output)
    elif seen.left_after_s is not None:
        output = most
    else:
        output = max(lengths.mean(most), seen.sampled)
    # Hashed again, because content hashes of a simulated router are no real hashes and differ in any of their bytes.
    blocks = [int.from_bytes(blake2b(one, digest_size=ID_BYTES).digest()) for one in facts.block_hashes]
    if blocks and len(blocks) * block_size < facts.num_prompt_tokens:
        blocks.append(seen.number)  # only full blocks are hashed; the rest is not shared
    return TraceRequest(
        arrival_s=seen.arrival_s,
        prompt_tokens=facts.num_prompt_tokens,
        output_tokens=max(output, 1),
        block_ids=tuple(blocks),
        tenant=facts.tenant,
        priority=facts.priority,
        slo=facts.slo,
        cancel_after_s=None if seen.is_complete else seen.left_after_s,
        max_tokens=most,
    )


# -- lines -------------------------------------------------------------------------------------------------------


def steps(
    lines: Iterable[NumberedLine], name: str, kinds: tuple[type, ...]
) -> tuple[RouterSettings, Iterator[tuple[float, list[Any]]]]:
    """(the router's settings, (time, the event, the commands of `kinds`) of each step).

    Other kinds are not decoded, for speed. An invalid last line is ignored, because it was truncated when the router
    died. Raises TraceError: this function for the first line, the iterator for the others.
    """
    rows = iter(lines)
    line, text = next(rows, (1, ""))
    try:
        settings = replay.read_settings(text)
    except replay.RecordingError as error:
        raise TraceError(name, line, "settings", text, error.expected) from None
    return settings, _steps(rows, name, {kind.__name__ for kind in kinds})


def _steps(rows: Iterator[NumberedLine], name: str, wanted: set[str]) -> Iterator[tuple[float, list[Any]]]:
    last_s = -math.inf
    for line, text in rows:
        try:
            row = json.loads(text)
            now_s = float(row["now_s"])
            found = [replay.decode(one) for one in (row["event"], *row["commands"]) if one["is"] in wanted]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if next(rows, None) is None:
                return
            raise TraceError(name, line, "step", text, f"an event and its commands ({error})") from None
        if not last_s <= now_s < math.inf:
            raise TraceError(name, line, "now_s", now_s, "no earlier than the line before")
        last_s = now_s
        yield now_s, found


# --- cluster --------------------------------------------------------------------------------------------------
# The recorded router's workers, their learned costs, links and deaths. With the trace of `read_recording` and
# `RecordedCluster.config`, a simulation reproduces the recorded run.

_CLUSTER_KINDS: Final = (
    RequestArrived,
    WorkerConnected,
    WorkerLost,
    WorkerForgotten,
    Load,
    BatchTimed,
    TransferEnded,
    Prefill,
    Reserve,
    Granted,
)
DEFAULT_HEARTBEAT_S: Final = 0.1  # if no worker reported twice
DEFAULT_MESSAGE_S: Final = 2e-4  # if nothing was granted
MAX_ERRORS: Final = 4096  # recent batches from which the variation around the cost is computed
FEWEST_ERRORS: Final = 16
SIGMA_OF_MEDIAN: Final = 1.4826  # standard deviation of a normal variable with a median distance of 1 from its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCluster:
    """What the recorded router knew at the end of the recording."""

    router: RouterSettings
    workers: tuple[WorkerShape, ...]
    block_size: int
    slo: Slo  # targets that most requests had
    heartbeat_s: float
    message_s: float  # one way between router and worker: half of the fastest grant
    noise: float  # relative standard deviation of batches around their prediction, without outliers
    faults: tuple[WorkerFault, ...]  # worker deaths

    def config(self, **others: Any) -> SimConfig:
        """`others` are fields of SimConfig that override or add to the recorded ones."""
        held: dict[str, Any] = {
            "workers": self.workers,
            "slo": self.slo,
            "router": self.router,
            "block_size": self.block_size,
            "heartbeat_s": self.heartbeat_s,
            "message_s": self.message_s,
            "noise": self.noise,
            "faults": self.faults,
        }
        return SimConfig(**{**held, **others})


def read_cluster(lines: Iterable[NumberedLine], name: str) -> RecordedCluster:
    """Raises TraceError like read_recording, and ConfigError if no decode worker ever connected."""
    settings, rows = steps(lines, name, _CLUSTER_KINDS)
    seen = _SeenCluster()
    for now_s, items in rows:
        for item in items:
            seen.take(item, now_s)
    workers = tuple([one.shape() for one in seen.workers.values()])
    decodes = [one.hello for one in seen.workers.values() if one.hello.role is Role.DECODE]
    if not decodes:
        raise ConfigError("trace", f"{name}, which no decode worker is part of", "a recording of a whole cluster")
    return RecordedCluster(
        router=settings,
        workers=workers,
        block_size=decodes[0].block_size,
        slo=seen.slos.most_common(1)[0][0] if seen.slos else Slo(),
        heartbeat_s=seen.heartbeat_s(),
        message_s=0.5 * seen.quickest_grant_s if seen.quickest_grant_s < math.inf else DEFAULT_MESSAGE_S,
        noise=SIGMA_OF_MEDIAN * statistics.median(seen.errors) if len(seen.errors) >= FEWEST_ERRORS else 0.0,
        faults=tuple(seen.deaths()),
    )


@dataclass(slots=True)
class _Worker:
    hello: WorkerConnected  # the first
    cost: CostModel
    link: LinkModel | None = None  # speeds of its transfers with any peer
    first_beat_s: float = 0.0
    last_beat_s: float = 0.0
    num_beats: int = 0
    lost: list[float] = field(default_factory=list)  # when it disconnected
    back: list[float] = field(default_factory=list)  # when it connected again; the last may be missing

    def shape(self) -> WorkerShape:
        hello, link = self.hello, self.link
        shape = WorkerShape(
            worker_id=hello.worker_id,
            role=hello.role,
            cost=self.cost.coefficients,
            prior=hello.cost,
            kv_capacity_tokens=hello.num_blocks * hello.block_size,
            max_batch=hello.max_batch,
            max_batch_tokens=hello.max_batch_tokens,
            inbox_depth=hello.inbox_depth,
            max_context_tokens=hello.max_context_tokens,
            pulls_kv=hello.pulls_kv,
        )
        if hello.block_bytes:
            shape = replace(shape, kv_bytes_per_token=-(-hello.block_bytes // hello.block_size))
        if link is not None:
            shape = replace(shape, link=NetworkLink(latency_s=link.latency_s, bytes_per_s=link.bandwidth_bytes_s))
        return shape


@final
class _SeenCluster:
    def __init__(self) -> None:
        self.workers: dict[str, _Worker] = {}
        self.slos: Counter[Slo] = Counter()
        self.quickest_grant_s = math.inf
        self.errors: deque[float] = deque(maxlen=MAX_ERRORS)  # of batches, relative to the prediction
        self._asked_s: dict[tuple[str, int], float] = {}  # attempt -> when the request to its decode worker was sent
        self._senders: dict[tuple[str, int], str] = {}  # attempt -> prefill worker, until its KV has arrived
        self._first_s: float | None = None  # arrivals
        self._last_s = 0.0

    def take(self, item: Event | Command, now_s: float) -> None:
        match item:
            case RequestArrived():
                self._first_s = now_s if self._first_s is None else self._first_s
                self._last_s = now_s
                self.slos[item.slo] += 1
            case WorkerConnected():
                worker = self.workers.setdefault(item.worker_id, _Worker(item, CostModel(item.cost)))
                if len(worker.lost) > len(worker.back):
                    worker.back.append(now_s)
            case WorkerLost() | WorkerForgotten() if item.worker_id in self.workers:
                worker = self.workers[item.worker_id]
                if len(worker.lost) == len(worker.back):
                    worker.lost.append(now_s)
            case Load() if item.worker_id in self.workers:
                worker = self.workers[item.worker_id]
                worker.first_beat_s = worker.first_beat_s if worker.num_beats else now_s
                worker.last_beat_s = now_s
                worker.num_beats += 1
            case BatchTimed() if item.worker_id in self.workers:
                self._timed(item, self.workers[item.worker_id].cost)
            case Reserve():
                self._asked_s[item.request_id, item.attempt] = now_s
            case Granted():
                asked_s = self._asked_s.pop((item.request_id, item.attempt), -math.inf)
                self.quickest_grant_s = min(self.quickest_grant_s, now_s - asked_s)
            case Prefill():
                self._senders[item.request_id, item.attempt] = item.worker_id
            case TransferEnded() if item.num_bytes or not item.is_committed:  # not the sender's word
                sender = self._senders.pop((item.request_id, item.attempt), "")
                for worker_id in (item.worker_id, sender):
                    if item.is_committed and worker_id in self.workers:
                        worker = self.workers[worker_id]
                        worker.link = worker.link or LinkModel()
                        worker.link.observe(item.num_bytes, item.busy_s or item.transfer_s)

    def _timed(self, batch: BatchTimed, cost: CostModel) -> None:
        foretold_s = cost.step_s(batch.rows, batch.context_tokens, batch.prefill_tokens, batch.prefill_token_context)
        is_sample = cost.observe_batch(batch)
        if is_sample and foretold_s > 0.0:
            self.errors.append(abs(batch.step_s / foretold_s - 1.0))

    def heartbeat_s(self) -> float:
        beating = [one for one in self.workers.values() if one.num_beats > 1]
        if not beating:
            return DEFAULT_HEARTBEAT_S
        return sum((one.last_beat_s - one.first_beat_s) / (one.num_beats - 1) for one in beating) / len(beating)

    def deaths(self) -> list[WorkerFault]:
        """Only between the first and the last arrival: earlier losses belong to the start of the cluster, later ones to
        its end."""
        found = []
        for worker_id, worker in self.workers.items():
            for lost_s, back_s in zip_longest(worker.lost, worker.back, fillvalue=math.inf):
                if self._first_s is not None and self._first_s <= lost_s <= self._last_s:
                    at_s = lost_s - self._first_s
                    kind = WorkerFaultKind.DIE
                    found.append(WorkerFault(at_s=at_s, worker_id=worker_id, kind=kind, for_s=back_s - lost_s))
        return sorted(found, key=lambda one: one.at_s)
