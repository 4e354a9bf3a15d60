"""The expressions of the dashboards, the recording rules and the alerts under deploy/observe."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from pdserve.telemetry import metric_names
from tests.unit.deploy.manifests import ROOT

OBSERVE = ROOT / "deploy/observe"


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("rules.yml", "alerts.yml"):
        groups = yaml.safe_load((OBSERVE / name).read_text())["groups"]
        found.extend(rule for group in groups for rule in group["rules"])
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((OBSERVE / "dashboards").glob("*.json"))}


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The title of each panel, and one of its expressions."""
    for panel in dashboard["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for dashboard in dashboards().values():
        yield from (expression for _, expression in queries(dashboard))


def samples() -> dict[str, metric_names.MetricSpec]:
    """What Prometheus stores, by the name that a query uses."""
    found = {}
    for spec in metric_names.METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        found.update({spec.name + suffix: spec for suffix in suffixes})
    return found


def used(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:pdserve|gen_ai)_[a-z0-9_]+\b", expression))
