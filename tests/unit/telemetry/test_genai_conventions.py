"""Our names against the published conventions: the package of OpenTelemetry, and tables of the GenAI repository.

The package has all names, units and values. It has neither buckets nor requirement levels: those are quoted from
docs/gen-ai/gen-ai-spans.md and gen-ai-metrics.md of open-telemetry/semantic-conventions-genai.
"""

import importlib
import pkgutil

import opentelemetry.semconv._incubating.attributes as incubating
import opentelemetry.semconv._incubating.metrics.gen_ai_metrics as gen_ai_metrics
import opentelemetry.semconv.attributes as stable
import pytest
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GenAiOperationNameValues,
    GenAiOutputTypeValues,
    GenAiTokenTypeValues,
)
from opentelemetry.semconv.schemas import Schemas

from pdserve.telemetry import names, trace_context
from pdserve.telemetry.metric_names import GEN_AI_LABELS, METRICS

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
BUCKETS = {
    "gen_ai.client.operation.duration": SECONDS,
    "gen_ai.client.operation.time_per_output_chunk": SECONDS,
    "gen_ai.client.operation.time_to_first_chunk": SECONDS,
    "gen_ai.client.token.usage": (
        1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864,
    ),
    "gen_ai.server.request.duration": SECONDS,
    "gen_ai.server.time_per_output_token": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ),
    "gen_ai.server.time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
}  # fmt: skip
#: Required, and conditionally required where the condition can hold here.
REQUIRED_OF_SPANS = {
    "gen_ai.operation.name", "gen_ai.provider.name", "error.type", "gen_ai.conversation.id", "gen_ai.output.type",
    "gen_ai.request.choice.count", "gen_ai.request.model", "gen_ai.request.seed", "gen_ai.request.top_k", "server.port",
}  # fmt: skip
RECOMMENDED_OF_SPANS = {
    "gen_ai.request.frequency_penalty", "gen_ai.request.max_tokens", "gen_ai.request.presence_penalty",
    "gen_ai.request.temperature", "gen_ai.request.top_p", "gen_ai.response.finish_reasons", "gen_ai.response.id",
    "gen_ai.response.model", "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens", "server.address",
}  # fmt: skip
REQUIRED_OF_METRICS = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model"}


def published_attributes() -> set[str]:
    modules = [
        importlib.import_module(f"{package.__name__}.{one.name}")
        for package in (incubating, stable)
        for one in pkgutil.iter_modules(package.__path__)
    ]
    return {value for one in modules for name, value in vars(one).items() if name.isupper() and isinstance(value, str)}


def published_metrics() -> set[str]:
    return {value for name, value in vars(gen_ai_metrics).items() if name.isupper() and isinstance(value, str)}


def prometheus_name(name: str) -> str:
    """By OpenTelemetry's rules for Prometheus: the unit follows the name."""
    return name.replace(".", "_") + "_seconds"


def test_attributes_that_are_not_ours_are_published() -> None:
    foreign = {one for one in [*names.ATTRIBUTES, trace_context.TOKEN_TYPE] if not one.startswith("pdserve.")}
    assert foreign <= published_attributes()


@pytest.mark.parametrize("key", [names.SPAN_CLIENT, names.SPAN_REQUEST])
def test_the_spans_of_a_call_have_the_attributes_that_are_asked_for(key: str) -> None:
    spec = names.SPANS[key]
    assert spec.name == "{gen_ai.operation.name} {gen_ai.request.model}"
    assert spec.kind == {names.SPAN_CLIENT: "client", names.SPAN_REQUEST: "server"}[key]
    assert set(spec.attributes) >= REQUIRED_OF_SPANS | RECOMMENDED_OF_SPANS


def test_our_own_spans_have_our_own_names() -> None:
    assert {one.name.partition(".")[0] for one in names.SPANS.values() if one.kind == "internal"} == {"pdserve"}


def test_values_are_published() -> None:
    assert {names.CHAT, names.TEXT_COMPLETION} <= {one.value for one in GenAiOperationNameValues}
    assert {"json", "text"} <= {one.value for one in GenAiOutputTypeValues}
    assert {"input", "output"} <= {one.value for one in GenAiTokenTypeValues}
    assert names.SCHEMA_URL in {one.value for one in Schemas}


def test_metrics_are_published() -> None:
    assert set(trace_context.BUCKETS) == {one for one in BUCKETS if ".client." in one} <= published_metrics()
    server = {one for one in published_metrics() if one.startswith("gen_ai.server.")}
    assert server == {one for one in BUCKETS if ".server." in one}
    ours = {name for name in METRICS if name.startswith("gen_ai_")}
    assert ours == {prometheus_name(one) for one in server}


@pytest.mark.parametrize("name", [one for one in BUCKETS if ".server." in one])
def test_server_metrics_have_the_labels_and_buckets_that_are_asked_for(name: str) -> None:
    spec = METRICS[prometheus_name(name)]
    assert spec.buckets == BUCKETS[name]
    required = REQUIRED_OF_METRICS | ({"error.type"} if name.endswith("duration") else set())
    assert set(spec.labels) == {one.replace(".", "_") for one in required}
    assert set(GEN_AI_LABELS) == {one.replace(".", "_") for one in REQUIRED_OF_METRICS}


def test_client_metrics_have_the_buckets_that_are_asked_for() -> None:
    assert {name: buckets for name, buckets in BUCKETS.items() if ".client." in name} == trace_context.BUCKETS
    assert REQUIRED_OF_METRICS | {"error.type", "server.address", "server.port"} == set(trace_context.LABELS)
