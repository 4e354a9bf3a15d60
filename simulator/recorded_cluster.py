"""The cluster of a recorded router: its workers, their learned costs, links and deaths. Pure.

With read_recording's trace and `RecordedCluster.config`, a simulation reproduces the recorded run.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final, final

from pdserve.core.errors import ConfigError
from pdserve.core.latency import CostModel, LinkModel
from pdserve.core.protocol import BatchTimed, Granted, Load, Prefill, Reserve, TransferEnded
from pdserve.core.types import Role, Slo
from router.commands import Command
from router.events import Event, RequestArrived, WorkerConnected, WorkerForgotten, WorkerLost
from router.settings import RouterSettings
from simulator.model import NetworkLink, SimConfig, WorkerFault, WorkerFaultKind, WorkerShape
from simulator.recorded import steps
from simulator.trace_rows import NumberedLine

_KINDS: Final = (
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
    settings, rows = steps(lines, name, _KINDS)
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
