"""Frontiers, shares of steps, and the panels of simulated runs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.types import Path, Slo
from pdserve.plot.drawing import figure_svg
from pdserve.profiles import load_profile
from simulator.cluster.tally import DECODE, FIRST_WIDTH_S, MIXED, MOST, PREFILL, StepShares
from simulator.cluster.world import simulate
from simulator.metrics import summarise
from simulator.model import RequestRow, SimConfig
from simulator.report.comparison import PolicyRun
from simulator.report.figures import MAX_REQUESTS, figure, panels, requests_gantt, window
from simulator.report.time_charts import (
    MAX_LAYOUTS,
    PlannedLayout,
    TimedRequests,
    frontier,
    frontier_panel,
    plan_figure,
    prediction_panel,
    staircase,
)
from simulator.search.goodput import HighestRate, Probe
from simulator.search.layouts import make_workers
from simulator.traces.reshaped import Reshaped, first, rate_scaled
from simulator.traces.workloads import chat
from tests.unit.simulator.test_report import SLO, run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def simulated() -> PolicyRun:
    workers = make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 1, 1)
    trace = Reshaped(chat(seed=1), first(120), rate_scaled(1.5))
    result = simulate(trace, SimConfig(workers=workers, slo=Slo(ttft_s=1.0, tpot_s=0.02)))
    return PolicyRun(policy="goodput", rate_scale=1.5, result=result, summary=summarise(result))


def test_a_frontier_has_the_tightest_pairs() -> None:
    times = [(1.0, 0.3), (2.0, 0.1), (3.0, 0.2), (9.0, 0.9)]
    assert frontier(times, 4, 0.5) == [(2.0, 0.3), (3.0, 0.2)]
    assert frontier(times, 4, 1.0) == [(9.0, 0.9)]
    assert frontier(times, 8, 0.9) == [], "half of the requests were not answered"
    assert staircase([(2.0, 0.3), (3.0, 0.2)], 10.0, 1.0) == [
        (2.0, 1.0),
        (2.0, 1.0),
        (2.0, 0.3),
        (3.0, 0.3),
        (3.0, 0.2),
        (10.0, 0.2),
    ]


TIMES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=20)


@given(TIMES, st.integers(0, 4), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_pair_is_on_or_above_the_frontier_exactly_if_it_is_attained(
    given: list[tuple[int, int]], num_lost: int, share: float
) -> None:
    times = [(float(ttft), float(tpot)) for ttft, tpot in given]
    total = len(times) + num_lost
    corners = frontier(times, total, share)
    for x in range(10):
        for y in range(10):
            met = sum(ttft <= x and tpot <= y for ttft, tpot in times)
            is_attained = met >= max(1, math.ceil(share * total - 1e-9))
            assert is_attained is any(ttft <= x and tpot <= y for ttft, tpot in corners)


def test_a_frontier_s_corner_lies_at_its_targets() -> None:
    group = TimedRequests(name="a", colour=0, total=1, times=[(0.1, 0.01)])
    panel = frontier_panel(
        [group, TimedRequests(name="b", colour=1, total=9, times=[])], Slo(ttft_s=0.1, tpot_s=0.01), "w"
    )
    assert panel is not None
    root = ET.fromstring(panel.drawings[0].inline)
    [line] = root.iter("polyline")
    corner = line.attrib["points"].split()[2].split(",")
    rules = [one for one in root.iter("line") if one.get("class") == "rule"]
    assert [rules[1].get("x1"), rules[0].get("y1")] == corner, "the targets are the corner"
    assert "No line: b" in panel.note


def test_predictions_without_a_prediction_have_no_panel() -> None:
    group = TimedRequests(name="a", colour=0, total=1, times=[(0.1, 0.01)])
    assert prediction_panel([group], "w") is None
    assert frontier_panel([TimedRequests(name="a", colour=0, total=3, times=[])], None, "w") is None


def test_time_is_shared_among_kinds_of_steps() -> None:
    shares = StepShares()
    width_s = shares.width_s
    shares.add(0.0, 0.5 * width_s, prefills=True, decodes=False)
    shares.add(0.5 * width_s, 1.5 * width_s, prefills=True, decodes=True)
    shares.add(1.5 * width_s, 2.0 * width_s, prefills=False, decodes=True)
    by_kind = [one[:2] for one in shares.shares]
    assert by_kind[PREFILL] == pytest.approx([0.5, 0.0])
    assert by_kind[MIXED] == pytest.approx([0.5, 0.5])
    assert by_kind[DECODE] == pytest.approx([0.0, 0.5])


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.001, 5.0), st.booleans()), max_size=40))
def test_shares_are_bounded_and_lose_no_time(given: list[tuple[float, float, bool]]) -> None:
    shares, now_s, busy_s = StepShares(), 0.0, 0.0
    for idle_s, step_s, prefills in given:
        shares.add(now_s + idle_s, now_s + idle_s + step_s, prefills=prefills, decodes=not prefills)
        now_s, busy_s = now_s + idle_s + step_s, busy_s + step_s
    assert all(len(one) <= MOST for one in shares.shares)
    assert sum(map(sum, shares.shares)) * shares.width_s == pytest.approx(busy_s)
    assert shares.width_s <= max(FIRST_WIDTH_S, 2.0 * now_s / MOST)


def test_shares_of_a_run_add_up_to_its_busy_time(simulated: PolicyRun) -> None:
    for worker in simulated.result.workers:
        assert sum(map(sum, worker.shares)) * worker.shares_width_s == pytest.approx(worker.busy_s, rel=1e-6)
    prefill, decode = simulated.result.workers
    assert not any(prefill.shares[DECODE])
    assert any(decode.shares[DECODE])


def test_a_run_has_all_panels_and_a_bounded_size(simulated: PolicyRun) -> None:
    titles = [one.title.partition(":")[0].partition(" at ")[0] for one in panels([simulated])]
    expected = [
        "Times",
        "Attainment frontier",
        "Predicted against actual",
        "Workers over time",
        "Requests on the workers",
    ]
    assert titles == expected
    shown = figure([simulated, simulated], cluster="<h100>", origin=["commit abc"])
    text = figure_svg(shown)
    texts = [one.text for one in ET.fromstring(text).iter(f"{SVG}text")]
    assert "commit abc" in texts
    assert any("seed 0" in (one or "") for one in texts)
    assert len(text) < 200_000


def test_many_requests_do_not_enlarge_the_figure() -> None:
    sizes = [len(figure_svg(figure([run(met=of // 2, of=of)], cluster="c", origin=[]))) for of in (1_000, 20_000)]
    assert sizes[1] < 1.2 * sizes[0] < 300_000


def row(number: int, arrival_s: float, **values: object) -> RequestRow:
    given: dict[str, object] = {"outcome": "served", "ttft_s": 1.0, "tpot_s": 0.01, "ended_s": arrival_s + 3.0}
    given |= {"path": Path.REMOTE, "prefill_worker": "p0", "decode_worker": "d0", "queue_s": 0.5, **values}
    return RequestRow(number=number, arrival_s=arrival_s, prompt_tokens=9, output_tokens=9, slo=SLO, **given)  # type: ignore[arg-type]


def test_a_request_is_shown_on_each_worker_that_served_it() -> None:
    rows = [row(0, 0.0, transfer_exposed_s=0.5), row(1, 1.0, outcome="rejected", ttft_s=None, ended_s=3.0)]
    root = ET.fromstring(requests_gantt(rows, ["p0", "d0", "d1"], title="t").inline)
    per_s = (976 - 14 - 96) / 3.0
    bars = [(float(one.attrib["x"]) - 96, float(one.attrib["width"])) for one in root.iter("rect")]
    spans = ((0.0, 0.5), (1.0, 2.0), (0.5, 0.5), (1.0, 0.5), (1.5, 1.5))  # wait, lost; prefill; transfer, decode.
    expected = [(begin * per_s, length * per_s) for begin, length in spans]
    assert bars == [pytest.approx(one, abs=0.1) for one in expected]
    names = [one.text for one in root.iter("text") if one.get("text-anchor") == "end"]
    assert names == ["router", "p0", "d0"]


def test_the_timeline_is_around_the_first_miss() -> None:
    rows = [row(number, float(number), outcome="late" if number == 500 else "served") for number in range(1000)]
    shown = window(rows)
    assert len(shown) == MAX_REQUESTS
    assert shown[MAX_REQUESTS // 2].number == 500
    assert window(rows[:10]) == rows[:10]
    assert window([]) == []


def held(rate_rps: float, *, is_bound: bool = False) -> HighestRate:
    yes = Probe(scale=rate_rps, rate_rps=rate_rps, num_rows=2, times_s=[(0.5, 0.01), (0.6, 0.01)])
    no = Probe(scale=2 * rate_rps, rate_rps=1.1 * rate_rps, num_rows=2, is_whole=False)
    if is_bound:
        return HighestRate(scale=0.0, rate_rps=0.0, held=None, missed=no, probes=(no,), is_bound=True)
    return HighestRate(scale=rate_rps, rate_rps=rate_rps, held=yes, missed=no, probes=(yes, no))


def test_a_plan_shows_goodput_bounds_and_the_frontier_of_the_best() -> None:
    layouts = [
        PlannedLayout(name="0:2", found=held(10.0), is_colocated=True),
        PlannedLayout(name="1:<1>", found=held(20.0), is_colocated=False),
        PlannedLayout(name="2:0", found=held(5.0, is_bound=True), is_colocated=False),
    ]
    shown = plan_figure(layouts, SLO, title="Plan", caption=["seed 0"])
    rates, times = shown.panels
    root = ET.fromstring(rates.drawings[0].inline)
    widths = [float(one.attrib["width"]) for one in root.iter("rect")]
    assert widths[0] == pytest.approx(widths[1] / 2, abs=0.1)
    assert widths[2] == pytest.approx(widths[1] * 5.5 / 20.0, abs=0.1)
    assert [one.text for one in root.iter("text") if one.get("class") == "note"] == ["10", "20", "< 5.5"]
    assert [name for name, _ in times.legend] == ["1:<1> at 20 requests/s", "0:2 at 10 requests/s"]
    ET.fromstring(figure_svg(shown))


def test_a_plan_of_many_layouts_shows_the_best() -> None:
    layouts = [PlannedLayout(name=str(one), found=held(1.0 + one), is_colocated=False) for one in range(200)]
    rates = plan_figure(layouts, SLO, title="Plan", caption=[]).panels[0]
    assert len(list(ET.fromstring(rates.drawings[0].inline).iter("rect"))) == MAX_LAYOUTS
    assert "The best 60 of 200" in rates.note
