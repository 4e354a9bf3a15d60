"""The launcher's own metrics, and the metrics ports of all its processes for Prometheus's HTTP service discovery."""

from __future__ import annotations

import json
from typing import Final, final

from pdserve.core.hosts import join, local_host
from pdserve.launch.spec import (
    METRICS_HOST,
    ClusterSpec,
    Process,
    gateway,
    metrics_host,
    processes,
    router_config,
    served_names,
)
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.tls.certificates import certificates_of

TARGETS: Final = "/targets"
_COMPONENTS: Final = {"prefill_worker": "prefill", "decode_worker": "decode", "pdserve.gateway": "gateway"}


def targets(spec: ClusterSpec) -> list[dict[str, object]]:
    """One group for each process with a metrics port, the launcher first. `instance` is the name of the process, so
    that it stays the same after a restart of the cluster on other ports. Pure."""
    if spec.metrics is None:
        return []
    found = [_group(spec, "launcher", "launcher", METRICS_HOST, spec.metrics, is_https=spec.tls is not None)]
    for process in _served(spec):
        config, component = process.config, _COMPONENTS.get(process.module, process.module)
        if config.metrics_port:
            host, is_https = local_host(metrics_host(config)), bool(config.tls_cert)
            found.append(_group(spec, process.name, component, host, config.metrics_port, is_https=is_https))
    return found


def _served(spec: ClusterSpec) -> list[Process]:
    *workers, router = processes(spec)
    http = gateway(spec, "")
    return [router, *workers, *([] if http is None else [http])]


def _group(spec: ClusterSpec, name: str, component: str, host: str, port: int, *, is_https: bool) -> dict[str, object]:
    labels = {
        "instance": name,
        "component": component,
        "cluster": spec.cluster,
        "model": served_names(spec)[0],
        "__scheme__": "https" if is_https else "http",
    }
    return {"targets": [join(host, port)], "labels": labels}


@final
class LauncherMetrics:
    """Does nothing if the cluster has no metrics."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._metrics = Metrics.off() if spec.metrics is None else Metrics("launcher")

    def start(self) -> None:
        """Raises ConfigError if the port is in use or a TLS file cannot be used."""
        if self._spec.metrics is None:
            return
        tls = certificates_of(router_config(self._spec, ()), is_mutual=False)
        page = json.dumps(targets(self._spec)).encode()
        self._metrics.serve(self._spec.metrics, METRICS_HOST, tls, {TARGETS: page})

    def process_started(self, name: str) -> None:
        self._metrics.add(metric_names.PROCESS_STARTS, process=name)

    def describe(self) -> str:
        """For the operator: where Prometheus finds the targets, and the port of each process. Empty if it is off."""
        if self._spec.metrics is None:
            return ""
        groups = targets(self._spec)
        ports = {group["labels"]["instance"]: group["targets"][0].rpartition(":")[2] for group in groups}  # type: ignore[index]
        scheme = groups[0]["labels"]["__scheme__"]  # type: ignore[index]
        listed = ", ".join(f"{name} {port}" for name, port in ports.items())
        return f"metrics: {scheme}://{join(METRICS_HOST, self._spec.metrics)}{TARGETS} lists the ports {listed}"

    def close(self) -> None:
        """Idempotent."""
        self._metrics.close()
