"""The router's metrics and spans of requests. Their names are in metric_names.py and names.py of pdserve/telemetry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from pdserve.core.errors import Cancelled, PdserveError
from pdserve.core.phases import Phase, Slice
from pdserve.core.results import Timings
from pdserve.core.types import Slo
from pdserve.telemetry import metric_names, names
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.tracing import OpenSpan, Tracing
from pdserve.v1 import worker_pb2
from router.commands import EndCancelled, FailRequest, FinishRequest, Outcome
from router.tenant_labels import TenantLabels

LinkOf = Callable[[str, str], worker_pb2.KvLink | None]  # prefill worker, decode worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Facts of a request besides its end."""

    span: OpenSpan
    slo: Slo
    operation: str  # names.CHAT or names.TEXT_COMPLETION
    model: str
    tenant: str = ""
    is_sibling: bool = False  # a further answer to a prompt that is already counted


@final
class Measure:
    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing,
        link_of: LinkOf = lambda prefill, decode: None,
        tenant_labels: int = 0,
    ) -> None:
        """`link_of` returns the KV connection of two workers. At most `tenant_labels` tenants have their own labels."""
        self.metrics, self.tracing, self._link_of = metrics, tracing, link_of
        self._labels = TenantLabels(tenant_labels)
        self._running_labels: set[str] = set()

    def arrived(self, facts: RequestFacts, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        facts.span.set(names.REQUEST_ID, request_id)
        facts.span.set(names.OPERATION, facts.operation)
        facts.span.set(names.PROVIDER, names.PROVIDER_NAME)
        facts.span.set(names.REQUEST_MODEL, facts.model)
        facts.span.set(names.RESPONSE_MODEL, facts.model)
        facts.span.set(names.INPUT_TOKENS, num_prompt_tokens)
        facts.span.set(names.REQUEST_MAX_TOKENS, max_tokens)
        if facts.tenant:
            facts.span.set(names.TENANT, facts.tenant)
        facts.span.set(names.SLO_TTFT_S, facts.slo.ttft_s)
        facts.span.set(names.SLO_TPOT_S, facts.slo.tpot_s)

    def prepared(self, span: OpenSpan, seconds: float) -> None:
        self.tracing.record(names.PHASE_SPANS[Phase.PREPARE], span.traceparent, seconds)

    def delivered(self, span: OpenSpan, seconds: float) -> None:
        """Records the time from the end of the answer until its last message was written."""
        self.tracing.record(names.SPAN_DELIVER, span.traceparent, seconds)

    def looked_up(self, span: OpenSpan, seconds: float, most_blocks: int | None) -> None:
        """`most_blocks` is the length of the longest cached prefix; None if the index did not answer."""
        blocks = {} if most_blocks is None else {names.PREFIX_BLOCKS: most_blocks}
        self.tracing.record(names.PHASE_SPANS[Phase.PREFIX_LOOKUP], span.traceparent, seconds, blocks)
        outcome = "unavailable" if most_blocks is None else "hit" if most_blocks else "miss"
        self.metrics.add(metric_names.PREFIX_LOOKUPS, outcome=outcome)
        self.metrics.observe(metric_names.PREFIX_LOOKUP_TIME, seconds)

    def placed(self, path: str, attempt: int) -> None:
        self.metrics.add(metric_names.PLACEMENTS, path=path)
        if attempt > 1:
            self.metrics.add(metric_names.REPLACEMENTS)

    def emitted(self, facts: RequestFacts, num_tokens: int) -> None:
        self.metrics.add(metric_names.GENERATED_TOKENS, num_tokens)
        self.metrics.add(metric_names.TENANT_TOKENS, num_tokens, tenant=self._labels.of(facts.tenant), kind="output")

    def finished(self, facts: RequestFacts, end: FinishRequest) -> None:
        timings, metrics = end.timings, self.metrics
        self._ended(facts, end.outcome, timings, end.slices)
        facts.span.set(names.RESPONSE_FINISH_REASONS, end.reason.value)
        facts.span.set(names.OUTPUT_TOKENS, end.usage.completion_tokens)
        facts.span.set(names.CACHED_TOKENS, end.usage.cached_prompt_tokens)
        if not metrics.is_on:
            return
        path = timings.path.value if timings.path is not None else ""
        metrics.observe(metric_names.TTFT, timings.ttft_s, path=path)
        tenant = self._labels.of(facts.tenant)
        metrics.observe(metric_names.TENANT_TTFT, timings.ttft_s, tenant=tenant)
        labels = _labels(facts)
        metrics.observe(metric_names.GEN_AI_TTFT, timings.ttft_s, **labels)
        metrics.observe(metric_names.GEN_AI_DURATION, timings.total_s, error_type="", **labels)
        if end.usage.completion_tokens > 1:
            metrics.observe(metric_names.TPOT, timings.tpot_s, path=path)
            metrics.observe(metric_names.GEN_AI_TPOT, timings.tpot_s, **labels)
        metrics.add(metric_names.SLO_KEPT, kept=_kept(timings, facts.slo))
        if facts.is_sibling:
            return
        metrics.add(metric_names.PROMPT_TOKENS, end.usage.prompt_tokens)
        metrics.add(metric_names.TENANT_TOKENS, end.usage.prompt_tokens, tenant=tenant, kind="prompt")
        metrics.add(metric_names.CACHED_PROMPT_TOKENS, end.usage.cached_prompt_tokens)

    def failed(self, facts: RequestFacts, end: FailRequest) -> None:
        self._ended(facts, end.outcome, end.timings, end.slices)
        self._failed_after(facts, end.timings, end.to_error().reason)

    def cancelled(self, facts: RequestFacts, end: EndCancelled) -> None:
        self._ended(facts, Outcome.CANCELLED, end.timings, end.slices)
        self._failed_after(facts, end.timings, Cancelled.reason)
        facts.span.set(names.OUTPUT_TOKENS, end.num_output_tokens)

    def error(self, reason: str) -> None:
        self.metrics.add(metric_names.REQUEST_ERRORS, reason=reason)

    def rejected(self, error: PdserveError) -> None:
        """Counts a call that was rejected before its handler ran."""
        self.error(error.reason)

    def over_quota(self, tenant: str, quota: str) -> None:
        self.metrics.add(metric_names.TENANT_QUOTA_REJECTIONS, tenant=self._labels.of(tenant), quota=quota)

    def disconnected(self) -> None:
        self.metrics.add(metric_names.CLIENT_DISCONNECTS)

    def population(self, queued: int, running: int) -> None:
        self.metrics.set(metric_names.QUEUED, queued)
        self.metrics.set(metric_names.RUNNING, running)

    def answers_running(self, running: Mapping[str, int]) -> None:
        """`running` maps tenants to their answers in progress."""
        totals = Counter(dict.fromkeys(self._running_labels, 0))
        for tenant, count in running.items():
            totals[self._labels.of(tenant)] += count
        for label, total in totals.items():
            self.metrics.set(metric_names.TENANT_RUNNING, total, tenant=label)
        self._running_labels |= totals.keys()

    def _ended(self, facts: RequestFacts, outcome: Outcome, timings: Timings | None, slices: Sequence[Slice]) -> None:
        self.metrics.add(metric_names.REQUESTS, outcome=outcome.value)
        self.metrics.add(metric_names.TENANT_REQUESTS, tenant=self._labels.of(facts.tenant), outcome=outcome.value)
        if timings is None:
            return
        self._trace(facts, timings, slices)
        if timings.attempts:
            self.metrics.observe(metric_names.QUEUE_TIME, timings.phases.queue_s)
        span = facts.span
        span.set(names.TTFT_S, timings.ttft_s)
        span.set(names.TPOT_S, timings.tpot_s)
        span.set(names.QUEUE_S, timings.phases.queue_s)
        span.set(names.ATTEMPT, timings.attempts)
        span.set(names.TRANSFER_BYTES, timings.transfer_bytes)
        span.set(names.PREFILL_WORKER, timings.prefill_worker)
        span.set(names.DECODE_WORKER, timings.decode_worker)
        if timings.path is not None:
            span.set(names.PATH, timings.path.value)
        for name, value in self._transport(timings).items():
            span.set(name, value)

    def _transport(self, timings: Timings) -> dict[str, str]:
        """The transport of the KV; empty if there was no transfer, or the prefill worker has not reported it yet."""
        link = self._link_of(timings.prefill_worker, timings.decode_worker) if timings.transfer_bytes else None
        return {} if link is None else {names.TRANSFER_KIND: link.transport, names.TRANSFER_REASON: link.reason}

    def _failed_after(self, facts: RequestFacts, timings: Timings | None, reason: str) -> None:
        if timings is not None and self.metrics.is_on:
            self.metrics.observe(metric_names.GEN_AI_DURATION, timings.total_s, error_type=reason, **_labels(facts))

    def _trace(self, facts: RequestFacts, timings: Timings, slices: Sequence[Slice]) -> None:
        """Records a span for each slice that neither a worker nor an earlier part of the router has recorded."""
        if not self.tracing.is_on:
            return
        now_ns = time.time_ns()
        for one in slices:
            if one.is_reported:
                continue
            attributes: dict[str, int | float | str] = {names.ATTEMPT: one.attempt} if one.attempt else {}
            if one.phase is Phase.TRANSFER_WAIT:
                attributes |= {names.TRANSFER_S: timings.transfer_s, names.TRANSFER_BUSY_S: timings.transfer_busy_s}
                attributes |= self._transport(timings)
            end_ns = now_ns - int((timings.total_s - one.begin_s - one.seconds) * 1e9)
            name = names.PHASE_SPANS[one.phase]
            self.tracing.record(name, facts.span.traceparent, one.seconds, attributes, end_ns)


def _labels(facts: RequestFacts) -> dict[str, str]:
    """metric_names.GEN_AI_LABELS."""
    return {
        "gen_ai_operation_name": facts.operation,
        "gen_ai_provider_name": names.PROVIDER_NAME,
        "gen_ai_request_model": facts.model,
        "gen_ai_response_model": facts.model,
    }


def _kept(timings: Timings, slo: Slo) -> str:
    ttft, tpot = timings.ttft_s <= slo.ttft_s, timings.tpot_s <= slo.tpot_s
    return "both" if ttft and tpot else "ttft" if ttft else "tpot" if tpot else "none"
