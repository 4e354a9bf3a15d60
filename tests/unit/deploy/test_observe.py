"""Dashboards, rules and scrapes speak of metrics, labels and ports that exist and that some process really emits."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from pdserve.telemetry import metric_names
from tests.unit.deploy.manifests import KUBERAY, ROOT, load, pod_templates

OBSERVE = ROOT / "deploy/observe"
EMITTERS = {"router": ["router"], "worker": ["pdserve/worker", "prefill_worker", "decode_worker"]}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((OBSERVE / "grafana-dashboard.json").read_text())


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))


def samples() -> dict[str, metric_names.MetricSpec]:
    """What Prometheus stores, by the name that a query uses."""
    found = {}
    for spec in metric_names.METRICS.values():
        suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        found.update({spec.name + suffix: spec for suffix in suffixes})
    return found


def used(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:pdserve|gen_ai)_[a-z0-9_]+\b", expression))


def test_every_metric_exists_and_is_emitted_by_its_process() -> None:
    known = samples()
    constants = {
        spec.name: name for name, spec in vars(metric_names).items() if isinstance(spec, metric_names.MetricSpec)
    }
    for expression in expressions():
        for name in used(expression):
            assert name in known, f"{name} in {expression}"
            spec = known[name]
            sources = [path for folder in EMITTERS[spec.by] for path in (ROOT / folder).rglob("*.py")]
            word = re.compile(rf"\bmetric_names\.{constants[spec.name]}\b")
            assert any(word.search(path.read_text()) for path in sources), f"nobody emits {name}"


def test_every_label_is_one_that_the_metric_has() -> None:
    from_scraping = {"namespace", "pod", "instance", "component", "job"}
    for expression in expressions():
        labels = set().union(*(samples()[name].labels for name in used(expression))) | from_scraping | {"le"}
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
        grouped = {
            label for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for label in group.split(",")
        }
        assert matched <= labels, expression
        assert {label.strip() for label in grouped} <= labels, expression


def test_counters_are_rated_and_histograms_are_asked_by_bucket() -> None:
    for expression in expressions():
        for name in used(expression):
            spec = samples()[name]
            if spec.kind != "gauge":
                assert f"rate({name}" in expression, expression
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression


def test_every_recorded_rule_that_is_used_is_defined() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in expressions():
        assert set(re.findall(r"\bpdserve:[a-z0-9_:]+", expression)) <= recorded, expression


def test_every_alert_says_how_bad_and_what() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smh]", rule["for"])


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_the_dashboard_asks_only_variables_that_it_has() -> None:
    found = dashboard()
    variables = {one["name"] for one in found["templating"]["list"]}
    said = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(found["panels"]))) - {"__rate_interval"}
    assert said <= variables


def test_the_dashboard_shows_series_without_a_namespace() -> None:
    """The label comes from relabelling on Kubernetes; elsewhere All must be chosen, and must match its absence."""
    [namespace] = [one for one in dashboard()["templating"]["list"] if one["name"] == "namespace"]
    assert namespace["current"]["value"] == "$__all"
    assert re.fullmatch(namespace["allValue"], "")


def test_a_share_is_not_negative() -> None:
    """What the receiver says comes after the last byte, so exposed seconds may exceed the busy ones."""
    for expression in expressions():
        if re.search(r"(?:^|\()\s*1 - ", expression):
            assert expression.startswith(("clamp_min(", "clamp(")), expression


def test_prometheus_scrapes_the_ports_that_the_manifests_open() -> None:
    config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    assert [(OBSERVE / name).is_file() for name in config["rule_files"]] == [True]
    [job] = config["scrape_configs"]
    [pattern] = [one["regex"] for one in job["relabel_configs"] if one.get("regex", "").startswith("metrics")]
    scraped = {
        name
        for name, template in pod_templates(load(KUBERAY))
        for port in template["spec"]["containers"][0]["ports"]
        if re.fullmatch(pattern, port["name"])
    }
    assert scraped == {"pdserve-launcher", "pdserve-router", "ray-workers"}


def test_the_collector_takes_spans_where_our_processes_send_them() -> None:
    config = yaml.safe_load((KUBERAY / "otel-collector-config.yaml").read_text())
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
