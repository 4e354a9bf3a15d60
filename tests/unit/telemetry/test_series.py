"""Series of metrics, compared with the classes of prometheus_client."""

from __future__ import annotations

import itertools
import random
import re
import threading
from typing import Any

import prometheus_client as prometheus
import pytest
from prometheus_client.openmetrics import exposition

from pdserve.telemetry import metric_names
from pdserve.telemetry.metric_names import METRICS, MetricSpec
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.series import Collector, family_of

ROUTER = [spec for spec in METRICS.values() if spec.by == "router"]


def theirs(spec: MetricSpec, registry: Any) -> Any:
    labels = tuple(spec.labels)
    if spec.kind == "histogram":
        made: Any = prometheus.Histogram(spec.name, spec.help, labels, registry=registry, buckets=spec.buckets)
    else:
        kind = prometheus.Counter if spec.kind == "counter" else prometheus.Gauge
        made = kind(spec.name, spec.help, labels, registry=registry)
    known = [one for one in spec.labels.values() if not isinstance(one, str)]
    if known and len(known) == len(spec.labels) and spec.kind != "gauge":
        for values in itertools.product(*known):
            made.labels(*values)
    return made


def shown(registry: Any) -> list[str]:
    """Both formats, without the times of exemplars and of the series' first values."""
    plain, full = prometheus.generate_latest(registry).decode(), exposition.generate_latest(registry).decode()
    full = re.sub(r'(# {trace_id="\w+"} \S+) \S+', r"\1", full)
    return [re.sub(r"(?m)^(\w+_created.*) \S+$", r"\1", text) for text in (plain, full)]


@pytest.mark.parametrize("seed", range(3))
def test_the_text_equals_that_of_prometheus_client(seed: int) -> None:
    rng = random.Random(seed)
    ours, other = prometheus.CollectorRegistry(), prometheus.CollectorRegistry()
    pairs = [(spec, family_of(spec), theirs(spec, other)) for spec in ROUTER]
    ours.register(Collector([family for _, family, _ in pairs]))
    assert shown(ours) == shown(other)
    for spec, family, made in rng.choices(pairs, k=400):
        values = [one if isinstance(one, str) else rng.choice(one) for one in spec.labels.values()]
        labels = dict(zip(spec.labels, values, strict=True))
        child, series = made.labels(**labels) if labels else made, family.of(labels)
        if spec.kind == "histogram":
            value = rng.choice((0.0, rng.choice(spec.buckets), rng.random() * 2.0 * spec.buckets[-1]))
            trace_id = rng.choice(("", "ab" * 16))
            series.observe(value, trace_id)
            child.observe(value, {"trace_id": trace_id} if trace_id else None)
        elif spec.kind == "counter":
            amount = rng.choice((1, 0, 2.5))
            series.add(amount)
            child.inc(amount)
        else:
            value = rng.randrange(-5, 5)
            series.set(value)
            child.set(value)
    assert shown(ours) == shown(other)


def test_a_kept_series_is_the_one_that_is_found_by_its_labels() -> None:
    metrics = Metrics("router")
    kept = metrics.counter(metric_names.PLACEMENTS, path="remote")
    kept.add(2)
    metrics.add(metric_names.PLACEMENTS, path="remote")
    assert kept.value == 3
    assert 'pdserve_placements_total{path="remote"} 3.0' in metrics.text()


def test_labels_of_another_metric_are_an_error() -> None:
    metrics = Metrics("router")
    given: tuple[dict[str, str], ...] = ({}, {"role": "decode"}, {"path": "remote", "role": "decode"})
    for labels in given:
        with pytest.raises(ValueError, match="has the labels"):
            metrics.counter(metric_names.PLACEMENTS, **labels)
    with pytest.raises(ValueError, match="cannot be reduced"):
        metrics.add(metric_names.REPLACEMENTS, -1)


def test_a_scrape_may_choose_metrics() -> None:
    registry = prometheus.CollectorRegistry()
    registry.register(Collector([family_of(spec) for spec in ROUTER]))
    found = prometheus.generate_latest(registry.restricted_registry(["pdserve_requests_queued"])).decode()
    assert [line for line in found.splitlines() if not line.startswith("#")] == ["pdserve_requests_queued 0.0"]


def test_created_series_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_created" in Metrics("router").text()
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", "True")
    assert "_created" not in Metrics("router").text()


def test_threads_lose_no_value() -> None:
    metrics = Metrics("worker")
    kept, times = metrics.counter(metric_names.STEPS), 20_000

    def work() -> None:
        for _ in range(times):
            kept.add()
            metrics.observe(metric_names.STEP_TIME, 0.01)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert kept.value == 4 * times
    assert f"pdserve_engine_step_seconds_count {4.0 * times}" in metrics.text()
