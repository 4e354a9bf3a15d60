"""Each request has one trace: the SDK's span, below it the router's, and below that one span per phase."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from pdserve import Completion
from pdserve.core.phases import MEASURED_BY, Phase
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt
from tests.unit.launch.conftest import until
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpSink]:
    """A collector. This process sends its spans there, as a user's program would."""
    with running_sink() as sink:
        provider = TracerProvider(resource=Resource.create({"service.name": "user-program"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sink.endpoint, insecure=True)))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield sink
        provider.shutdown()


def test_a_remote_and_a_local_request_leave_one_whole_tree_each(sink: OtlpSink) -> None:
    with Cluster("--model", "toy", "--otlp", sink.endpoint) as cluster:
        until(lambda: any(one.kv_links for one in cluster.client.topology().workers))  # `up` has connected the workers
        remote = cluster.client.generate(toy_prompt(100), max_tokens=8, temperature=0)
        local = cluster.client.generate(toy_prompt(4), max_tokens=8, temperature=0)
        assert (remote.timings.path, local.timings.path) == ("remote", "local")
        sink.wait(lambda spans: sum(s.name == "pdserve.decode" for s in spans) >= 2)
    # Workers and router flush their spans when they drain, so all spans have arrived.
    roots = [tree for tree in sink.trees() if tree["name"] == "pdserve.client"]
    requests = [_only(tree["children"]) for tree in roots]
    assert [request["name"] for request in requests] == ["pdserve.request", "pdserve.request"]
    of_remote, of_local = ({child["name"]: child["service"] for child in request["children"]} for request in requests)
    computing = {"pdserve.reserve", "pdserve.prefill", "pdserve.decode"}
    assert computing | {"pdserve.prepare", "pdserve.prefix_lookup"} <= set(of_remote)
    assert computing | {"pdserve.prepare"} <= set(of_local)
    assert len({of_remote["pdserve.reserve"], of_remote["pdserve.prefill"], of_remote["pdserve.decode"]}) == 3
    for done in (remote, local):
        _check_phases(sink, done)
    request = next(s for s in sink.named("pdserve.request") if s.attributes["pdserve.request.id"] == remote.request_id)
    assert request.attributes["gen_ai.usage.input_tokens"] == 100
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert request.attributes["pdserve.transfer.transport"] == "shm"
    assert request.attributes["pdserve.transfer.transport_reason"] == "the sender's first choice"
    for span in sink.spans:
        assert span.duration_s >= 0.0
        if span.trace_id == request.trace_id and span.name.rpartition(".")[2] in ("queue", "prefill", "decode"):
            assert span.duration_s <= request.duration_s


def _check_phases(sink: OtlpSink, done: Completion) -> None:
    """Phases cover the whole request, and the spans of each phase have its length."""
    phases, total_s = done.timings.phases, done.timings.total_s
    assert phases.total_s == pytest.approx(total_s, abs=1e-6)
    [request] = [s for s in sink.named("pdserve.request") if s.attributes["pdserve.request.id"] == done.request_id]
    spent: Counter[str] = Counter()
    for span in sink.spans:
        if span.parent_id == request.span_id:
            spent[span.name.removeprefix("pdserve.")] += span.duration_s
    for phase in Phase:
        told_s = getattr(phases, f"{phase.value}_s")
        # What a worker measured may exceed the router's stretch by less than a message, and is cut there.
        assert spent[phase.value] >= told_s - 1e-3 if MEASURED_BY[phase] == "worker" else True, phase
        assert spent[phase.value] == pytest.approx(told_s, abs=1e-3) if MEASURED_BY[phase] == "router" else True, phase
    # The spans of one clock follow each other. Those of the worker lie inside the router's, which may be shorter than
    # they are: the router's phases begin and end when messages arrive, and several can arrive at once.
    for clock in ("router", "worker"):
        assert sum(spent[phase.value] for phase in Phase if MEASURED_BY[phase] == clock) <= request.duration_s + 1e-3


def _only(children: list[Any]) -> Any:
    assert len(children) == 1, children
    return children[0]
