import itertools
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.errors import ConfigError
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics, make_metrics

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"  # the format with exemplars


def scrape(port: int, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def served():
    metrics = Metrics("router")
    yield metrics, metrics.serve(0)
    metrics.close()


def test_counted_values_are_scraped(served) -> None:
    metrics, port = served
    metrics.add(metric_names.REQUESTS, outcome="served")
    metrics.add(metric_names.REQUESTS, 2, outcome="served")
    metrics.set(metric_names.QUEUED, 5)
    metrics.observe(metric_names.TTFT, 0.055, path="remote")
    found = samples(scrape(port))
    assert found["pdserve_requests_total{outcome=served}"] == 3
    assert found["pdserve_requests_queued"] == 5
    assert found["pdserve_ttft_seconds_bucket{le=0.05}{path=remote}"] == 0
    assert found["pdserve_ttft_seconds_bucket{le=0.06}{path=remote}"] == 1


def test_a_bucket_has_an_exemplar_trace(served) -> None:
    metrics, port = served
    metrics.observe(metric_names.TTFT, 0.055, path="local", trace_id="ab" * 16)
    assert f'trace_id="{"ab" * 16}"' in scrape(port, OPEN_METRICS)


def test_each_process_shows_only_its_own_metrics() -> None:
    router, worker = Metrics("router").text(), Metrics("worker").text()
    assert "pdserve_engine_steps_total" in worker
    assert "pdserve_engine_steps_total" not in router
    assert "pdserve_requests_queued" in router
    with pytest.raises(KeyError):
        Metrics("router").add(metric_names.STEPS)


def test_two_registries_can_share_a_process() -> None:
    one, other = Metrics("worker"), Metrics("worker")
    one.add(metric_names.STEPS)
    assert samples(one.text())["pdserve_engine_steps_total"] == 1
    assert samples(other.text())["pdserve_engine_steps_total"] == 0


def test_close_frees_the_port() -> None:
    metrics = Metrics("worker")
    port = metrics.serve(0)
    assert scrape(port)
    metrics.close()
    metrics.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_series_exists_before_its_first_event(served) -> None:
    """Else the first event is no increase: a rate needs an earlier sample."""
    found = samples(scrape(served[1]))
    assert found["pdserve_requests_total{outcome=failed}"] == 0
    assert found["pdserve_ttft_seconds_count{path=remote}"] == 0


def test_a_process_shows_its_memory_and_cpu_time(served) -> None:
    found = samples(scrape(served[1]))
    assert found["process_resident_memory_bytes"] > 2**20
    assert found["process_cpu_seconds_total"] > 0


def test_a_page_is_served_with_the_metrics() -> None:
    metrics = Metrics("launcher")
    port = metrics.serve(0, pages={"/targets": b"[1]"})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/targets", timeout=60) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            assert json.load(answer) == [1]
        assert "process_cpu_seconds_total" in scrape(port)
    finally:
        metrics.close()


@pytest.mark.parametrize(
    "head", [b"GET /" + b"x" * 100_000, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 90 + b"c: " + b"x" * 16_384]
)
def test_a_long_request_is_closed_without_an_answer(served, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served[1])) as sock:
        sock.settimeout(60)
        try:
            sock.sendall(head)
            assert sock.recv(1) == b""
        except ConnectionError:  # it was closed while we sent
            pass
    assert scrape(served[1])


def test_disabled_metrics_import_nothing() -> None:
    code = """
import sys
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics, make_metrics
for metrics in (Metrics.off(), make_metrics("worker", 0)):
    metrics.add(metric_names.STEPS); metrics.set(metric_names.QUEUED, 1)
    metrics.observe(metric_names.TTFT, 1.0, path="x")
    assert metrics.text() == "" and metrics.serve(0) == 0 and not metrics.is_on
    metrics.close()
print("prometheus_client" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_taken_port_is_an_error() -> None:
    with_server = Metrics("worker")
    port = with_server.serve(0)
    try:
        with pytest.raises(ConfigError, match="port in use"):
            make_metrics("worker", port)
    finally:
        with_server.close()


def test_names_units_and_buckets_are_well_formed() -> None:
    for spec in metric_names.METRICS.values():
        assert spec.name.startswith(("pdserve_", "gen_ai_server_")), spec
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec
        assert (spec.kind == "histogram") == spec.name.endswith(("_seconds", "_ratio")) == bool(spec.buckets), spec
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec
    for fine in (metric_names.TTFT_BUCKETS, metric_names.TPOT_BUCKETS):
        assert max(high / low for low, high in itertools.pairwise(fine) if 0.02 <= low <= 0.5) < 1.6
