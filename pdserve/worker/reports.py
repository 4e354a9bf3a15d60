"""Reports load, links and step times to routers, and the same to Prometheus. Runs on the engine thread only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.core.kv.fetch import Fetch
from pdserve.core.kv.host_tier import HostTier
from pdserve.engine.interface import PlainOuts, RowOut
from pdserve.engine.memory.disk import DiskTier
from pdserve.engine.memory.store import StoreTier
from pdserve.telemetry import metric_names
from pdserve.telemetry.metric_names import MetricSpec
from pdserve.telemetry.metrics import Metrics
from pdserve.worker.messages import Outbox

# --- metrics for Prometheus -----------------------------------------------------------------------------------
# Both roles have them. Names are those of pdserve.telemetry.metric_names.


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

    def tiered(self, tier: HostTier) -> None:
        self._metrics.set(metric_names.KV_HOST_BLOCKS, len(tier))
        self._add_new(metric_names.KV_HOST_COPIES, "direction", tier.copies)

    def stored(self, disk: DiskTier | None, store: StoreTier | None) -> None:
        if disk is not None:
            self._metrics.set(metric_names.KV_DISK_BLOCKS, len(disk.files))
            self._metrics.set(metric_names.KV_DISK_BYTES, disk.files.num_bytes)
            self._add_new(metric_names.KV_DISK_EVENTS, "event", disk.events)
        if store is not None:
            self._add_new(metric_names.KV_STORE_EVENTS, "event", store.events)

    def fetched(self, fetch: Fetch, num_blocks: int, took_s: float) -> None:
        """A fetch has ended, with so many verified blocks."""
        metrics, tier = self._metrics, fetch.source
        metrics.add(metric_names.KV_FETCHED_BLOCKS, num_blocks, tier=tier, outcome="hit")
        metrics.add(metric_names.KV_FETCHED_BLOCKS, len(fetch.blocks) - num_blocks, tier=tier, outcome="miss")
        metrics.observe(metric_names.KV_FETCH_TIME, took_s, tier=tier)
        if fetch.predicted_s < math.inf:  # else the source began to hang while the fetch was started
            metrics.add(metric_names.KV_FETCH_PREDICTED, fetch.predicted_s, tier=tier)

    def transferred(self, events: Mapping[str, int]) -> None:
        """Takes total counts; adds the difference from the last call."""
        self._add_new(metric_names.TRANSFER_EVENTS, "event", events)

    def rejected_rank_joins(self, by_reason: Mapping[str, int]) -> None:
        """Takes total counts; adds the difference from the last call."""
        self._add_new(metric_names.REJECTED_RANK_JOINS, "reason", by_reason)

    def skip(
        self,
        events: Mapping[str, int],
        joins: Mapping[str, int],
        tier: HostTier | None,
        disk: DiskTier | None,
        store: StoreTier | None,
    ) -> None:
        """Takes total counts of the process of which an earlier program has reported the difference."""
        self._reported = {
            metric_names.TRANSFER_EVENTS.name: dict(events),
            metric_names.REJECTED_RANK_JOINS.name: dict(joins),
        }
        if tier is not None:
            self._reported[metric_names.KV_HOST_COPIES.name] = tier.copies
        if disk is not None:
            self._reported[metric_names.KV_DISK_EVENTS.name] = dict(disk.events)
        if store is not None:
            self._reported[metric_names.KV_STORE_EVENTS.name] = dict(store.events)

    def _add_new(self, spec: MetricSpec, label: str, counts: Mapping[str, int]) -> None:
        reported = self._reported.get(spec.name, {})
        for value, count in counts.items():
            new = count - reported.get(value, 0)
            if new > 0:
                self._metrics.add(spec, new, **{label: value})
        self._reported[spec.name] = dict(counts)


# --- step times -----------------------------------------------------------------------------------------------
# Chooses the step times that are reported to routers for their cost models.
#
# A step that prefills is reported individually. Decode steps are short and noisy, so steps with the same number of rows
# are reported as their mean, which the linear cost model predicts like a single step. TPOT is a mean over steps, so
# each step must have equal weight, and every mean is over the same number of steps. Means over equal times would give
# slow steps too much weight.

STEPS: Final = 8  # number of decode steps in one mean;
LONGEST_SPANS: Final = 4.0  # fewer if they take this many times `every_s`, because long steps vary little


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    context_tokens: int = 0
    seconds: float = 0.0


@final
class TimedSteps:
    """Reports at most one step time in `every_s`."""

    __slots__ = ("_every_s", "_reported_s", "_sums")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._reported_s = float("-inf")
        self._sums: dict[int, _Sum] = {}  # rows -> their decode steps since the last mean

    def observe(self, account: fx.StepAccount, step_s: float, now_s: float) -> tuple[fx.StepAccount, float] | None:
        """The step, or the mean of similar ones, to be reported now."""
        every_s, is_due = self._every_s, now_s - self._reported_s >= self._every_s
        if account.prefill_tokens:
            if is_due:
                self._reported_s = now_s
            return (account, step_s) if is_due else None
        rows = account.decode_rows
        like = self._sums.setdefault(rows, _Sum())
        like.steps += 1
        like.context_tokens += account.context_tokens
        like.seconds += step_s
        if not is_due or (like.steps < STEPS and like.seconds < LONGEST_SPANS * every_s):
            return None
        self._reported_s = now_s
        del self._sums[rows]
        return replace(account, context_tokens=round(like.context_tokens / like.steps)), like.seconds / like.steps


# --- reports --------------------------------------------------------------------------------------------------

TIMED_BATCHES_PER_HEARTBEAT: Final = 10

Links = list[tuple[str, str, str]]  # (decode worker, transport, reason)


@final
class StatusReports:
    def __init__(self, outbox: Outbox, metrics: Metrics, heartbeat_s: float) -> None:
        self.metrics = WorkerMetrics(metrics)
        self._outbox = outbox
        self._heartbeat_s = heartbeat_s
        self._timed = TimedSteps(heartbeat_s / TIMED_BATCHES_PER_HEARTBEAT)
        self._links: Links = []  # as last reported, like the next two
        self._load: pr.Load | None = None
        self._reported_at_s = float("-inf")

    def attached(self, session: int, load: pr.Load) -> None:
        """A router has attached: it gets the load, and the links that the others know."""
        self._outbox.report_load(session, load)
        if self._links:
            self._outbox.report_links(self._links, session)

    def changed(self) -> None:
        """The worker's state has changed beside its load: the next report is due after a fifth of a heartbeat."""
        self._load = None

    def due_load(self, now_s: float, load: Callable[[], pr.Load]) -> pr.Load | None:
        """The load if a report is due: on each heartbeat, or after a change once a fifth of a heartbeat has passed."""
        since_s = now_s - self._reported_at_s
        if since_s < self._heartbeat_s / 5:
            return None
        current = load()
        if since_s < self._heartbeat_s and current == self._load:
            return None
        self._reported_at_s, self._load = now_s, current
        return current

    def send(self, load: pr.Load, links: Links) -> None:
        """Reports to all routers; links only if they have changed."""
        if links != self._links:
            self._links = links
            self._outbox.report_links(links)
        self._outbox.report_all(load)

    def step(self, account: fx.StepAccount, outs: Sequence[RowOut], step_s: float, now_s: float) -> None:
        """A step took `step_s` and has given `outs`."""
        num_sampled = len(outs) if isinstance(outs, PlainOuts) else sum(len(out.sampled) for out in outs)
        if self.metrics.is_on:
            # Tokens after each row's first sampled token were drafts.
            num_accepted = sum(max(0, len(out.sampled) - 1) for out in outs) if account.draft_tokens else 0
            self.metrics.stepped(account, num_sampled, num_accepted, step_s)
        if account.draft_tokens:  # routers plan with the time per token, which accepted drafts reduce
            step_s *= account.decode_rows / max(1, num_sampled)
        reported = self._timed.observe(account, step_s, now_s)
        if reported is not None:
            mean, mean_s = reported
            self._outbox.report_all(mean.timed(mean_s))
