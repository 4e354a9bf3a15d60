"""Bars over time, shares over time and named bars, read back by an XML parser."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.plot.charts import (
    Bar,
    BarKind,
    GanttRow,
    NamedBar,
    ShareKind,
    ShareRow,
    assign_lanes,
    bar_chart,
    bar_legend,
    gantt,
    gantt_legend,
    share_legend,
    share_rows,
)
from pdserve.plot.drawing import Axis

FULL, THIN = BarKind(name="full", colour=0), BarKind(name="thin", colour=1, height=0.5)
HOLLOW = BarKind(name="hollow", colour=2, is_hollow=True)
X = Axis(low=0.0, high=10.0, label="seconds")


def test_bars_are_at_their_times_and_lanes() -> None:
    rows = [
        GanttRow(name="p<0>", bars=[Bar(begin=0.0, end=5.0, kind=FULL, about="<a>")]),
        GanttRow(name="d0", bars=[Bar(begin=5.0, end=10.0, kind=FULL), Bar(begin=5.0, end=7.5, kind=THIN, lane=1)]),
    ]
    root = ET.fromstring(gantt(rows, X, title="t", width=510).inline)
    places = [[float(one.attrib[name]) for name in ("x", "y", "width", "height")] for one in root.iter("rect")]
    assert places == [[96, 6, 200, 8], [296, 23, 200, 8], [296, 34, 100, 4]]
    assert [one.text for one in root.iter("title")] == ["t", "<a>"]
    names = [(one.text, float(one.attrib["y"])) for one in root.iter("text") if one.get("text-anchor") == "end"]
    assert names == [("p<0>", 14.5), ("d0", 36)]


def test_kinds_of_bars_differ_without_colours() -> None:
    swatches = [ET.fromstring(drawn) for _, drawn in gantt_legend([FULL, THIN, HOLLOW])]
    assert len({(one.get("height"), one.get("fill") == "none") for one in swatches}) == 3


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=30), st.integers(1, 6))
def test_spans_of_a_lane_do_not_overlap(given: list[tuple[int, int]], most: int) -> None:
    spans = sorted((float(begin), float(begin + length)) for begin, length in given)
    lanes = assign_lanes(spans, most)
    for number, (begin, _) in enumerate(spans):
        running = [lane for (_, end), lane in zip(spans[:number], lanes[:number], strict=True) if end > begin]
        if lanes[number] is None:
            assert len({lane for lane in running if lane is not None}) == most
        else:
            assert lanes[number] not in running
            assert lanes[number] < most


def test_shares_are_stacked_and_equal_neighbours_joined() -> None:
    kinds = [ShareKind(name="low", colour=0, opacity=1.0), ShareKind(name="high", colour=1, opacity=0.5)]
    row = ShareRow(name="w", width=2.5, shares=[[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.0, 1.0]])
    drawing = share_rows([row], kinds, X, title="t", width=510)
    low, high = ET.fromstring(drawing.inline).iter("polygon")
    points = [tuple(map(float, point.split(","))) for point in low.attrib["points"].split()]
    assert points[:4] == [(96, 21), (296, 21), (296, 36), (496, 36)]
    upper = [tuple(map(float, point.split(","))) for point in high.attrib["points"].split()]
    assert upper[:2] == [(96, 6), (196, 6)]
    assert upper[6:8] == [(396, 6), (496, 6)]
    assert len({ET.fromstring(drawn).get("fill-opacity") for _, drawn in share_legend(kinds)}) == 2


def test_a_bound_is_hollow_and_tried_rates_are_marked() -> None:
    bars = [
        NamedBar(name="1:1", value=5.0, text="5", held=[2.5, 5.0], missed=[6.0]),
        NamedBar(name="<2>", value=4.0, text="< 4", is_bound=True),
    ]
    root = ET.fromstring(bar_chart(bars, X, title="t", width=500).inline)
    first, second = root.iter("rect")
    left, length = float(first.attrib["x"]), float(first.attrib["width"])
    assert float(second.attrib["width"]) == pytest.approx(0.8 * length, abs=0.1)
    assert (first.get("fill"), second.get("fill")) == ("var(--s0)", "none")
    marks = [float(one.attrib["cx"]) for one in root.iter("circle")]
    assert marks == pytest.approx([left + length / 2, left + length], abs=0.1)
    assert len(list(root.iter("path"))) == 1
    ends = [one for one in root.iter("text") if one.get("class") == "note"]
    assert [one.text for one in ends] == ["5", "< 4"]
    assert float(ends[0].attrib["x"]) > left + 1.2 * length, "beside the last mark"
    assert len({drawn for _, drawn in bar_legend([("a", 0), ("b", 1)])}) == 5
