"""What is recorded of requests: values of metrics, and spans of traces that are kept from the beginning or later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.results import Phase, Slice, Timings, Usage
from pdserve.core.types import FinishReason, Path, Role, Sampling, Slo
from pdserve.telemetry import names
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.tracing import Service, Tracing, make_tracing
from pdserve.v1 import inference_pb2, worker_pb2
from router.service.measure import Measure, RequestFacts
from router.state.interface import EndCancelled, FailKind, FailRequest, FinishRequest, Outcome, RequestArrived
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WAIT_S = 60.0  # the collector of a test may be slow to take spans, because the machine is busy
REQUEST = inference_pb2.GenerateRequest(text="hello", sampling=inference_pb2.SamplingParams(max_tokens=8, top_k=3))


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with running_sink() as sink:
        yield sink


def run(
    measure: Measure,
    traceparent: str,
    *,
    ttft_s: float = 0.25,
    tenant: str = "acme",
    tokens: int = 4,
    num_resumed: int = 0,
) -> None:
    """A call of one request, whose SLO target of the TTFT is 1 s."""
    slices = (
        Slice(phase=Phase.QUEUE, attempt=1, begin_s=0.0, seconds=0.5),
        Slice(phase=Phase.DECODE, attempt=1, begin_s=0.5, seconds=0.5, worker_id="d0"),
    )
    timings = Timings(ttft_s=ttft_s, tpot_s=0.005, total_s=1.0, path=Path.REMOTE, decode_worker="d0", attempts=1)
    usage = Usage(prompt_tokens=10, completion_tokens=tokens, cached_prompt_tokens=2)
    with measure.call_span(REQUEST, "m", traceparent) as span:
        facts = RequestFacts(
            span=span,
            arrived_s=span.started_s,
            slo=Slo(ttft_s=1.0, tpot_s=1.0),
            operation=names.TEXT_COMPLETION,
            model="m",
            tenant=tenant,
            num_resumed=num_resumed,
        )
        measure.looked_up(span, 0.001, 2)
        arrival = RequestArrived(request_id="r", num_prompt_tokens=10, sampling=Sampling(max_tokens=8), slo=facts.slo)
        measure.arrived(facts, arrival)
        measure.placed("remote", 1)
        for _ in range(tokens - num_resumed):
            measure.emitted(facts, 1)
        measure.finished(
            facts,
            FinishRequest(
                request_id="r",
                reason=FinishReason.LENGTH,
                usage=usage,
                timings=timings,
                outcome=Outcome.SERVED,
                slices=slices,
            ),
        )
        measure.answered(span)
        measure.delivered(span, span.started_s + 1.0)


def test_a_trace_that_is_kept_later_has_all_of_its_spans(sink: OtlpSink) -> None:
    tracing = make_tracing(Service("pdserve-router", "r0"), sink.endpoint, share=0.0)
    measure = Measure(Metrics.off(), tracing)
    run(measure, "")  # dropped
    run(measure, SAMPLED, ttft_s=2.0)
    run(measure, "", ttft_s=2.0)  # over its target
    tracing.close(WAIT_S)
    first, second = sink.named(names.SPAN_REQUEST)
    assert first.attributes == second.attributes
    assert first.attributes[names.REQUEST_TOP_K] == 3.0
    assert first.attributes[names.REQUEST_ID] == "r"
    assert first.attributes[names.OUTPUT_TOKENS] == 4
    assert (first.trace_id, second.parent_id) == (SAMPLED[3:35], "")
    below = [sorted(one.name for one in sink.spans if one.parent_id == root.span_id) for root in (first, second)]
    assert below[0] == below[1] == ["pdserve.decode", "pdserve.deliver", "pdserve.queue"]


def test_spans_have_the_workers_of_their_time(sink: OtlpSink) -> None:
    """Also if the workers leave between the end of the request and the decision to keep its trace."""
    roles = {"p0": Role.PREFILL, "d0": Role.DECODE}
    links = {("p0", "d0"): worker_pb2.KvLink(decode_worker="d0", transport="shm", reason="same host")}
    tracing = make_tracing(Service("pdserve-router", "r0"), sink.endpoint, share=0.0)
    measure = Measure(Metrics.off(), tracing, lambda *of: links.get(of), roles.get)
    slices = (
        Slice(phase=Phase.PREFILL, attempt=1, begin_s=0.0, seconds=0.5, worker_id="p0"),
        Slice(phase=Phase.TRANSFER_WAIT, attempt=1, begin_s=0.5, seconds=0.1),
        Slice(phase=Phase.DECODE, attempt=1, begin_s=0.6, seconds=0.4, worker_id="d0"),
    )
    timings = Timings(
        ttft_s=0.5,
        tpot_s=0.1,
        total_s=1.0,
        path=Path.REMOTE,
        prefill_worker="p0",
        decode_worker="d0",
        attempts=2,
        migrations=1,
        transfer_bytes=1000,
    )
    with measure.call_span(REQUEST, "m", "") as span:
        facts = RequestFacts(span=span, arrived_s=span.started_s, slo=Slo(), operation=names.TEXT_COMPLETION, model="m")
        end = EndCancelled(request_id="r", timings=timings, num_output_tokens=3, slices=slices)
        measure.cancelled(facts, end)
        roles.clear()
        links.clear()
        span.keep()
    tracing.close(WAIT_S)
    [request], [transfer] = sink.named(names.SPAN_REQUEST), sink.named("pdserve.transfer_wait")
    assert (request.attributes[names.ATTEMPT], request.attributes[names.MIGRATIONS]) == (2, 1)
    for one in (request, transfer):
        found = one.attributes.get(names.TRANSFER_KIND), one.attributes.get(names.TRANSFER_REASON)
        assert found == ("shm", "same host")
    below = {one.name: (one.service, one.instance) for one in sink.spans if one is not request}
    assert below["pdserve.prefill"] == ("pdserve-prefill", "p0")
    assert below["pdserve.decode"] == ("pdserve-decode", "d0")
    assert below["pdserve.transfer_wait"] == ("pdserve-router", "r0")


def test_a_running_call_does_not_hold_the_hashes_of_its_prompt(sink: OtlpSink) -> None:
    class Arrival(RequestArrived):  # without slots, so that it can be referenced weakly
        pass

    measure = Measure(Metrics.off(), make_tracing(Service("pdserve-router", "r0"), sink.endpoint, share=0.0))
    arrival = Arrival(request_id="r", num_prompt_tokens=10, sampling=Sampling(max_tokens=8), slo=Slo())
    with measure.call_span(REQUEST, "m", "") as span:
        facts = RequestFacts(span=span, arrived_s=0.0, slo=Slo(), operation=names.TEXT_COMPLETION, model="m")
        measure.arrived(facts, arrival)
        held = weakref.ref(arrival)
        del arrival
        gc.collect()
        assert held() is None
        span.keep()
        assert span.attributes[names.REQUEST_ID] == "r"
        assert span.attributes[names.REQUEST_MAX_TOKENS] == 8
    measure.tracing.close(WAIT_S)


def test_a_resumed_answer_has_times_of_its_new_tokens_only() -> None:
    metrics = Metrics("router")
    measure = Measure(metrics, Tracing.off())
    for num_resumed in (4, 3, 2):
        run(measure, "", num_resumed=num_resumed)
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.value
    }
    assert found["pdserve_requests_total"] == 3
    assert found["gen_ai_server_request_duration_seconds_count"] == 3
    for name in ("pdserve_ttft_seconds", "gen_ai_server_time_to_first_token_seconds"):
        assert found[f"{name}_count"] == 2
    assert found["pdserve_slo_total"] == 2
    for name in ("pdserve_tpot_seconds", "gen_ai_server_time_per_output_token_seconds"):
        assert found[f"{name}_count"] == 1


def test_metrics_of_requests_have_exact_values() -> None:
    metrics = Metrics("router")
    measure = Measure(metrics, Tracing.off(), tenant_labels=1)
    for tenant, tokens in (("acme", 4), ("beta", 1), ("gamma", 2)):
        run(measure, "", tenant=tenant, tokens=tokens)
    with measure.call_span(REQUEST, "m", "") as span:
        facts = RequestFacts(span=span, arrived_s=0.0, slo=Slo(), operation=names.CHAT, model="m")
        failed = Timings(ttft_s=0.0, tpot_s=0.0, total_s=2.0)
        end = FailRequest(
            request_id="f", kind=FailKind.OVERLOADED, message="full", outcome=Outcome.REJECTED, timings=failed
        )
        measure.failed(facts, end)
    measure.decided(0.001)
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created")) and sample.name[:8] != "process_"
    }
    gen_ai = ("m", "m", "pdserve", "text_completion")
    assert found == pytest.approx(
        {
            ("gen_ai_server_request_duration_seconds_count", "", *gen_ai): 3,
            ("gen_ai_server_request_duration_seconds_sum", "", *gen_ai): 3.0,
            ("gen_ai_server_request_duration_seconds_count", "OVERLOADED", "chat", "m", "m", "pdserve"): 1,
            ("gen_ai_server_request_duration_seconds_sum", "OVERLOADED", "chat", "m", "m", "pdserve"): 2.0,
            ("gen_ai_server_time_to_first_token_seconds_count", *gen_ai): 3,
            ("gen_ai_server_time_to_first_token_seconds_sum", *gen_ai): 0.75,
            ("gen_ai_server_time_per_output_token_seconds_count", *gen_ai): 2,
            ("gen_ai_server_time_per_output_token_seconds_sum", *gen_ai): 0.01,
            ("pdserve_requests_total", "served"): 3,
            ("pdserve_requests_total", "rejected"): 1,
            ("pdserve_placements_total", "remote"): 3,
            ("pdserve_prefix_lookups_total", "hit"): 3,
            ("pdserve_prefix_lookup_seconds_count",): 3,
            ("pdserve_prefix_lookup_seconds_sum",): 0.003,
            ("pdserve_ttft_seconds_count", "remote"): 3,
            ("pdserve_ttft_seconds_sum", "remote"): 0.75,
            ("pdserve_tpot_seconds_count", "remote"): 2,
            ("pdserve_tpot_seconds_sum", "remote"): 0.01,
            ("pdserve_queue_seconds_count",): 3,
            ("pdserve_slo_total", "both"): 3,
            ("pdserve_prompt_tokens_total",): 30,
            ("pdserve_cached_prompt_tokens_total",): 6,
            ("pdserve_output_tokens_total",): 7,
            ("pdserve_decision_seconds_count",): 1,
            ("pdserve_decision_seconds_sum",): 0.001,
            ("pdserve_tenant_requests_total", "acme", "served"): 1,
            ("pdserve_tenant_requests_total", "other", "served"): 2,
            ("pdserve_tenant_requests_total", "default", "rejected"): 1,
            ("pdserve_tenant_tokens_total", "acme", "output"): 4,
            ("pdserve_tenant_tokens_total", "acme", "prompt"): 10,
            ("pdserve_tenant_tokens_total", "other", "output"): 3,
            ("pdserve_tenant_tokens_total", "other", "prompt"): 20,
            ("pdserve_tenant_ttft_seconds_count", "acme"): 1,
            ("pdserve_tenant_ttft_seconds_sum", "acme"): 0.25,
            ("pdserve_tenant_ttft_seconds_count", "other"): 2,
            ("pdserve_tenant_ttft_seconds_sum", "other"): 0.5,
        }
    )
