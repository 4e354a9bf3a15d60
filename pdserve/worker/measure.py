"""What a worker tells Prometheus, whatever its role. Names are those of pdserve.telemetry.metric_names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from pdserve.core import effects as fx
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics


@final
class Measure:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told_events: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        return self._metrics.is_on

    def stepped(self, account: fx.StepAccount, num_drawn: int, num_accepted: int, step_s: float) -> None:
        """`num_accepted`: tokens beyond the first of each row."""
        metrics = self._metrics
        metrics.add(metric_names.STEPS)
        metrics.observe(metric_names.STEP_TIME, step_s)
        metrics.add(metric_names.PREFILLED_TOKENS, account.prefill_tokens)
        metrics.add(metric_names.DRAWN_TOKENS, num_drawn)
        if account.draft_tokens:
            metrics.add(metric_names.SPECULATED_STEPS)
            metrics.add(metric_names.DRAFT_TOKENS, num_accepted, outcome="accepted")
            metrics.add(metric_names.DRAFT_TOKENS, account.draft_tokens - num_accepted, outcome="rejected")

    def loaded(self, load: fx.Load, num_used_blocks: int) -> None:
        metrics = self._metrics
        metrics.set(metric_names.WORKER_RUNNING, load.running)
        metrics.set(metric_names.WORKER_WAITING, load.waiting)
        metrics.set(metric_names.KV_BLOCKS, load.free_blocks, state="free")
        metrics.set(metric_names.KV_BLOCKS, load.evictable_blocks, state="cached")
        metrics.set(metric_names.KV_BLOCKS, num_used_blocks, state="used")

    def transferred(self, events: Mapping[str, int]) -> None:
        """How often each thing has happened since the beginning; what is new since the last time is told."""
        for event, count in events.items():
            new = count - self._told_events.get(event, 0)
            if new > 0:
                self._metrics.add(metric_names.TRANSFER_EVENTS, new, event=event)
        self._told_events = dict(events)
