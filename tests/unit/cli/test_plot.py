"""The flag `--plot`, the origin of figures, and the figure of an explanation."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import pdserve
from pdserve import plot_flag
from pdserve.cli.explain import explain_figure
from pdserve.cli.main import main
from pdserve.core.errors import ConfigError
from pdserve.plot.drawing import figure_page, figure_svg
from pdserve.plot_flag import check_plot, write_plot
from tests.unit.cli.test_explain import EXPLANATION, served
from tests.unit.simulator.test_report import read

SVG = "{http://www.w3.org/2000/svg}"


def test_the_suffix_selects_svg_or_html(tmp_path: Path) -> None:
    for name, expected in (("a.svg", "drawing"), ("a.SVG", "drawing"), ("a.html", "page"), ("a.htm", "page")):
        args = argparse.Namespace(plot=str(tmp_path / name))
        check_plot(args)
        write_plot(args, svg=lambda: "drawing", page=lambda: "page")
        assert (tmp_path / name).read_text() == expected


@pytest.mark.parametrize("name", ["a.png", "a", "svg"])
def test_another_ending_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.html"):
        check_plot(argparse.Namespace(plot=str(tmp_path / name)))
    assert list(tmp_path.iterdir()) == []


def test_the_origin_names_version_commit_and_machine(tmp_path: Path) -> None:
    assert f"pdserve {pdserve.__version__}" in plot_flag.origin()
    assert plot_flag.machine() in plot_flag.origin()
    assert plot_flag._commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert head.startswith(plot_flag._commit(tmp_path))
    assert len(plot_flag._commit(tmp_path)) == 10


def test_an_explanation_shows_each_placement_and_what_happened() -> None:
    text = figure_svg(explain_figure([EXPLANATION], origin="commit abc"))
    root = ET.fromstring(text)
    legends = ["misses a target", "chosen, as predicted", "what then happened"]
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert [one for one in texts if one in legends] == legends
    titles = [one.text for one in root.iter(f"{SVG}title")]
    assert [one for one in titles if one and " at " in one] == [
        "misses a target: 20 ms at 1 s",  # From arrival: it waited 0.1 s.
        "chosen, as predicted: 20 ms at 400 ms",
        "what then happened: 25 ms at 500 ms",
    ]
    places = [one.attrib["transform"] for one in root.iter(f"{SVG}path") if one.find(f"{SVG}title") is not None]
    x_of = [float(one.partition("(")[2].split()[0]) for one in places]
    assert x_of[1] < x_of[2] < x_of[0]
    assert "commit abc" in texts


def test_an_explanation_without_candidates_or_times_is_a_figure() -> None:
    evil = "<b>&"
    rejected = dataclasses.replace(
        EXPLANATION, request_id=evil, reason=evil, candidates=(), actual_ttft_s=None, actual_tpot_s=None
    )
    infinite = dataclasses.replace(
        EXPLANATION,
        candidates=tuple(dataclasses.replace(one, predicted_ttft_s=float("inf")) for one in EXPLANATION.candidates),
    )
    for one in (rejected, infinite):
        ET.fromstring(figure_svg(explain_figure([one], origin="o")))
    page = read(figure_page(explain_figure([rejected, infinite], origin="o")))
    assert "b" not in page.tags


def test_explain_writes_a_plot(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = served(target, "plotted-1")
    path = tmp_path / "one.html"
    assert main(["explain", name, "--target", target, "--plot", str(path)]) == 0
    assert capsys.readouterr().out.startswith("plotted-1: ")
    assert "chosen, as predicted" in read(path.read_text(encoding="utf-8")).texts


def test_plan_writes_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    flags = ("--workers", "2", "--requests", "40", "--jobs", "1", "--plot", str(path))
    assert main(["plan", *flags]) in (0, 3)
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    texts = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert texts[0] == "Plan of 2 workers, prefill:decode"
    assert {"0:2", "1:1"} <= set(texts)
    assert any("seed 0" in one for one in texts)
