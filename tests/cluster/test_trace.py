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

from pdserve.telemetry import names
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt
from tests.unit.launch.conftest import until
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink

DECODE_SERVICES = dict.fromkeys(("pdserve.reserve", "pdserve.decode_queue", "pdserve.decode"), "pdserve-decode")


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpSink]:
    """A collector. This process sends its spans there, as a user's program would."""
    with running_sink() as sink:
        provider = TracerProvider(resource=Resource.create({"service.name": "user-program"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sink.endpoint, insecure=True)))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield sink
        provider.shutdown()


def test_each_request_has_one_complete_trace(sink: OtlpSink) -> None:
    with Cluster("--model", "toy", "--otlp", sink.endpoint) as cluster:
        until(lambda: any(one.kv_links for one in cluster.client.topology().workers))  # `up` has connected the workers
        remote = cluster.client.generate(toy_prompt(100), max_tokens=8, temperature=0)
        local = cluster.client.generate(toy_prompt(4), max_tokens=8, temperature=0)
        assert (remote.timings.path, local.timings.path) == ("remote", "local")
        sink.wait(lambda spans: sum(s.name == "pdserve.deliver" for s in spans) >= 2)
    roots = [tree for tree in sink.trees() if tree["key"] == names.SPAN_CLIENT]
    requests = [_only(tree["children"]) for tree in roots]
    assert [request["key"] for request in requests] == [names.SPAN_REQUEST, names.SPAN_REQUEST]
    services = [{child["key"]: child["service"] for child in request["children"]} for request in requests]
    for service, measured in zip(("pdserve-prefill", "pdserve-decode"), services, strict=True):
        expected = {"pdserve.prefill_queue": service, "pdserve.prefill": service} | DECODE_SERVICES
        assert measured == {key: expected.get(key, "pdserve-router") for key in measured}
        assert "pdserve.reserve" in measured
    # The local request may get all its tokens in one message, and then it spends no time in these phases.
    assert {"pdserve.prefill", "pdserve.decode"} <= services[0].keys()
    for done in (remote, local):
        request = next(s for s in sink.named(names.SPAN_REQUEST) if s.attributes[names.REQUEST_ID] == done.request_id)
        client = next(s for s in sink.named(names.SPAN_CLIENT) if s.span_id == request.parent_id)
        assert client.name == request.name == "text_completion toy"
        assert client.duration_s >= done.timings.total_s
        spent_s = Counter[str]()
        for span in sink.spans:
            if span.parent_id == request.span_id:
                spent_s[span.name] += span.duration_s
        assert spent_s.total() == pytest.approx(request.duration_s, abs=1e-6)
        for phase, name in names.PHASE_SPANS.items():
            assert spent_s[name] == pytest.approx(getattr(done.timings.phases, f"{phase.value}_s"), abs=1e-6)
    request = next(s for s in sink.named(names.SPAN_REQUEST) if s.attributes[names.REQUEST_ID] == remote.request_id)
    assert request.attributes[names.INPUT_TOKENS] == 100
    assert request.attributes[names.OUTPUT_TOKENS] == 8
    assert request.attributes[names.TRANSFER_KIND] == "shm"
    assert request.attributes[names.TRANSFER_REASON] == "the sender's first choice"


def _only(children: list[Any]) -> Any:
    assert len(children) == 1, children
    return children[0]
