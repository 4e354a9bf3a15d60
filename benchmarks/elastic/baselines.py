"""Other rules for the size of a cluster, written from their public descriptions, with the controller's interface. Pure.

- `Fixed`: nothing changes.
- `Threshold`: Kubernetes' horizontal pod autoscaler for each role. The wanted number is the present one times the
  metric over its target, the largest of several metrics counts, a deviation of 10 % is tolerated, and a scale-down
  waits until nothing higher was wanted for 300 s. Metrics: the share of time that prefill workers compute, the
  sequences per decode worker over those that a step within the TPOT target holds, and queued requests per worker.
- `Predictive`: the rule of Dynamo's SLA planner. Each interval it predicts the next interval's load, and divides it by
  the throughput that a profile gives one worker of each role at the targets.
- `RoleRule`: xLLM's rule with a fixed number of workers. A decode worker becomes a prefill worker when the predicted
  TTFT exceeds its target and decode has room, and a prefill worker becomes a decode worker at once when decode does
  not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, final

from pdserve.core.cost.latency import CostModel
from pdserve.core.types import Role
from router.scaling.demand import joined
from router.scaling.interface import Change, ChangeKind, Decision, Interval, Observed, Size

KEPT_S: Final = 600.0


def _decision(observed: Observed, now_s: float, wanted: Size, reason: str) -> Decision:
    """Starts and stops towards `wanted`. Workers that start count as there; none is started while others drain."""
    changes = []
    there = Size(observed.ready.prefill + observed.starting.prefill, observed.ready.decode + observed.starting.decode)
    pairs = zip(Role, (wanted.prefill, wanted.decode), (there.prefill, there.decode), observed.ready, strict=True)
    for role, want, have, ready in pairs:
        if want > have:
            changes.append(Change(kind=ChangeKind.START, role=role, count=want - have))
        elif want < have:
            count = min(have - want, ready - 1 if role is Role.DECODE else ready)
            if count > 0:
                changes.append(Change(kind=ChangeKind.STOP, role=role, count=count))
    return Decision(at_s=now_s, changes=tuple(changes), reason=reason, size=observed.ready)


def _bounded(size: Size, low: Size, most: int) -> Size:
    prefill, decode = max(size.prefill, low.prefill), max(size.decode, low.decode, 1)
    if prefill + decode > most:
        prefill = min(prefill, max(low.prefill, round(most * prefill / (prefill + decode))))
        decode = most - prefill
    return Size(prefill, decode)


class _Load:
    """The arrivals of the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[Interval] = deque()

    def add(self, interval: Interval) -> None:
        self._kept.append(interval)
        while self._kept[0].begin_s < interval.end_s - KEPT_S:
            self._kept.popleft()

    def window(self, back: int = 0) -> Interval | None:
        """The latest window, or the one `back` windows before it; None if it was not seen completely."""
        end_s = self._kept[-1].end_s - back * self._window_s
        begin_s = end_s - self._window_s
        if self._kept[0].begin_s > begin_s + 1e-6:
            return None
        return joined([one for one in self._kept if begin_s - 1e-6 <= one.begin_s < end_s - 1e-6])


def _per_second(cost: CostModel, window: Interval, observed: Observed) -> tuple[float, float]:
    """Prompt tokens per second of a prefill worker, and output tokens per second of a decode worker, at the targets and
    at mean lengths: what a profile of each role alone says."""
    count = max(window.requests, 1)
    prompt, uncached = window.prompt_tokens / count, max(window.uncached_tokens / count, 1.0)
    output = window.tokens / max(window.answers, 1)
    prefill_s = cost.prefill_s(uncached, prompt - uncached, observed.max_batch_tokens)
    rows = _rows_within(cost, window.tpot_targets_s / count, prompt + 0.5 * output, observed)
    return uncached / prefill_s, rows / max(cost.decode_s(rows, rows * (prompt + 0.5 * output)), 1e-9)


def _rows_within(cost: CostModel, tpot_s: float, context: float, observed: Observed) -> float:
    base, per_row, per_token = cost.decode_coefficients
    rows = (tpot_s - base) / max(per_row + per_token * context, 1e-12)
    return max(1.0, min(rows, float(observed.max_batch), 0.9 * observed.kv_tokens / max(context, 1.0)))


@final
class Fixed:
    def decide(self, observed: Observed, now_s: float) -> Decision:
        return Decision(at_s=now_s, reason="fixed", size=observed.ready)


TOLERANCE: Final = 0.1
STABLE_S: Final = 300.0


