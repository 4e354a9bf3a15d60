"""The router's metrics, and the spans of its requests.

`Measure` records each request; `Gauges` sets the state of the whole router once a second. The names are in
pdserve/telemetry/metric_names.py and pdserve/telemetry/names.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, final

from pdserve.core.errors import Cancelled, LoadShed, PdserveError
from pdserve.core.results import Phase, Slice, Timings
from pdserve.core.types import Role, Slo
from pdserve.telemetry import metric_names, names
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.trace_context import is_notable, operation_of, request_attributes
from pdserve.telemetry.tracing import OpenSpan, Service, Tracing
from pdserve.text.tokenizer import Tokenizer
from pdserve.v1 import worker_pb2
from pdserve.wire import status
from router.service.tenants import BoundedLabels, Quotas
from router.service.workers import Workers
from router.state.interface import EndCancelled, FailRequest, FinishRequest, Outcome, RequestArrived
from router.state.state import RouterState

LinkOf = Callable[[str, str], worker_pb2.KvLink | None]  # prefill worker, decode worker
RoleOf = Callable[[str], Role | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """Facts of a request besides its end."""

    span: OpenSpan
    arrived_s: float  # by the monotonic clock
    slo: Slo
    operation: str  # names.CHAT or names.TEXT_COMPLETION
    model: str
    tenant: str = ""
    is_sibling: bool = False  # a further answer to a prompt that is already counted
    num_resumed: int = 0  # tokens that the client of a resumed call already had


MAX_MODELS: Final = 256  # names with labels of their own


@final
class _Series:
    """The series of a request and of a token. Those with labels are found once; the labels have few values."""

    def __init__(self, metrics: Metrics) -> None:
        counter, histogram = metrics.counter, metrics.histogram
        self.decision = histogram(metric_names.DECISION_TIME)
        self.queue = histogram(metric_names.QUEUE_TIME)
        self.output = counter(metric_names.GENERATED_TOKENS)
        self.prompt = counter(metric_names.PROMPT_TOKENS)
        self.cached_prompt = counter(metric_names.CACHED_PROMPT_TOKENS)
        self.lookup_time = histogram(metric_names.PREFIX_LOOKUP_TIME)
        self.lookups = cache(lambda outcome: counter(metric_names.PREFIX_LOOKUPS, outcome=outcome))
        self.placements = cache(lambda path: counter(metric_names.PLACEMENTS, path=path))
        self.kept = cache(lambda kept: counter(metric_names.SLO_KEPT, kept=kept))
        self.ttft = cache(lambda path: histogram(metric_names.TTFT, path=path))
        self.tpot = cache(lambda path: histogram(metric_names.TPOT, path=path))
        self.requests = cache(lambda outcome: counter(metric_names.REQUESTS, outcome=outcome))
        self.tenant_output = cache(lambda tenant: counter(metric_names.TENANT_TOKENS, tenant=tenant, kind="output"))
        self.tenant_prompt = cache(lambda tenant: counter(metric_names.TENANT_TOKENS, tenant=tenant, kind="prompt"))
        self.tenant_ttft = cache(lambda tenant: histogram(metric_names.TENANT_TTFT, tenant=tenant))
        self.tenant_requests = cache(
            lambda tenant, outcome: counter(metric_names.TENANT_REQUESTS, tenant=tenant, outcome=outcome)
        )
        # By operation and model; the duration also by the error.
        self.gen_ai_ttft = cache(lambda *of: histogram(metric_names.GEN_AI_TTFT, **_gen_ai(*of)))
        self.gen_ai_tpot = cache(lambda *of: histogram(metric_names.GEN_AI_TPOT, **_gen_ai(*of)))
        self.gen_ai_duration = cache(
            lambda error, *of: histogram(metric_names.GEN_AI_DURATION, **_gen_ai(*of), error_type=error)
        )


def _gen_ai(operation: str, model: str) -> dict[str, str]:
    """metric_names.GEN_AI_LABELS."""
    return {
        "gen_ai_operation_name": operation,
        "gen_ai_provider_name": names.PROVIDER_NAME,
        "gen_ai_request_model": model,
        "gen_ai_response_model": model,
    }


@final
class Measure:
    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing,
        link_of: LinkOf = lambda prefill, decode: None,
        role_of: RoleOf = lambda worker_id: None,
        tenant_labels: int = 0,
        revision_of: Callable[[str], str] = lambda worker_id: "",
    ) -> None:
        """`link_of` returns the KV connection of two workers. At most `tenant_labels` tenants have their own labels."""
        self.metrics, self.tracing, self._link_of, self._role_of = metrics, tracing, link_of, role_of
        self._revision_of = revision_of
        self._is_on = metrics.is_on
        self._series = _Series(metrics)
        self._labels = BoundedLabels(tenant_labels)
        self._server: Mapping[str, str | int] = {}
        self._running_labels: set[str] = set()
        self._models = BoundedLabels(MAX_MODELS)  # operators may load adapters under ever new names

    def listens_at(self, host: str, port: int) -> None:
        self._server = {names.SERVER_ADDRESS: host, names.SERVER_PORT: port}

    def call_span(self, request: Any, model: str, traceparent: str) -> OpenSpan:
        """The span of a Generate call; `model` is empty while there is none."""
        if not self.tracing.is_on:
            return OpenSpan(traceparent)
        span = self.tracing.span(names.SPAN_REQUEST, names.call_name(operation_of(request), model), traceparent)
        span.when_kept(lambda: span.set({**request_attributes(request), **self._server}))
        return span

    def arrived(self, facts: RequestFacts, arrival: RequestArrived) -> None:
        """The request has been validated and is about to enter the state."""
        if facts.is_sibling or not facts.span.is_recording:
            return
        given = arrival.attributes().items()
        # Not `arrival`: it has the hashes of the prompt, and this may wait until the call ends.
        request_id, num_tokens, max_tokens = arrival.request_id, arrival.num_prompt_tokens, arrival.sampling.max_tokens
        facts.span.when_kept(
            lambda: facts.span.set(
                {
                    names.REQUEST_ID: request_id,
                    names.RESPONSE_ID: request_id,
                    names.REQUEST_MODEL: facts.model,
                    names.RESPONSE_MODEL: facts.model,
                    names.INPUT_TOKENS: num_tokens,
                    names.REQUEST_MAX_TOKENS: max_tokens,
                    names.SLO_TTFT_S: facts.slo.ttft_s,
                    names.SLO_TPOT_S: facts.slo.tpot_s,
                    **{
                        names.REQUEST_ATTRIBUTES[name]: value
                        for name, value in given
                        if value or (name == "reuse_within_s" and value is not None)
                    },
                    **({names.TENANT: facts.tenant} if facts.tenant else {}),
                }
            )
        )

    def answered(self, span: OpenSpan) -> None:
        """The call has ended, and its client has everything."""
        span.set({names.RPC_STATUS: "OK"})

    def failed_call(self, span: OpenSpan, error: PdserveError) -> None:
        self.error(error.reason)
        span.set({names.RPC_STATUS: status.code_of(error).name})
        span.fail(error.reason)
        if not span.parts:  # it was not admitted to the state, which divides the time of requests
            span.add(names.PHASE_SPANS[Phase.PREPARE], span.started_s, time.monotonic())

    def disconnected(self, span: OpenSpan) -> None:
        self.metrics.add(metric_names.CLIENT_DISCONNECTS)
        span.set({names.RPC_STATUS: "CANCELLED"})

    def delivered(self, span: OpenSpan, answered_s: float) -> None:
        """The last message was written. `answered_s`: when the answer ended in the state."""
        span.ended_s = time.monotonic()
        span.add(names.SPAN_DELIVER, answered_s, span.ended_s)

    def looked_up(self, span: OpenSpan, seconds: float, most_blocks: int | None) -> None:
        """`most_blocks` is the length of the longest cached prefix; None if the index did not answer."""
        if most_blocks is not None:
            span.set({names.PREFIX_BLOCKS: most_blocks})
        if self._is_on:
            outcome = "unavailable" if most_blocks is None else "hit" if most_blocks else "miss"
            self._series.lookups(outcome).add()
            self._series.lookup_time.observe(seconds)

    def decided(self, seconds: float) -> None:
        """The state has processed an event."""
        self._series.decision.observe(seconds)

    def placed(self, path: str, attempt: int) -> None:
        if self._is_on:
            self._series.placements(path).add()
            if attempt > 1:
                self.metrics.add(metric_names.REPLACEMENTS)

    def emitted(self, facts: RequestFacts, num_tokens: int) -> None:
        if self._is_on:
            self._series.output.add(num_tokens)
            self._series.tenant_output(self._labels.of(facts.tenant)).add(num_tokens)

    def finished(self, facts: RequestFacts, end: FinishRequest) -> None:
        timings, span = end.timings, facts.span
        self._ended(facts, end.outcome, timings, end.slices)
        if span.is_recording:
            span.when_kept(lambda: _finish(facts, end))
        if not self._is_on:
            return
        series, model = self._series, (facts.operation, self._models.of(facts.model))
        path, trace_id = timings.path.value if timings.path is not None else "", span.exemplar
        tenant = self._labels.of(facts.tenant)
        series.gen_ai_duration("", *model).observe(timings.total_s, trace_id)
        num_new = end.usage.completion_tokens - facts.num_resumed
        if num_new > 0:
            series.ttft(path).observe(timings.ttft_s, trace_id)
            series.tenant_ttft(tenant).observe(timings.ttft_s, trace_id)
            series.gen_ai_ttft(*model).observe(timings.ttft_s, trace_id)
            series.kept(_kept(timings, facts.slo)).add()
        if num_new > 1:
            series.tpot(path).observe(timings.tpot_s, trace_id)
            series.gen_ai_tpot(*model).observe(timings.tpot_s, trace_id)
        if facts.is_sibling:
            return
        series.prompt.add(end.usage.prompt_tokens)
        series.tenant_prompt(tenant).add(end.usage.prompt_tokens)
        series.cached_prompt.add(end.usage.cached_prompt_tokens)

    def failed(self, facts: RequestFacts, end: FailRequest) -> None:
        facts.span.fail(end.to_error().reason)
        self._ended(facts, end.outcome, end.timings, end.slices)
        self._failed_after(facts, end.timings, end.to_error().reason)

    def cancelled(self, facts: RequestFacts, end: EndCancelled) -> None:
        self._ended(facts, Outcome.CANCELLED, end.timings, end.slices)
        self._failed_after(facts, end.timings, Cancelled.reason)
        if not facts.is_sibling:
            facts.span.set({names.OUTPUT_TOKENS: end.num_output_tokens})

    def error(self, reason: str) -> None:
        self.metrics.add(metric_names.REQUEST_ERRORS, reason=reason)

    def rejected(self, error: PdserveError) -> None:
        """Counts a call that was rejected before its handler ran."""
        self.error(error.reason)

    def shed(self, error: PdserveError) -> None:
        """Counts a call that the gate has rejected."""
        self.error(error.reason)
        if isinstance(error, LoadShed):
            self.metrics.add(metric_names.SHED, cause=error.cause)

    def over_quota(self, tenant: str, quota: str) -> None:
        self.metrics.add(metric_names.TENANT_QUOTA_REJECTIONS, tenant=self._labels.of(tenant), quota=quota)

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
        if self._is_on:
            self._series.requests(outcome.value).add()
            self._series.tenant_requests(self._labels.of(facts.tenant), outcome.value).add()
        if timings is None:
            return
        if facts.span.is_recording:
            if is_notable(timings, facts.slo):
                facts.span.keep()
            # Workers may leave before the trace is kept.
            transport, services = self._transport(timings), [self._service(one.worker_id) for one in slices]
            revision = self._revision_of(timings.decode_worker)
            facts.span.when_kept(lambda: _trace(facts, timings, slices, services, transport, revision))
        if timings.attempts and self._is_on:
            self._series.queue.observe(timings.phases.queue_s, facts.span.exemplar)

    def _failed_after(self, facts: RequestFacts, timings: Timings | None, reason: str) -> None:
        if timings is not None and self._is_on:
            model = facts.operation, self._models.of(facts.model)
            self._series.gen_ai_duration(reason, *model).observe(timings.total_s, facts.span.exemplar)

    def _transport(self, timings: Timings) -> dict[str, str]:
        """The transport of the KV; empty if there was no transfer, or the prefill worker has not reported it yet."""
        link = self._link_of(timings.prefill_worker, timings.decode_worker) if timings.transfer_bytes else None
        return {} if link is None else {names.TRANSFER_KIND: link.transport, names.TRANSFER_REASON: link.reason}

    def _service(self, worker_id: str) -> Service | None:
        """The worker, as backends show it; None for the router."""
        if not worker_id:
            return None
        role = self._role_of(worker_id)
        return Service("pdserve-worker" if role is None else f"pdserve-{role.value}", worker_id)


def _trace(
    facts: RequestFacts,
    timings: Timings,
    slices: Sequence[Slice],
    services: Sequence[Service | None],
    transport: Mapping[str, str],
    revision: str,
) -> None:
    """The request's own attributes, and a span for each slice of its time. `services` are those of the slices."""
    span = facts.span
    if not facts.is_sibling:
        span.set(
            {
                names.TTFT_S: timings.ttft_s,
                names.TPOT_S: timings.tpot_s,
                names.QUEUE_S: timings.phases.queue_s,
                names.ATTEMPT: timings.attempts,
                names.TRANSFER_BYTES: timings.transfer_bytes,
                names.PREFILL_WORKER: timings.prefill_worker,
                names.DECODE_WORKER: timings.decode_worker,
                **({names.MIGRATIONS: timings.migrations} if timings.migrations else {}),
                **({names.REVISION: revision} if revision else {}),
                **({} if timings.path is None else {names.PATH: timings.path.value}),
                **transport,
            }
        )
    for one, service in zip(slices, services, strict=True):
        attributes: dict[str, int | float | str] = {names.ATTEMPT: one.attempt} if one.attempt else {}
        if one.phase is Phase.TRANSFER_WAIT:
            attributes |= {names.TRANSFER_S: timings.transfer_s, names.TRANSFER_BUSY_S: timings.transfer_busy_s}
            attributes |= transport
        if one.worker_id:
            attributes[names.WORKER_ID] = one.worker_id
        begin_s = facts.arrived_s + one.begin_s
        span.add(names.PHASE_SPANS[one.phase], begin_s, begin_s + one.seconds, attributes, service)


