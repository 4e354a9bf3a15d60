"""Dashboards, rules and scrapes use metrics, labels and ports that exist and that some process emits."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.telemetry import metric_names
from tests.unit.deploy.manifests import ROOT, load, pod_templates
from tests.unit.deploy.observed import OBSERVE, alerts, dashboards, expressions, rules, samples, used

EMITTERS = {
    "router": ["router"],
    "worker": ["pdserve/worker", "prefill_worker", "decode_worker", "kvtransfer"],
    "gateway": ["pdserve/gateway"],
    "launcher": ["pdserve/launch"],
}
DASHBOARDS = sorted(dashboards())


@pytest.fixture(params=DASHBOARDS)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboards()[request.param]


def sources(folders: list[str]) -> str:
    return "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_metric_exists_and_is_emitted_by_its_process() -> None:
    known = samples()
    constants = {
        spec.name: name for name, spec in vars(metric_names).items() if isinstance(spec, metric_names.MetricSpec)
    }
    emitted = {by: set(re.findall(r"\bmetric_names\.(\w+)", sources(folders))) for by, folders in EMITTERS.items()}
    for expression in expressions():
        for name in used(expression):
            assert name in known, f"{name} in {expression}"
            spec = known[name]
            assert constants[spec.name] in emitted[spec.by], f"nobody emits {name}"


def test_every_used_label_exists() -> None:
    from_scraping = {"namespace", "cluster", "model", "pod", "instance", "component", "job"}
    for expression in expressions():
        labels = set().union(*(samples()[name].labels for name in used(expression))) | from_scraping | {"le"}
        if "pdserve:tenant_" in expression:
            labels |= {"tenant"}
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
        grouped = {
            label for group in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for label in group.split(",")
        }
        assert matched <= labels, expression
        assert {label.strip() for label in grouped if label.strip()} <= labels, expression


def test_counters_use_rate_and_histograms_use_buckets() -> None:
    for expression in expressions():
        for name in used(expression):
            spec = samples()[name]
            if spec.kind != "gauge":
                assert re.search(rf"\b(?:rate|increase)\(\s*{name}\b", expression), expression
        assert expression.count("(") == expression.count(")"), expression
        assert expression.count("{") == expression.count("}"), expression


def test_every_recorded_rule_that_is_used_is_defined() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in expressions():
        assert set(re.findall(r"\bpdserve:[a-z0-9_:]+", expression)) <= recorded, expression


def test_every_alert_has_severity_and_description() -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])


def test_every_alert_has_a_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/alerts.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_every_alert_fires_and_clears_in_a_rule_test() -> None:
    tests = yaml.safe_load((OBSERVE / "alerts.test.yml").read_text())["tests"]
    cleared = set()
    for one in tests:
        checks = [[sample["labels"] for sample in check["exp_samples"]] for check in one["promql_expr_test"]]
        fired = {
            name for firing in checks[:-1] for labels in firing for name in re.findall(r'alertname="(\w+)"', labels)
        }
        cleared |= fired if not checks[-1] else set()
    assert cleared == {rule["alert"] for rule in alerts()}


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_local_scrapes_are_valid() -> None:
    tool = promtool()
    run(tool, "check", "rules", OBSERVE / "rules.yml", OBSERVE / "alerts.yml")
    run(tool, "check", "config", OBSERVE / "prometheus.yml")  # Debian's has no Kubernetes discovery


def test_promtool_sees_each_alert_fire_and_clear() -> None:
    run(promtool(), "test", "rules", OBSERVE / "alerts.test.yml")


def test_the_rule_tests_detect_an_alert_that_never_fires(tmp_path: Path) -> None:
    tool = promtool()
    given = yaml.safe_load((OBSERVE / "alerts.test.yml").read_text())
    of_alert = [one for one in given["tests"] if "PdserveProcessDown" in str(one)]
    (tmp_path / "alerts.test.yml").write_text(yaml.safe_dump({**given, "tests": of_alert}))
    shutil.copy(OBSERVE / "rules.yml", tmp_path)
    text = (OBSERVE / "alerts.yml").read_text()
    for threshold, status in ((0, 0), (2, 1)):
        changed = text.replace('up{job="pdserve"} == 0', f'up{{job="pdserve"}} == {threshold}')
        (tmp_path / "alerts.yml").write_text(changed)
        done = subprocess.run([tool, "test", "rules", tmp_path / "alerts.test.yml"], capture_output=True, timeout=120)
        assert done.returncode == status


def test_panels_do_not_overlap_and_have_unique_ids(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard["panels"]
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


def test_every_panel_has_a_description_a_unit_and_legends(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), panel["title"]
        assert len(set(legends)) == len(legends), panel["title"]


def test_no_dashboard_names_a_data_source(dashboard: dict[str, Any]) -> None:
    """A name would not exist in another Grafana."""
    sources = re.findall(r'"datasource": \{[^}]*"uid": "([^"]*)"', json.dumps(dashboard))
    assert set(sources) == {"${datasource}"}
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    assert "id" not in dashboard, "an import with the id of another Grafana overwrites a dashboard there"


def test_dashboards_use_only_their_variables(dashboard: dict[str, Any]) -> None:
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    said = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert said == variables


def test_dashboards_show_series_without_a_label(dashboard: dict[str, Any]) -> None:
    """The namespace comes from Kubernetes and the model from `up`; All must be chosen, and must match their absence."""
    for one in dashboard["templating"]["list"][1:]:
        assert one["current"]["value"] == "$__all"
        assert re.fullmatch(one["allValue"], "")


def test_a_share_is_not_negative() -> None:
    """The receiver's answer comes after the last byte, so the exposed time may exceed the busy time."""
    for expression in expressions():
        if re.search(r"(?:^|\()\s*1 - ", expression):
            assert expression.startswith(("clamp_min(", "clamp(")), expression


def test_prometheus_scrapes_the_ports_that_the_manifests_open() -> None:
    config = yaml.safe_load((OBSERVE / "prometheus-kubernetes.yml").read_text())
    assert all((OBSERVE / name).is_file() for name in config["rule_files"])
    [job] = config["scrape_configs"]
    [pattern, *_] = [one["regex"] for one in job["relabel_configs"] if one.get("regex", "").startswith("metrics")]
    scraped = {
        name
        for name, template in pod_templates(load())
        for port in template["spec"]["containers"][0]["ports"]
        if re.fullmatch(pattern, port["name"])
    }
    assert scraped == {"pdserve-gateway", "pdserve-launcher", "pdserve-router", "ray-workers"}


def test_the_collectors_address_is_the_exporters() -> None:
    collector = ("ConfigMap", "pdserve-otel-collector")
    [held] = [one["data"] for one in load() if (one["kind"], one["metadata"]["name"]) == collector]
    config = yaml.safe_load(held["config.yaml"])
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
