"""Dashboards, rules and alerts on a live cluster: `pdserve up --metrics` under load, scraped by a real Prometheus.

`make dashboard-checks` runs all of it; `make test` leaves out what takes more than a few seconds. Without Prometheus
(Debian: prometheus), everything is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from pdserve import Client, Slo
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.errors import PdserveError
from tests.cluster.cluster import Cluster, free_ports
from tests.support.prometheus_server import BINARY, PrometheusServer, until
from tests.unit.deploy.observed import alerts, dashboards, queries, rules
from tests.unit.telemetry.otlp_sink import OtlpSink, running_sink

pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus is not installed (Debian: prometheus)")

TOKEN = "operator"
RATE_INTERVAL = "6s"  # Grafana takes at least four scrapes
PROCESSES = ["d0", "d1", "gateway", "launcher", "p0", "router"]
VARIABLES = {"$__rate_interval": RATE_INTERVAL, "$namespace": ".*", "$model": ".*", "$tenant": ".*"}
QUOTA = {"tokens_per_minute": 200}
KEYS = {name: make_key(os.urandom(32)) for name in ("a", "b", "over-quota")}

# Panels whose values may all be 0 under this load: gauges between two requests, and counters of faults.
MAY_BE_ZERO = {
    "Queued and running requests",
    "Placements",
    "Batch",
    "Waiting",
    "Waiting sequences by role",
    "Preemptions and refusals",
    "Speculative decoding",
    "Restarts in 15 minutes",
    "Share of transfers that failed",
    "Hidden behind the prefill",
    "Unusual events",
    "Stale blocks",
    "Answers in progress",
    "Starved tenants",
}


class Load(threading.Thread):
    """Two tenants with long prompts that share a prefix and with short ones, rejected requests of one of them, a tenant
    over its quota, and HTTP."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="load", daemon=True)
        self._cluster = cluster
        self._is_over = threading.Event()
        self.num_answered = 0

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            clients = {name: stack.enter_context(Client(self._cluster.target, token=key)) for name, key in KEYS.items()}
            number = 0
            while not self._is_over.is_set():
                number += 1
                for tenant in ("a", "b"):
                    self._ask(clients[tenant], f"{tenant} " * 100 + f" ends with {number}", slo=None)
                    self._ask(clients[tenant], f"{number}", slo=None)
                self._ask(clients["a"], f"{number} " * 100, slo=Slo(ttft_s=0.001, tpot_s=0.0001))
                self._ask(clients["over-quota"], "a quota", slo=None)
                self._ask_http("b")

    def _ask(self, client: Client, prompt: str, slo: Slo | None) -> None:
        with contextlib.suppress(PdserveError):
            client.generate(prompt, max_tokens=4, slo=slo, ignore_eos=True)
            self.num_answered += 1

    def _ask_http(self, tenant: str) -> None:
        body = json.dumps({"model": "toy", "prompt": "over HTTP", "max_tokens": 2}).encode()
        headers = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self._cluster.running.http_url}/completions", body, headers)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def stop(self) -> None:
        self._is_over.set()
        self.join(60.0)


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(len(PROCESSES))


@pytest.fixture(scope="module")
def sink() -> Iterator[OtlpSink]:
    with running_sink() as sink:
        yield sink


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, metrics_port: int, sink: OtlpSink) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {
        name: {"keys": [{"sha256": key_hash(key), "created": "2026-11-24"}], **(QUOTA if "quota" in name else {})}
        for name, key in KEYS.items()
    }
    file.write_text(json.dumps({"tenants": tenants}))
    file.chmod(0o600)
    flags = ["--model", "toy", "--decode", "2", "--http", "0", "--metrics", str(metrics_port), "--key-file", str(file)]
    flags += ["--set", "router.policy=mooncake"]  # prefills on prefill workers, and rejects
    flags += ["--otlp", sink.endpoint, "--set", "router.trace_share=0.5"]
    with Cluster(*flags, env={"PDSERVE_TOKEN": TOKEN}) as found:
        yield found


