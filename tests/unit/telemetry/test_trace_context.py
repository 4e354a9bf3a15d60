"""The SDK's call in programs with and without OpenTelemetry; tests/unit/client/test_trace.py has its content."""

import random
import subprocess
import sys

import pytest

from pdserve.core.results import Timings
from pdserve.core.types import Slo
from pdserve.telemetry.trace_context import (
    HEADER,
    TraceContext,
    extract,
    inject,
    is_in_share,
    is_notable,
    parse,
    render,
    trace_id_of,
)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_program_without_opentelemetry_sends_nothing_and_imports_nothing() -> None:
    code = """
import sys
from pdserve.telemetry.trace_context import ClientCall
from pdserve.telemetry.trace_context import current_traceparent
call = ClientCall(lambda: 1 / 0, is_stream=True)
call.answered_by("m")
call.took_chunk()
call.fail("REASON")
print(call.traceparent, current_traceparent(), any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert run(code) == "None None False"


def test_a_program_that_imports_it_without_setting_it_up_sends_nothing() -> None:
    code = """
import opentelemetry.trace
from pdserve.telemetry.trace_context import ClientCall
from pdserve.telemetry.trace_context import current_traceparent
call = ClientCall(lambda: 1 / 0, is_stream=True)
call.took_chunk()
call.end()
print(call.traceparent, current_traceparent())
import opentelemetry.metrics
call = ClientCall(lambda: {"gen_ai.operation.name": "chat"}, is_stream=True)
call.took_chunk()
call.end()
print(call.traceparent)
"""
    assert run(code).split() == ["None", "None", "None"]


def test_a_context_without_a_provider_is_passed_on() -> None:
    code = """
from opentelemetry import context, trace
from pdserve.telemetry.trace_context import ClientCall
remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
context.attach(trace.set_span_in_context(trace.NonRecordingSpan(remote)))
print(ClientCall(lambda: 1 / 0, is_stream=False).traceparent)
"""
    assert run(code) == f"00-{1:032x}-{2:016x}-01"


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
    call = ClientCall(lambda: {names.OPERATION: names.CHAT}, is_stream=False)
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


# --- W3C trace context ----------------------------------------------------------------------------------------

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_survives_parsing() -> None:
    context = parse(GOOD)
    assert context == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert render(context) == GOOD
    unsampled = parse(GOOD[:-1] + "0")
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert render(unsampled) == GOOD[:-1] + "0"
    assert (trace_id_of(GOOD), trace_id_of("nonsense")) == ("0af7651916cd43dd8448eb211c80319c", "")


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
def test_a_malformed_traceparent_is_ignored(bad: str | None) -> None:
    assert parse(bad) is None


def test_a_later_version_may_carry_more() -> None:
    context = parse("01" + GOOD[2:] + "-more")
    assert context == parse(GOOD)


def test_metadata_has_the_context_unless_the_caller_set_one() -> None:
    assert inject(None, None) == ()
    assert inject((("a", "b"),), GOOD) == (("a", "b"), (HEADER, GOOD))
    assert inject(((HEADER, "mine"),), GOOD) == ((HEADER, "mine"),)
    assert extract(inject((("a", b"b"),), GOOD)) == GOOD
    assert extract(((HEADER, "nonsense"),)) == ""
    assert extract(None) == ""


# --- traces that are kept -------------------------------------------------------------------------------------

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def timings(ttft_s: float = 0.5, tpot_s: float = 0.05, total_s: float = 2.0, attempts: int = 1) -> Timings:
    return Timings(ttft_s=ttft_s, tpot_s=tpot_s, total_s=total_s, attempts=attempts)


@pytest.mark.parametrize(
    ("ended", "is_kept"),
    [
        (timings(), False),
        (timings(ttft_s=1.5), True),
        (timings(tpot_s=0.2), True),
        (timings(attempts=2), True),  # a failure that the client did not see
        (timings(ttft_s=0.0, tpot_s=0.0, total_s=0.5), False),  # the client left before its first token
        (timings(ttft_s=0.0, tpot_s=0.0, total_s=1.5), True),  # and had waited too long
    ],
)
def test_slow_and_retried_requests_are_notable(ended: Timings, is_kept: bool) -> None:
    assert is_notable(ended, SLO) is is_kept


def test_the_share_is_chosen_by_trace_id() -> None:
    rng = random.Random(1)
    ids = [rng.getrandbits(128) for _ in range(4000)]
    assert all(is_in_share(one, 1.0) for one in ids)
    assert not any(is_in_share(one, 0.0) for one in ids)
    assert 0.22 < sum(is_in_share(one, 0.25) for one in ids) / len(ids) < 0.28
    assert all(is_in_share(one, 0.5) for one in ids if is_in_share(one, 0.25))
