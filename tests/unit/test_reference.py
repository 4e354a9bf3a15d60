"""The pages of docs/reference say what the code says."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtransfer.devices import issuer
from kvtransfer.protocol.transport import EVENTS
from pdserve.config import RouterConfig, WorkerConfig
from pdserve.config_flags import parse_flags
from pdserve.core.errors import ConfigError
from pdserve.launch import settings
from pdserve.launch.keys import KINDS, TOP
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from router.state.interface import Outcome

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/reference.py"
ROOMS = ("decode_worker", "kvtransfer", "pdserve", "prefill_worker", "router")


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(page: str, heading: str) -> str:
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
    return re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def keys() -> set[str]:
    return {key for heading in ("Cluster", "Router", "Workers") for key in first_cells(section("settings.md", heading))}


@pytest.mark.parametrize("page", ["settings.md", "cli.md", "metrics.md"])
def test_page_is_current(page: str) -> None:
    name = f"docs/reference/{page}"
    assert (ROOT / name).read_text(encoding="utf-8") == reference().PAGES[name](), f"{name} is stale: make reference"


def test_check_names_the_stale_page(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--root", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "docs/reference/cli.md").write_text("# Commands\n")
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "docs/reference/cli.md is stale: run `make reference` and commit the page\n"
    assert (tmp_path / "docs/reference/cli.md").read_text() == "# Commands\n", "a check writes nothing"


def test_pages_name_no_path_of_this_machine() -> None:
    for name, render in reference().PAGES.items():
        assert str(ROOT) not in render(), name
        assert str(Path.home()) not in render(), name


EXAMPLES: dict[type, Any] = {str: "", int: 1, float: 1.0, bool: True}


def example(key: str) -> Any:
    """A value that the setting may hold: its default, where it has one."""
    table, _, name = key.rpartition(".")
    known = {"model": "toy", "prefill": 1, "decode": 1, "ray_strategy": "spread"}
    known |= {"log_level": "debug", "log_max_bytes": 4096, "autoscale": "1:4", "roles": "auto"}
    if not table and name in known:
        return known[name]
    for kind in (RouterConfig,) if table == "router" else (WorkerConfig, RouterConfig):
        for one in dataclasses.fields(kind):
            if one.name == name:
                return [] if one.default == () else one.default
    return EXAMPLES[TOP[name]]


def accepts(key: str) -> bool:
    """Whether `--set` takes the key; a secret's is known, and rejected as a secret."""
    value = example(key)
    word = f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}"
    try:
        settings.read({"model": "toy", **({"http": 0} if key == "http_process" else {})}, None, [word])
    except ConfigError as error:
        return error.expected.startswith("no secret on a command line")
    return True


def test_set_accepts_every_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [key for key in sorted(keys() - {"record"}) if not accepts(key)] == []
    settings.read({"model": "toy"}, None, [f"record={str(tmp_path / 'recording')!r}"])
    ours = {key.partition(".")[2] for key in keys() if key.startswith("worker.")}
    for kind in ("prefill_worker", "decode_worker"):
        assert [key for key in sorted(ours) if not accepts(f"{kind}.{key}")] == []


def test_page_has_every_key_that_set_accepts() -> None:
    fields = {one.name for kind in (RouterConfig, WorkerConfig) for one in dataclasses.fields(kind)} | set(TOP)
    fields |= {one.name for one in dataclasses.fields(settings.ClusterSpec)}
    known = keys()
    for kind in ("", "router", "worker"):
        for name in sorted(fields):
            key = f"{kind}.{name}" if kind else name
            if key in known or name == "settings":
                continue
            with pytest.raises((ConfigError, KeyError)):
                settings.read({"model": "toy"}, None, [f"{key}={example(key)!r}"])
    assert {key.partition(".")[0] for key in known if "." in key} <= set(KINDS)


def test_help_of_up_states_the_true_default() -> None:
    of_spec = {one.name: one.default for one in dataclasses.fields(settings.ClusterSpec)}
    of_config = {one.name: one.default for kind in (RouterConfig, WorkerConfig) for one in dataclasses.fields(kind)}
    for action in reference().actions(reference().make_parsers(["up"])[1]["up"]):
        default = of_spec.get(action.dest, of_config.get(action.dest))
        if action.dest in TOP and default not in (None, "", (), False, dataclasses.MISSING):
            assert action.help.endswith(f" ({default})"), action.dest


def test_metrics_page_lists_what_a_scrape_shows() -> None:
    pages = {"router": "Metrics of the router", "worker": "Metrics of workers"}
    for process, heading in pages.items():
        families = text_string_to_metric_families(Metrics(process).text())  # type: ignore[arg-type]
        scraped = {family.name + ("_total" if family.type == "counter" else "") for family in families}
        scraped = {name for name in scraped if not name.endswith("_created")}  # times of creation, for Prometheus
        scraped = {name for name in scraped if not name.startswith("process_")}  # of every process
        assert set(first_cells(section("metrics.md", heading))) == scraped


def test_label_values_match_the_code() -> None:
    assert metric_names.REQUESTS.labels["outcome"] == tuple(one.value for one in Outcome)
    events = {*EVENTS, *issuer.events(), "layer_groups_withheld"}
    assert set(metric_names.TRANSFER_EVENTS.labels["event"]) == events


def test_literal_labels_are_listed() -> None:
    """Each call such as metrics.add(metric_names.KV_BLOCKS, 1, state="free")."""
    seen = 0
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Attribute)):
                continue
            spec = getattr(metric_names, node.args[0].attr, None)
            if not isinstance(spec, metric_names.MetricSpec):
                continue
            for word in node.keywords:
                if word.arg is None or word.arg == "trace_id":
                    continue
                values = spec.labels[word.arg]
                texts = [one.value for one in ast.walk(word.value) if isinstance(one, ast.Constant)]
                seen += len(texts)
                assert isinstance(values, str) or {one for one in texts if isinstance(one, str)} <= set(values), path
    assert seen >= 10


@pytest.mark.parametrize("kind", [RouterConfig, WorkerConfig])
def test_help_lists_every_choice(kind: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(kind, ["--help"], "program")
    shown = "".join(capsys.readouterr().out.split())
    for one in dataclasses.fields(kind):
        flag = "--" + one.name.replace("_", "-")
        assert not one.metadata["choices"] or f"{flag}{'|'.join(one.metadata['choices'])}" in shown, one.name
