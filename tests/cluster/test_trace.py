"""One request, one trace: the SDK's span over the router's, and under that queue, prefill, transfer and decode."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpSink]:
    """A collector, and the test's own program set up to send its spans there, as a user's would be."""
    with running_sink() as sink:
        provider = TracerProvider(resource=Resource.create({"service.name": "user-program"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sink.endpoint, insecure=True)))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        yield sink
        provider.shutdown()


def test_a_remote_and_a_local_request_leave_one_whole_tree_each(sink: OtlpSink) -> None:
    with Cluster("--model", "toy", "--otlp", sink.endpoint) as cluster:
        remote = cluster.client.generate(toy_prompt(100), max_tokens=8, temperature=0)
        local = cluster.client.generate(toy_prompt(4), max_tokens=8, temperature=0)
        assert (remote.timings.path, local.timings.path) == ("remote", "local")
        sink.wait(lambda spans: sum(s.name == "pdserve.decode" for s in spans) >= 2)
    # The workers and the router flush when they drain; nothing is missing after that.
    roots = [tree for tree in sink.trees() if tree["name"] == "pdserve.client"]
    requests = [_only(tree["children"]) for tree in roots]
    assert [request["name"] for request in requests] == ["pdserve.request", "pdserve.request"]
    of_remote, of_local = ({child["name"]: child["service"] for child in request["children"]} for request in requests)
    computing = {"pdserve.queue", "pdserve.prefill", "pdserve.decode"}
    # The local prompt is shorter than a block: there is nothing to look up.
    assert set(of_remote) - {"pdserve.tokenize"} == computing | {"pdserve.transfer", "pdserve.prefix_lookup"}
    assert set(of_local) - {"pdserve.tokenize"} == computing
    assert len({of_remote["pdserve.queue"], of_remote["pdserve.prefill"], of_remote["pdserve.decode"]}) == 3
    request = next(s for s in sink.named("pdserve.request") if s.attributes["pdserve.request.id"] == remote.request_id)
    assert request.attributes["gen_ai.usage.input_tokens"] == 100
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    for span in sink.spans:
        assert span.duration_s >= 0.0
        if span.trace_id == request.trace_id and span.name.rpartition(".")[2] in ("queue", "prefill", "decode"):
            assert span.duration_s <= request.duration_s


def _only(children: list[Any]) -> Any:
    assert len(children) == 1, children
    return children[0]
