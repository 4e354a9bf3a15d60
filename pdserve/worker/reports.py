"""Reports load, links and step times to routers, and the same to Prometheus. Runs on the engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from pdserve.core import effects as fx
from pdserve.core import protocol as pr
from pdserve.engine.interface import PlainOuts, RowOut
from pdserve.telemetry.metrics import Metrics
from pdserve.worker.measure import WorkerMetrics
from pdserve.worker.outbox import Outbox
from pdserve.worker.timed import TimedSteps

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
