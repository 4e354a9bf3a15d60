"""A run of a load and a controller in about a second: requests as the closed form sees them, not the real router. Pure.

- A request is admitted when it arrives, or rejected. All decode workers together have room for its rows if each step
  still ends within the TPOT target, and for its prompt if the prompts that wait are computed within the TTFT target.
  An admitted request meets its targets.
- Prefill workers and the spare time of decode workers compute prompts. Decode steps are shorter while there are few
  rows and prompts, so the answers of a worker that drains end sooner.
- A start, a drain and a change of role take their time, as in `simulator/cluster/elastic.py`.

docs/benchmarks/scaling.md compares it with the simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.cost.latency import CostModel
from pdserve.core.types import Role, Slo
from router.scaling.demand import SumsOfRequests
from router.scaling.interface import ChangeKind, Decision, Interval, Observed, ScalingController, Size
from simulator.model import Trace, TraceRequest, WorkerShape

IN_TIME: Final = 0.8  # of the TTFT target, for prompts that wait; the rest is for transfers and steps
RATE_S: Final = 5.0  # over which the work of prompts is averaged
LEAST_SPEED: Final = 0.05  # workers that compute prompts; avoids a division by zero


@dataclass(slots=True, eq=False)
class _Worker:
    role: Role
    rows: int = 0
    rows_s: float = 0.0  # of a step
    kv_tokens: float = 0.0  # of its rows, half done
    becomes: Role | None = None
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    worker: _Worker
    row_s: float
    context: float
    tokens: int
    begun: float  # in steps


@dataclass(frozen=True, slots=True)
class ApproximateRun:
    requests: int
    met: int
    worker_s: float
    decisions: list[Decision]


@final
class Approximation:
    def __init__(
        self,
        trace: Trace,
        slo: Slo,
        controller: ScalingController,
        first: Size,
        shape: WorkerShape,
        *,
        start_s: float,
        change_role_s: float = 2.0,
        every_s: float = 5.0,
        foresight: Callable[[float], tuple[Interval, ...]] | None = None,
    ) -> None:
        self._trace, self._slo, self._controller, self._shape, self._foresight = (
            trace,
            slo,
            controller,
            shape,
            foresight,
        )
        self._start_s, self._change_role_s, self._every_s = start_s, change_role_s, every_s
        self._cost = CostModel(shape.cost)
        self._workers = [_Worker(role) for role, count in zip(Role, first, strict=True) for _ in range(count)]
        self._starting: list[tuple[float, int, Role]] = []  # (when it serves, order, role)
        self._running: list[tuple[float, int, _Row]] = []  # (the step that ends it, order, row)
        self._now_s = self._steps = self._worker_s = 0.0  # steps: since the beginning, of any decode worker
        self._waiting_s = self._prompts = 0.0  # work of prompts that wait; work that arrives per second
        self._busy_s = self._prefilled_s = 0.0
        self._number = 0
        self._sums = SumsOfRequests()
        self._found: list[Decision] = []
        self._met = 0

    def run(self) -> ApproximateRun:
        count, next_s = 0, self._every_s
        for one in self._trace:
            count += 1
            while next_s <= one.arrival_s:
                self._advance(next_s)
                self._decide()
                next_s += self._every_s
            self._advance(one.arrival_s)
            self._arrive(one)
        while self._running:
            self._advance(next_s)
            self._decide()
            next_s += self._every_s
        return ApproximateRun(count, self._met, self._worker_s, self._found)

    # -- time ----------------------------------------------------------------------------------------------------

    def _ready(self, role: Role) -> list[_Worker]:
        return [one for one in self._workers if one.role is role and not one.is_draining]

    def _advance(self, until_s: float) -> None:
        """Answers end and workers start until that time."""
        while True:
            step_s = self._step_s()
            ends_s = self._now_s + (self._running[0][0] - self._steps) * step_s if self._running else math.inf
            starts_s = self._starting[0][0] if self._starting else math.inf
            now_s = min(until_s, ends_s, starts_s)
            self._pass(now_s - self._now_s, step_s)
            self._now_s = now_s
            if now_s == starts_s:
                self._workers.append(_Worker(heapq.heappop(self._starting)[2]))
            elif now_s == ends_s:
                self._end()
            else:
                return

    def _pass(self, seconds: float, step_s: float) -> None:
        self._worker_s += seconds * (len(self._workers) + len(self._starting))
        self._steps += seconds / step_s
        prefills = len(self._ready(Role.PREFILL))
        done_s = min(self._waiting_s, seconds * self._prompt_speed())
        self._waiting_s -= done_s
        self._prefilled_s += min(done_s, seconds * prefills)
        self._prompts *= math.exp(-seconds / RATE_S)

    def _step_s(self) -> float:
        decodes = self._ready(Role.DECODE)
        base_s = self._cost.decode_coefficients[0] + sum(one.rows_s for one in decodes) / len(decodes)
        share = max(0.0, self._prompts - len(self._ready(Role.PREFILL))) / len(decodes)
        return min(base_s / max(1.0 - share, LEAST_SPEED), max(self._slo.tpot_s, base_s))

    def _prompt_speed(self) -> float:
        """Workers that compute prompts: all prefill workers, and what rows leave of decode steps at the target."""
        decodes = self._ready(Role.DECODE)
        spare = len(decodes) * (1.0 - self._shape.cost.prefill_base_s / self._slo.tpot_s)
        spare -= sum(one.rows_s for one in decodes) / self._slo.tpot_s
        return max(LEAST_SPEED, len(self._ready(Role.PREFILL)) + max(0.0, spare))

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, one: TraceRequest) -> None:
        slo, shape = self._slo, self._shape
        self._sums.arrived(one.prompt_tokens, 0, slo)
        prompt_s = self._cost.prefill_s(one.prompt_tokens, 0.0, shape.max_batch_tokens)
        base_s, per_row_s, per_token_s = self._cost.decode_coefficients
        context = one.prompt_tokens + 0.5 * one.output_tokens
        row_s = per_row_s + per_token_s * context
        decodes = self._ready(Role.DECODE)
        worker = min(decodes, key=lambda each: each.rows)
        room_s = len(decodes) * (slo.tpot_s - base_s) - sum(each.rows_s for each in decodes)
        is_full = worker.rows >= shape.max_batch or worker.kv_tokens + context > shape.kv_capacity_tokens
        waits_s = (self._waiting_s + prompt_s) / self._prompt_speed()
        if is_full or row_s > room_s or waits_s > IN_TIME * slo.ttft_s:
            self._sums.ended(False)
            return
        self._met += 1
        self._waiting_s += prompt_s
        self._prompts += prompt_s / RATE_S
        worker.rows += 1
        worker.rows_s += row_s
        worker.kv_tokens += context
        self._number += 1
        row = _Row(worker, row_s, context, one.output_tokens, self._steps)
        heapq.heappush(self._running, (self._steps + one.output_tokens, self._number, row))

    def _end(self) -> None:
        row = heapq.heappop(self._running)[2]
        worker = row.worker
        worker.rows -= 1
        worker.rows_s -= row.row_s
        worker.kv_tokens -= row.context
        self._sums.answers += 1
        self._sums.answer_tokens += row.tokens
        self._sums.ended(True)
        if worker.is_draining and not worker.rows:
            self._drained(worker)

    # -- workers -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        now_s, shape = self._now_s, self._shape
        prefills, decodes = self._ready(Role.PREFILL), self._ready(Role.DECODE)
        begin = self._steps - self._every_s / self._step_s()
        self._sums.tokens = sum(self._steps - max(row.begun, begin) for _, _, row in self._running)
        so_far = [self._steps - row.begun for _, _, row in self._running]
        sums, self._sums = self._sums, SumsOfRequests()
        busy = self._prefilled_s / (self._every_s * len(prefills)) if prefills else 0.0
        self._prefilled_s = 0.0
        decision = self._controller.decide(
            Observed(
                interval=sums.interval(now_s - self._every_s, now_s),
                ready=Size(len(prefills), len(decodes)),
                starting=Size(*(sum(one[2] is role for one in self._starting) for role in Role)),
                draining=Size(*(sum(one.is_draining and one.role is role for one in self._workers) for role in Role)),
                running=len(self._running),
                tokens_so_far=sum(so_far) / len(so_far) if so_far else 0.0,
                cost=shape.cost,
                prefill_busy=min(1.0, busy),
                decode_rows=sum(one.rows for one in decodes) / len(decodes),
                kv_tokens=shape.kv_capacity_tokens,
                max_batch=shape.max_batch,
                max_batch_tokens=shape.max_batch_tokens,
                future=self._foresight(now_s) if self._foresight is not None else (),
            ),
            now_s,
        )
        self._found.append(decision)
        for change in decision.changes:
            match change.kind:
                case ChangeKind.START:
                    for _ in range(change.count):
                        self._start(self._start_s, change.role)
                case ChangeKind.STOP:
                    self._drain(change.role, change.count, None)
                case ChangeKind.CHANGE_ROLE:
                    self._drain(change.role.other, change.count, change.role)

    def _start(self, after_s: float, role: Role) -> None:
        self._number += 1
        heapq.heappush(self._starting, (self._now_s + after_s, self._number, role))

    def _drain(self, role: Role, count: int, becomes: Role | None) -> None:
        ready = sorted(self._ready(role), key=lambda one: one.rows)
        assert len(ready) >= count + (role is Role.DECODE), "one decode worker stays"
        for worker in ready[:count]:
            worker.is_draining, worker.becomes = True, becomes
            if not worker.rows:
                self._drained(worker)

    def _drained(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker.becomes is not None:
            self._start(self._change_role_s, worker.becomes)
