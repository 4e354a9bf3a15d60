"""The page, the tables and the plain data of runs."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from pdserve.core.cost.latency import CostPrior
from pdserve.core.types import Path, Role, Slo
from router.state.interface import RouterSettings
from simulator.metrics import summarise
from simulator.model import RequestRow, Sample, SimConfig, SimResult, WorkerRow, WorkerShape
from simulator.report.comparison import PolicyRun, as_json, highest_sustained, render, rows_of, seconds
from simulator.report.figures import focused, page
from simulator.search.bound import Bound

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
VOID = {"meta", "line", "polyline", "polygon"}


class Checked(HTMLParser):
    """Collects the text, and fails on a closing tag without an open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return parser


def run(policy: str = "goodput", scale: float = 1.0, met: int = 9, of: int = 10, **values: Any) -> PolicyRun:
    worker = values.pop("worker", "d0")
    rows = [
        RequestRow(
            number=number,
            arrival_s=number / scale,
            prompt_tokens=10,
            output_tokens=5,
            slo=SLO,
            outcome="served" if number < met else "rejected",
            ttft_s=0.1 * (number + 1) if number < met else None,
            tpot_s=0.01 if number < met else None,
            ended_s=number / scale + 1.0,
            tokens=5 if number < met else 0,
            path=Path.REMOTE if number < met else None,
            decode_worker=worker,
        )
        for number in range(of)
    ]
    config = SimConfig(
        workers=(
            WorkerShape(worker_id="p0", role=Role.PREFILL, cost=CostPrior()),
            WorkerShape(worker_id="d0", role=Role.DECODE, cost=CostPrior()),
        ),
        slo=SLO,
        router=RouterSettings(policy=policy),
    )
    result = SimResult(
        trace=values.pop("trace", "a trace"),
        config=config,
        requests=rows,
        workers=[WorkerRow(worker_id="d0", role=Role.DECODE, busy_s=1.0)],
        samples=[
            Sample(at_s=at / 10, queued=at % 3, running=2, busy_prefills=1, busy_decodes=1, rows=2, kv_share=0.5)
            for at in range(50)
        ],
        span_s=max(of - 1, 0) / scale,
        wall_s=123.0,
    )
    return PolicyRun(policy=policy, rate_scale=scale, result=result, summary=summarise(result))


def test_a_page_is_one_file_that_needs_no_network_and_no_script() -> None:
    text = page([run(scale=scale) for scale in (0.5, 1.0)], cluster="h100")
    assert read(text).tags.isdisjoint({"script", "link", "img", "iframe"})
    assert not re.search(r"https?:|url\(|@import|src=", text)
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 300_000


def test_a_page_shows_rates_times_timelines_and_the_worst() -> None:
    text = page([run(policy, scale) for policy in ("goodput", "colocated") for scale in (0.5, 1.0)], cluster="h100")
    titles = re.findall(r'aria-label="(.*?)"', text)
    assert titles[:2] == ["goodput by rate of arrival", "share of requests that met both targets, by rate of arrival"]
    assert [title for title in titles if "first token" in title] == ["share of all requests by time to first token"]
    assert titles.count("queued requests over time") == 2
    assert "rejected 1 s after its arrival" in "".join(read(text).texts)
    alone = page([run()], cluster="h100")
    assert "by rate of arrival" not in alone
    assert "90.0%" in alone


def test_every_name_is_escaped() -> None:
    evil = "<script>alert('x')</script>\"&"
    text = page([run(evil, trace=evil, worker=evil, met=5), run("b", 2.0, trace=evil)], cluster=evil)
    seen = read(text)
    assert "script" not in seen.tags
    assert "".join(seen.texts).count(evil) >= 5


@pytest.mark.parametrize(("met", "of"), [(0, 5), (0, 0), (1, 1), (5, 5)])
def test_runs_with_little_in_them_can_be_shown(met: int, of: int) -> None:
    one = run(met=met, of=of)
    read(page([one], cluster="h100"))
    read(page([one, run(scale=2.0, met=met, of=of)], cluster="h100"))
    assert render([one], "h100")
    assert json.dumps(as_json(one), allow_nan=False)


def test_a_run_without_samples_has_no_timelines() -> None:
    one = run()
    one.result.samples.clear()
    assert "Over time" not in page([one], cluster="h100")


def test_the_page_details_the_lowest_missed_rate() -> None:
    runs = [run(policy, scale, met) for scale, met in ((1.0, 9), (2.0, 8), (3.0, 2)) for policy in ("a", "b")]
    assert [(one.policy, one.rate_scale) for one in focused(runs)] == [("a", 2.0), ("b", 2.0)]
    assert [one.rate_scale for one in focused([run(scale=1.0), run(scale=2.0)])] == [2.0]


HELD = (("a", 1.0, 900), ("a", 2.0, 500), ("a", 3.0, 900), ("b", 1.0, 200))  # Long enough for a verdict.