@final
class Threshold:
    def __init__(
        self, most: int, low: Size, *, every_s: float = 15.0, busy: float = 0.7, rows: float = 0.7, queued: float = 2.0
    ) -> None:
        self._most, self._low, self._every_s = most, low, every_s
        self._targets = (busy, rows, queued)
        self._load = _Load(every_s)
        self._wanted: deque[tuple[float, Size]] = deque()
        self._next_s = every_s
        self._busy: list[Observed] = []

    def decide(self, observed: Observed, now_s: float) -> Decision:
        self._load.add(observed.interval)
        self._busy.append(observed)
        window = self._load.window()
        if now_s < self._next_s - 1e-6 or window is None or not window.requests:
            return Decision(at_s=now_s, reason="between two intervals", size=observed.ready)
        self._next_s = now_s + self._every_s
        seen, self._busy = self._busy, []
        busy, rows, queued = self._targets
        context = window.prompt_tokens / window.requests + 0.5 * window.tokens / max(window.answers, 1)
        held = _rows_within(CostModel(observed.cost), window.tpot_targets_s / window.requests, context, observed)
        waiting = _mean([one.queued for one in seen]) / max(observed.ready.total, 1)
        ratios = (
            max(_mean([one.prefill_busy for one in seen]) / busy, waiting / queued),
            max(_mean([one.decode_rows for one in seen]) / held / rows, waiting / queued),
        )
        counts = []
        for ratio, ready in zip(ratios, observed.ready, strict=True):
            counts.append(ready if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ready * ratio - 1e-9))
        wanted = _bounded(Size(*counts), self._low, self._most)
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - STABLE_S:
            self._wanted.popleft()
        # Down only to the largest number that was wanted lately.
        sizes = [size for _, size in self._wanted]
        prefill = max(wanted.prefill, min(observed.ready.prefill, max(one.prefill for one in sizes)))
        decode = max(wanted.decode, min(observed.ready.decode, max(one.decode for one in sizes)))
        size = _bounded(Size(prefill, decode), self._low, self._most)
        return _decision(observed, now_s, size, f"metrics over targets: {ratios[0]:.2f}, {ratios[1]:.2f}")


@final
class Predictive:
    """`trend`: the prediction is a straight line through the last two intervals; otherwise the last interval's load."""

    def __init__(self, most: int, low: Size, *, every_s: float = 60.0, trend: bool = True) -> None:
        self._most, self._low, self._every_s, self._trend = most, low, every_s, trend
        self._load = _Load(every_s)
        self._next_s = every_s

    def decide(self, observed: Observed, now_s: float) -> Decision:
        self._load.add(observed.interval)
        last = self._load.window()
        if now_s < self._next_s - 1e-6 or last is None or not last.requests or not last.answers:
            return Decision(at_s=now_s, reason="between two intervals", size=observed.ready)
        self._next_s = now_s + self._every_s
        before = self._load.window(1)
        factor = 1.0
        if self._trend and before is not None and before.requests:
            factor = max(0.0, 2.0 - before.requests / last.requests)
        prefill_per_s, decode_per_s = _per_second(CostModel(observed.cost), last, observed)
        prompts = factor * last.uncached_tokens / last.width_s
        answers = factor * last.requests / last.width_s * last.tokens / last.answers
        counts = Size(math.ceil(prompts / prefill_per_s), math.ceil(answers / decode_per_s))
        wanted = _bounded(Size(max(1, counts.prefill), counts.decode), self._low, self._most)
        return _decision(observed, now_s, wanted, f"predicted {factor * last.requests / last.width_s:.1f} requests/s")


@final
class RoleRule:
    def __init__(self, *, window_s: float = 10.0) -> None:
        self._load = _Load(window_s)

    def decide(self, observed: Observed, now_s: float) -> Decision:
        self._load.add(observed.interval)
        last = self._load.window()
        ready = observed.ready
        if last is None or not last.requests:
            return Decision(at_s=now_s, reason="no requests", size=ready)
        cost, count = CostModel(observed.cost), last.requests
        context = last.prompt_tokens / count + 0.5 * last.tokens / max(last.answers, 1)
        held = _rows_within(cost, last.tpot_targets_s / count, context, observed)
        prompt_s = cost.prefill_s(last.uncached_tokens / count, 0.0, observed.max_batch_tokens)
        # Queued requests share the prefill workers, and so does what arrives faster than they compute.
        ahead = observed.queued + max(0.0, count - ready.prefill * last.width_s / prompt_s)
        ttft_s = prompt_s * (1.0 + ahead / max(ready.prefill, 1)) if ready.prefill else math.inf
        is_late = ttft_s > last.ttft_targets_s / count
        is_full = observed.decode_rows > held
        changes: Sequence[Change] = ()
        if is_full and ready.prefill > 0:
            changes = (Change(kind=ChangeKind.CHANGE_ROLE, role=Role.DECODE, count=1),)
        elif is_late and not is_full and ready.decode > 1:
            changes = (Change(kind=ChangeKind.CHANGE_ROLE, role=Role.PREFILL, count=1),)
        return Decision(at_s=now_s, changes=tuple(changes), reason=f"predicted TTFT {ttft_s:.2f} s", size=ready)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
