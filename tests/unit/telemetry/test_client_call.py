"""The SDK's call in programs with and without OpenTelemetry; tests/unit/client/test_trace.py has its content."""

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_program_without_opentelemetry_sends_nothing_and_imports_nothing() -> None:
    code = """
import sys
from pdserve.telemetry.trace_context import ClientCall
from pdserve.telemetry.trace_context import current_traceparent
call = ClientCall({"gen_ai.operation.name": "chat"}, is_stream=True)
call.answered_by("m")
call.took_chunk()
call.fail("REASON")
print(call.traceparent, current_traceparent(), any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert run(code) == "None None False"


def test_a_program_that_imports_it_without_setting_it_up_sends_nothing() -> None:
    code = """
import opentelemetry.metrics, opentelemetry.trace
from pdserve.telemetry.trace_context import ClientCall
from pdserve.telemetry.trace_context import current_traceparent
call = ClientCall({"gen_ai.operation.name": "chat"}, is_stream=True)
call.took_chunk()
call.end()
print(call.traceparent, current_traceparent())
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
from pdserve.telemetry import names
from pdserve.telemetry.trace_context import ClientCall
from pdserve.telemetry.trace_context import current_traceparent, parse

with trace.get_tracer("user").start_as_current_span("user"):
    before = current_traceparent()
    call = ClientCall({names.OPERATION: names.CHAT}, is_stream=False)
    assert current_traceparent() == before
call.end()
user, span = sorted(kept.get_finished_spans(), key=lambda span: span.start_time)
assert span.parent.span_id == user.context.span_id == parse(before).span_id
assert parse(call.traceparent).span_id == span.context.span_id
assert span.kind is trace.SpanKind.CLIENT and span.status.is_unset
assert span.instrumentation_scope.schema_url == names.SCHEMA_URL
print("ok")
"""
    assert run(code) == "ok"