def test_the_highest_met_rate_has_no_missed_rate_below() -> None:
    runs = [run(policy, scale, met, of=1000) for policy, scale, met in HELD]
    assert highest_sustained(runs) == {"a": runs[0].summary.rate_rps, "b": 0.0}


def test_a_short_run_above_a_sustained_rate_keeps_its_verdict() -> None:
    runs = [run(scale=1.0, met=1000, of=1000), run(scale=900.0, met=1000, of=1000)]
    assert [one.shortage is None for one in runs] == [True, False]
    assert highest_sustained(runs) == {"goodput": runs[0].summary.rate_rps}
    assert f"  goodput: at least {runs[0].summary.rate_rps:.3g} requests/s" in render(runs, "h100").splitlines()
    assert f"goodput at least {runs[0].summary.rate_rps:.3g} requests/s" in page(runs, cluster="h100")


def test_only_a_run_too_short_gives_no_verdict() -> None:
    runs = [run(scale=scale, met=1000, of=1000) for scale in (900.0, 1000.0)]
    assert highest_sustained(runs) == {"goodput": None}
    assert "  goodput: no verdict" in render(runs, "h100")


@pytest.mark.parametrize(
    ("split", "whole", "said"),
    [
        (900, 900, "does not pay at these rates: with it, goodput sustains 2 requests/s, without it 2 requests/s"),
        (900, 500, "pays at these rates: with it, goodput sustains 2 requests/s, without it 1 requests/s"),
        (500, 900, "does not pay at these rates: with it, goodput sustains 1 requests/s, without it 2 requests/s"),
    ],
)
def test_the_same_policy_with_and_without_prefill_workers(split: int, whole: int, said: str) -> None:
    runs = [run(scale=1.0, met=1000, of=1000), run(scale=2.0, met=split, of=1000)]
    runs += [replace(run(scale=scale, met=met, of=1000), is_whole=True) for scale, met in ((1.0, 1000), (2.0, whole))]
    assert f"disaggregation {said}; `pdserve plan` compares all splits" in render(runs, "h100").splitlines()
    text = page(runs, cluster="h100")
    assert f"disaggregation {said}; " in text
    assert "OF BOUND   the ones that met both targets, as a share of BOUND" in text


def test_the_json_object_has_documented_names() -> None:
    found = as_json(run(met=7))
    assert (found["policy"], found["seed"], found["requests"], found["refused"]) == ("goodput", 0, 10, 3)
    assert (found["prefill"], found["decode"]) == (1, 1)
    assert found["attainment"] == 0.7
    assert found["goodput_rps"] == pytest.approx(7 / 9)
    assert set(found["ttft_s"]) == {"of", "mean", "p50", "p90", "p95", "p99"}
    assert found["paths"] == {"remote": {"requests": 7, "met": 7}}
    assert "123" not in json.dumps(found)


def test_rows_are_flat_and_have_reasons() -> None:
    rows = list(rows_of([run(met=9), run("colocated", 2.0, met=9)]))
    assert len(rows) == 20
    assert rows[0] | {"policy": "goodput", "path": "remote", "slo_ttft_s": 1.0, "why": "met both targets"} == rows[0]
    assert rows[19] | {"policy": "colocated", "rate_scale": 2.0, "path": "", "outcome": "rejected"} == rows[19]
    json.dumps(rows)


def test_the_table_has_a_line_for_each_run() -> None:
    text = render([run(), run("colocated", met=2)], "h100")
    assert text.startswith(
        "a trace: 10 requests, h100, seed 0\ntargets: first token within 1 s, then 100 ms per token\n"
    )
    assert [line.split()[:4] for line in text.splitlines()[3:6]] == [
        ["POLICY", "P:D", "REQ/S", "ATTAINED"],
        ["goodput", "1:1", "1.11", "90.0%"],
        ["colocated", "1:1", "1.11", "20.0%"],
    ]
    assert "missed    1 rejected" in render([run()], "h100")
    assert "-" in text.splitlines()[4].split(), "a run without a bound has none to show"
    long = [run(met=900, of=1000), run(scale=2.0, met=100, of=1000)]
    assert "  goodput: 1 requests/s" in render(long, "h100")


def test_each_result_shows_the_bound() -> None:
    bound = Bound(requests=10, alone=10, deadlines=9, periods=8)
    one = replace(run(met=6), bound=bound)
    text = render([one, run("colocated", met=2)], "h100")
    assert text.splitlines()[4].split()[3:6] == ["60.0%", "80.0%", "75.0%"]
    assert "no scheduler serves more than 8 of them in time (periods); 6 were, 75.0% of that" in render([one], "h100")
    assert as_json(one)["bound"] == {"requests": 8, "limit": "periods", "share": 0.75}
    assert "bound" not in as_json(run())


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 ms"), (0.00123, "1.23 ms"), (0.9999, "1 s"), (12.34, "12.3 s"), (1234.5, "1234 s")],
)
def test_times_have_readable_units(value: float | None, text: str) -> None:
    assert seconds(value) == text
