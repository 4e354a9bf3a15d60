import subprocess
import sys

import pytest

from pdserve.telemetry.propagate import HEADER, TraceContext, extract, inject, parse, render

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read_and_written_back() -> None:
    context = parse(GOOD)
    assert context == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert render(context) == GOOD
    unsampled = parse(GOOD[:-1] + "0")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert render(unsampled) == GOOD[:-1] + "0"


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "00",
        GOOD.upper(),
        GOOD + "-more",  # version 00 ends after the flags
        GOOD + "\n",
        "ff" + GOOD[2:],
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD.replace("-", "_"),
    ],
)
def test_a_malformed_traceparent_is_no_context(bad: str | None) -> None:
    assert parse(bad) is None


def test_a_later_version_may_carry_more() -> None:
    context = parse("01" + GOOD[2:] + "-more")
    assert context == parse(GOOD)


def test_metadata_carries_the_context_and_the_callers_own_wins() -> None:
    assert inject(None, None) == ()
    assert inject((("a", "b"),), GOOD) == (("a", "b"), (HEADER, GOOD))
    assert inject(((HEADER, "mine"),), GOOD) == ((HEADER, "mine"),)
    assert extract(inject((("a", b"b"),), GOOD)) == GOOD
    assert extract(((HEADER, "nonsense"),)) == ""
    assert extract(None) == ""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_program_without_opentelemetry_sends_nothing_and_imports_nothing() -> None:
    code = """
import sys
from pdserve.telemetry.propagate import ClientSpan, current_traceparent
with ClientSpan({"a": 1}) as span:
    span.set("b", 2)
    span.fail("REASON")
print(span.traceparent, current_traceparent(), any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert run(code) == "None None False"


def test_a_program_that_imports_it_without_setting_it_up_sends_nothing() -> None:
    code = """
import opentelemetry.trace
from pdserve.telemetry.propagate import ClientSpan, current_traceparent
with ClientSpan() as span:
    pass
print(span.traceparent, current_traceparent())
"""
    assert run(code) == "None None"


def test_a_program_that_traces_gets_a_client_span_under_its_own() -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
from pdserve.core.errors import NoWorkers
from pdserve.telemetry import names
from pdserve.telemetry.propagate import ClientSpan, current_traceparent, parse

def stream():
    with ClientSpan({names.OPERATION: names.CHAT}) as span:
        span.set(names.RESPONSE_FINISH_REASONS, "stop")
        yield span.traceparent

with trace.get_tracer("user").start_as_current_span("user"):
    before = current_traceparent()
    pieces = stream()
    inside = next(pieces)
    assert current_traceparent() == before
pieces.close()
try:
    with ClientSpan():
        raise NoWorkers("decode")
except NoWorkers:
    pass
user, closed, failed = sorted(kept.get_finished_spans(), key=lambda span: span.start_time)
assert closed.parent.span_id == user.context.span_id == parse(before).span_id
assert parse(inside).span_id == closed.context.span_id
assert closed.kind is trace.SpanKind.CLIENT and closed.status.is_unset
assert closed.attributes[names.RESPONSE_FINISH_REASONS] == ("stop",)
assert closed.instrumentation_scope.schema_url == names.SCHEMA_URL
assert failed.attributes["error.type"] == "NO_WORKERS" and not failed.status.is_ok
print("ok")
"""
    assert run(code) == "ok"
