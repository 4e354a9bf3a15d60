"""Values of metrics in memory, and the collector that shows them to Prometheus.

The classes of prometheus_client look the labels up for each value, take a lock for each part of a histogram, and search
its buckets in order. A router records a value several times for each token, so here a caller may keep a series, and a
bucket is found by bisection. prometheus_client writes the text, and tests compare it with that of its own classes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar, final

from pdserve.telemetry.metric_names import MetricSpec

_NO_CREATED: Final = "PROMETHEUS_DISABLE_CREATED_SERIES"  # of prometheus_client

# --- series ---------------------------------------------------------------------------------------------------
# One for each combination of a metric's labels. Safe to use from any thread.


class Counter:
    __slots__ = ("_lock", "created_s", "value")

    def __init__(self, spec: MetricSpec) -> None:
        self._lock = threading.Lock()
        self.created_s = time.time()
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Raises ValueError if `amount` is negative."""
        if amount < 0:
            raise ValueError(f"a counter cannot be reduced by {-amount}")
        with self._lock:
            self.value += amount


class Gauge:
    __slots__ = ("value",)

    def __init__(self, spec: MetricSpec) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    __slots__ = ("_counts", "_exemplars", "_lock", "_sum", "bounds", "created_s")

    def __init__(self, spec: MetricSpec) -> None:
        self._lock = threading.Lock()
        self.created_s = time.time()
        self.bounds = spec.buckets
        self._counts = [0] * (len(spec.buckets) + 1)  # the last one is of values above all bounds
        self._sum = 0.0
        self._exemplars: dict[int, tuple[str, float, float]] = {}  # bucket -> trace id, value, time of day

    def observe(self, value: float, trace_id: str = "") -> None:
        """`trace_id` (32 hex digits) becomes the bucket's exemplar, which links a slow bucket to a trace."""
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value
            if trace_id:
                self._exemplars[bucket] = trace_id, value, time.time()

    def read(self) -> tuple[list[int], float, dict[int, tuple[str, float, float]]]:
        """The counts of the buckets, the sum, and the exemplars, all of one moment."""
        with self._lock:
            return self._counts.copy(), self._sum, self._exemplars.copy()


Series = TypeVar("Series", Counter, Gauge, Histogram)


@final
class Family(Generic[Series]):
    """All series of one metric."""

    def __init__(self, kind: type[Series], spec: MetricSpec) -> None:
        """A counter or histogram has a series for each value of its labels at once, if all are known: a rate needs a
        series before its first event, because a counter that appears with the value 1 shows no increase."""
        self.spec = spec
        self._kind: type[Series] = kind
        self._lock = threading.Lock()
        self._of: dict[tuple[str, ...], Series] = {}
        known = [one for one in spec.labels.values() if not isinstance(one, str)]
        if not spec.labels or (len(known) == len(spec.labels) and kind is not Gauge):
            for values in itertools.product(*known):
                self._of[values] = kind(spec)

    def of(self, labels: dict[str, str]) -> Series:
        """Raises ValueError unless `labels` are those of the metric."""
        if labels.keys() != self.spec.labels.keys():
            raise ValueError(f"{self.spec.name} has the labels {list(self.spec.labels)}, got {list(labels)}")
        values = tuple([labels[name] for name in self.spec.labels])
        found = self._of.get(values)
        if found is None:
            with self._lock:
                found = self._of.setdefault(values, self._kind(self.spec))
        return found

    def items(self) -> list[tuple[dict[str, str], Series]]:
        """The labels and the series."""
        with self._lock:
            held = list(self._of.items())
        return [(dict(zip(self.spec.labels, values, strict=True)), one) for values, one in held]


def family_of(spec: MetricSpec) -> Family[Any]:
    match spec.kind:
        case "counter":
            return Family(Counter, spec)
        case "gauge":
            return Family(Gauge, spec)
        case "histogram":
            return Family(Histogram, spec)


# --- for Prometheus -------------------------------------------------------------------------------------------


@final
class Collector:
    """A collector of prometheus_client."""

    def __init__(self, families: list[Family[Any]]) -> None:
        # Imported here: a process without metrics does not load it.
        from prometheus_client.core import Exemplar, Metric
        from prometheus_client.utils import floatToGoString

        self._families = families
        self._metric, self._exemplar, self._shown = Metric, Exemplar, floatToGoString
        self._has_created = os.environ.get(_NO_CREATED, "").lower() not in ("true", "1", "t")

    def describe(self) -> list[Any]:
        """The metrics without their series, from which a scrape may choose some."""
        return [self._empty(one.spec) for one in self._families]

    def collect(self) -> Iterator[Any]:
        for family in self._families:
            spec, metric = family.spec, self._empty(family.spec)
            for labels, one in family.items():
                match one:
                    case Counter() | Gauge():
                        metric.add_sample(spec.name, labels, one.value)
                    case Histogram():
                        self._add_histogram(metric, labels, one)
                if self._has_created and not isinstance(one, Gauge):
                    metric.add_sample(f"{metric.name}_created", labels, one.created_s)
            yield metric

    def _empty(self, spec: MetricSpec) -> Any:
        return self._metric(spec.name.removesuffix("_total"), spec.help, spec.kind)

    def _add_histogram(self, metric: Any, labels: dict[str, str], series: Histogram) -> None:
        counts, total, exemplars = series.read()
        num_values = 0
        for bucket, (bound, count) in enumerate(zip((*series.bounds, float("inf")), counts, strict=True)):
            num_values += count
            found = exemplars.get(bucket)
            exemplar = None if found is None else self._exemplar({"trace_id": found[0]}, *found[1:])
            most = {**labels, "le": self._shown(bound)}
            metric.add_sample(f"{metric.name}_bucket", most, float(num_values), None, exemplar)
        metric.add_sample(f"{metric.name}_count", labels, float(num_values))
        metric.add_sample(f"{metric.name}_sum", labels, total)
