"""A real Prometheus with our scrape configuration and rules, which scrapes and evaluates each second."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pdserve.launch.ports import free_ports
from tests.unit.deploy.observed import OBSERVE

WAIT_S = 60.0
BINARY = shutil.which("prometheus")


class PrometheusServer:
    """Scrapes the cluster of `pdserve up --metrics PORT` with deploy/observe/prometheus.yml. `for_s` replaces how long
    a condition must last until its alert fires. Use as a context manager."""

    def __init__(self, folder: Path, metrics_port: int, for_s: float = 1.0) -> None:
        assert BINARY is not None, "the caller skips its test"
        [port] = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("w")
        config = _replaced(OBSERVE / "prometheus.yml", r"127\.0\.0\.1:9500", f"127.0.0.1:{metrics_port}")
        config = re.sub(r"_interval: \d+s", "_interval: 1s", config)
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(OBSERVE / "rules.yml", folder)
        (folder / "alerts.yml").write_text(_replaced(OBSERVE / "alerts.yml", r"for: \w+", f"for: {for_s:g}s"))
        self._process = subprocess.Popen(
            [
                BINARY,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def get(self, path: str, **arguments: str) -> Any:
        """The `data` of an answer of the HTTP API. Raises urllib's errors; of an invalid query, with its message."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series, now."""
        found = self.get("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def values(self, expression: str) -> list[float]:
        """Without NaN."""
        return [value for _, value in self.query(expression) if not math.isnan(value)]

    def alerts(self) -> dict[str, str]:
        """The state of each alert, pending or firing, by its name and that of the process, tenant or role."""
        found = self.get("alerts")["alerts"]
        return {_named(one["labels"]): one["state"] for one in found}

    def healthy_targets(self) -> list[str]:
        found = self.get("targets", state="active")["activeTargets"]
        return sorted(one["labels"]["instance"] for one in found if one["health"] == "up")

    def __enter__(self) -> Self:
        try:
            until(self._is_ready, "Prometheus is ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=60) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._log.close()


def until(is_true: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


def _named(labels: dict[str, str]) -> str:
    of = labels.get("process") or labels.get("instance") or labels.get("tenant") or labels.get("role") or ""
    return f"{labels['alertname']} {of}".rstrip()


def _replaced(file: Path, pattern: str, text: str) -> str:
    found, count = re.subn(pattern, text, file.read_text())
    assert count > 0, f"{pattern} is not in {file.name}"
    return found