def _finish(facts: RequestFacts, end: FinishRequest) -> None:
    """The answers of a call share its span."""
    span = facts.span
    reasons, tokens = span.attributes.get(names.RESPONSE_FINISH_REASONS, []), end.usage.completion_tokens
    span.set(
        {
            names.RESPONSE_FINISH_REASONS: [*reasons, end.reason.value],
            names.OUTPUT_TOKENS: span.attributes.get(names.OUTPUT_TOKENS, 0) + tokens,
        }
    )
    if not facts.is_sibling:
        span.set({names.CACHED_TOKENS: end.usage.cached_prompt_tokens})


def _kept(timings: Timings, slo: Slo) -> str:
    ttft, tpot = timings.ttft_s <= slo.ttft_s, timings.tpot_s <= slo.tpot_s
    return "both" if ttft and tpot else "ttft" if ttft else "tpot" if tpot else "none"


# --- open connections -----------------------------------------------------------------------------------------
# Counts them for a port of this process. gRPC does not report them.


def num_connections(port: int) -> int:
    """Number of open connections with local port `port`; 0 if the system lists no descriptors."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return 0
    return sum(_is_connected(number, port) for number in numbers)


def _is_connected(number: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as one:
            is_inet = one.family in (socket.AF_INET, socket.AF_INET6)
            return is_inet and one.getsockname()[1] == port and bool(one.getpeername())
    except OSError:  # the descriptor was closed in the meantime, or is a listening socket
        return False


# --- gauges ---------------------------------------------------------------------------------------------------
# Set once a second, together with the counters whose totals other modules keep.

EVERY_S: Final = 1.0
DROPPED: Final = ("late", "illegal")  # of RouterState.counters


@final
class Gauges:
    def __init__(
        self,
        measure: Measure,
        state: RouterState,
        workers: Workers,
        quotas: Quotas,
        tokenizer: Tokenizer,
        port: Callable[[], int],
    ) -> None:
        self._measure, self._state, self._workers, self._quotas, self._port = measure, state, workers, quotas, port
        self._tokenizer = tokenizer
        self._counted: Counter[str] = Counter()

    async def run(self) -> None:
        while self._measure.metrics.is_on:
            await self._set()
            await asyncio.sleep(EVERY_S)

    async def _set(self) -> None:
        metrics, state = self._measure.metrics, self._state
        self._measure.population(state.num_queued, state.num_running)
        self._measure.answers_running(self._quotas.all_running())
        for role in Role:
            attached = sum(one is role for one in self._workers.roles.values())
            metrics.set(metric_names.WORKERS, attached, role=role.value)
        metrics.set(metric_names.UNREGISTERED_WORKERS, self._workers.num_unregistered)
        metrics.set(metric_names.CONNECTIONS, await asyncio.to_thread(num_connections, self._port()))
        totals = {kind: state.counters[kind] for kind in DROPPED} | {"invalid": self._workers.num_invalid}
        for kind, total in totals.items():
            metrics.add(metric_names.DROPPED_MESSAGES, self._more(kind, total), kind=kind)
        metrics.add(metric_names.MIGRATIONS, self._more("migrated", state.counters["migrated"]))
        metrics.add(metric_names.MIGRATIONS_WITH_KV, self._more("with_kv", state.counters["migrated_with_kv"]))
        for one in metric_names.TASK_STATES:
            name = f"task_{one}"
            metrics.add(metric_names.TASKS, self._more(name, state.counters[name]), outcome=one)
        if (kept := self._tokenizer.kept) is not None:
            for source, total in (("kept", kept.num_found_chars), ("tokenizer", kept.num_missed_chars)):
                metrics.add(metric_names.LONG_PROMPT_CHARS, self._more(source, total), source=source)

    def _more(self, name: str, total: int) -> int:
        """By how much a total has grown since the last call."""
        before, self._counted[name] = self._counted[name], total
        return total - before
