"""The Prometheus metrics of a worker of either role. Names are those of pdserve.telemetry.metric_names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.telemetry import metric_names
from pdserve.telemetry.metric_names import MetricSpec
from pdserve.telemetry.metrics import Metrics


@final
class WorkerMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reported: dict[str, Mapping[str, int]] = {}  # by metric

    @property
    def is_on(self) -> bool:
        return self._metrics.is_on

    def stepped(self, account: fx.StepAccount, num_sampled: int, num_accepted: int, step_s: float) -> None:
        """`num_accepted`: tokens beyond the first of each row."""
        metrics = self._metrics
        metrics.add(metric_names.STEPS)
        metrics.observe(metric_names.STEP_TIME, step_s)
        metrics.add(metric_names.PREFILLED_TOKENS, account.prefill_tokens)
        metrics.add(metric_names.SAMPLED_TOKENS, num_sampled)
        if account.draft_tokens:
            metrics.add(metric_names.SPECULATED_STEPS)
            metrics.add(metric_names.DRAFT_TOKENS, num_accepted, outcome="accepted")
            metrics.add(metric_names.DRAFT_TOKENS, account.draft_tokens - num_accepted, outcome="rejected")

    def loaded(self, load: pr.Load, num_used_blocks: int) -> None:
        metrics = self._metrics
        metrics.set(metric_names.WORKER_RUNNING, load.running)
        metrics.set(metric_names.WORKER_WAITING, load.waiting)
        metrics.set(metric_names.KV_BLOCKS, load.free_blocks, state="free")
        metrics.set(metric_names.KV_BLOCKS, load.evictable_blocks, state="cached")
        metrics.set(metric_names.KV_BLOCKS, num_used_blocks, state="used")

    def transferred(self, events: Mapping[str, int]) -> None:
        """Takes total counts; adds the difference from the last call."""
        self._add_new(metric_names.TRANSFER_EVENTS, "event", events)

    def rejected_rank_joins(self, by_reason: Mapping[str, int]) -> None:
        """Takes total counts; adds the difference from the last call."""
        self._add_new(metric_names.REJECTED_RANK_JOINS, "reason", by_reason)

    def _add_new(self, spec: MetricSpec, label: str, counts: Mapping[str, int]) -> None:
        reported = self._reported.get(spec.name, {})
        for value, count in counts.items():
            new = count - reported.get(value, 0)
            if new > 0:
                self._metrics.add(spec, new, **{label: value})
        self._reported[spec.name] = dict(counts)