@pytest.fixture(scope="module")
def load(cluster: Cluster) -> Iterator[Load]:
    found = Load(cluster)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def prometheus(
    cluster: Cluster, load: Load, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    with PrometheusServer(tmp_path_factory.mktemp("prometheus"), metrics_port) as found:
        yield found


def test_every_process_is_scraped(prometheus: PrometheusServer) -> None:
    until(lambda: prometheus.healthy_targets() == PROCESSES, f"{PROCESSES} are scraped")


def test_every_rule_is_evaluated(prometheus: PrometheusServer) -> None:
    def evaluated() -> dict[str, str]:
        groups = prometheus.get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    until(lambda: set(evaluated().values()) == {"ok"}, "every rule is evaluated")
    assert set(evaluated()) == {rule.get("record") or rule["alert"] for rule in rules()}
    for rule in rules():
        if "record" in rule:
            until(lambda name=rule["record"]: prometheus.values(name), rule["record"])  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(dashboards()))
def test_every_query_of_a_dashboard_returns_data(prometheus: PrometheusServer, name: str) -> None:
    for title, expression in queries(dashboards()[name]):
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)

        def has_data(expression: str = expression, title: str = title) -> bool:
            values = prometheus.values(expression)
            return bool(values) and (title in MAY_BE_ZERO or max(values) > 0)

        until(has_data, f"{title}: {expression}", within_s=60.0)


def test_exemplars_lead_to_traces_that_were_exported(prometheus: PrometheusServer, sink: OtlpSink) -> None:
    def linked() -> set[str]:
        found = prometheus.get("query_exemplars", query="pdserve_ttft_seconds_bucket", start="0", end="9999999999")
        return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}

    until(lambda: len(linked()) > 1, "exemplars")
    found = linked()
    until(lambda: found <= {span.trace_id for span in sink.spans}, "their traces")


def test_every_series_of_an_alert_exists(prometheus: PrometheusServer) -> None:
    """An alert that selects no series never fires."""
    for rule in alerts():
        selectors = re.findall(r"\b(?:pdserve[_:][a-z0-9_:]+|up)\b(?:\{[^}]*\})?", rule["expr"])
        assert selectors, rule["alert"]
        for selector in selectors:
            until(lambda one=selector: prometheus.values(one), f"{rule['alert']}: {selector}", within_s=60.0)  # type: ignore[misc]


RESTARTS = {"PdserveProcessRestarts d0", "PdserveProcessRestarts d1"}  # of the last 15 minutes
FAULT_ALERTS = {
    "PdserveProcessDown d0",
    "PdserveProcessDown d1",
    "PdserveWorkerLost decode",
    "PdserveRouterWithoutWorkers router",
}


@pytest.mark.slow
def test_alerts_fire_while_workers_are_killed_and_then_clear(cluster: Cluster, prometheus: PrometheusServer) -> None:
    until(lambda: prometheus.healthy_targets() == PROCESSES, f"{PROCESSES} are scraped")
    until(lambda: not (FAULT_ALERTS | RESTARTS) & prometheus.alerts().keys(), "no alert before the fault")
    fired: dict[str, set[str]] = {}

    def have_fired() -> bool:
        # Again and again, because the launcher restarts a worker within seconds.
        for worker in ("d0", "d1"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(cluster.running.pid(worker), signal.SIGKILL)
        for name, state in prometheus.alerts().items():
            fired.setdefault(name, set()).add(state)
        return all("firing" in fired.get(name, ()) for name in FAULT_ALERTS | RESTARTS)

    until(have_fired, f"all fire: {FAULT_ALERTS | RESTARTS}")
    until(lambda: not FAULT_ALERTS & prometheus.alerts().keys(), "all clear after the workers are back")
    assert prometheus.healthy_targets() == PROCESSES
    assert prometheus.alerts().keys() >= RESTARTS
