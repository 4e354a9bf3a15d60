"""Charts as SVG, read back by an XML parser."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.plot.charts import Rule, Series, line_chart
from pdserve.plot.drawing import Axis, dash, marker, means, thinned

X, Y = Axis(low=0.0, high=10.0, label="x"), Axis(low=0.0, high=1.0, unit="%")


def test_points_are_at_their_coordinates() -> None:
    svg = line_chart([Series(name="a", points=[(0.0, 0.0), (5.0, 0.5), (10.0, 1.0)])], X, Y, title="t").inline
    [line] = ET.fromstring(svg).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[1][0] - points[0][0] == points[2][0] - points[1][0] > 100
    assert points[0][1] - points[1][1] == points[1][1] - points[2][1] > 50


def test_a_stepped_line_is_level_until_the_next_point() -> None:
    svg = line_chart([Series(name="a", points=[(0.0, 0.0), (10.0, 1.0)], is_stepped=True)], X, Y, title="t").inline
    [line] = ET.fromstring(svg).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert points[-2][0] == points[0][0]
    assert points[-2][1] == points[-1][1]


def test_texts_are_escaped_and_points_have_tooltips() -> None:
    evil = "</title><script>&"
    svg = line_chart(
        [Series(name=evil, points=[(5.0, 0.5)], is_marked=True)],
        Axis(low=0.0, high=10.0, label=evil),
        Y,
        title='" onload="' + evil,
        rules=[Rule(at=0.9, label=evil), Rule(at=5.0, label="v", is_vertical=True)],
    ).inline
    root = ET.fromstring(svg)
    assert [one.text for one in root.iter("title")] == ['" onload="' + evil, f"{evil}: 50% at 5"]
    assert "onload" not in root.attrib
    assert "<script" not in svg


def test_points_outside_are_drawn_at_the_edge() -> None:
    svg = line_chart([Series(name="a", points=[(-5.0, 2.0)])], X, Y, title="t", rules=[Rule(at=7.0, label="far")]).body
    assert "far" not in svg
    assert Axis(low=1.0, high=100.0, is_log=True).position(0.0) == 0.0
    assert Axis(low=1.0, high=100.0, is_log=True).position(10.0) == pytest.approx(0.5)
    assert Axis(low=3.0, high=3.0).position(3.0) == 0.0


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low: float, width: float, is_log: bool) -> None:
    axis = Axis(low=low, high=low + width, is_log=is_log)
    ticks = axis.ticks()
    assert len(ticks) <= 8
    assert ticks == sorted(ticks)
    slack = 1e-6 * (low + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_counts_have_whole_ticks() -> None:
    assert Axis(low=0.0, high=2.1, unit="n").ticks() == [0.0, 1.0, 2.0]


def test_long_timelines_become_means() -> None:
    points = [(float(at), float(at % 2)) for at in range(1000)]
    found = means(points, most=100)
    assert len(found) == 100
    assert all(level == 0.5 for _, level in found)
    assert means(points[:5], most=100) == points[:5]
    assert means([]) == []
    assert len(thinned(points, 100)) == 101
    assert thinned(points, 100)[-1] == points[-1]


def test_a_short_logarithmic_axis_has_even_ticks() -> None:
    assert Axis(low=0.018, high=0.033, is_log=True).ticks() == pytest.approx([0.02, 0.025, 0.03])
    assert Axis(low=0.006, high=0.032, is_log=True).ticks() == pytest.approx([0.01, 0.015, 0.02, 0.025])
    assert Axis(low=0.01, high=10.0, is_log=True).ticks() == pytest.approx([0.01, 0.1, 1.0, 10.0])


def test_series_differ_without_colours() -> None:
    looks = {(dash(number), marker(number, 0.0, 0.0).partition("transform")[2]) for number in range(8)}
    assert len(looks) == len({dash(number) for number in range(8)}) == 8
    assert dash(0) != dash(8), "equal colours, other dashes"


def test_a_scatter_plot_has_markers_at_its_points_and_no_line() -> None:
    one = Series(name="a", points=[(0.0, 0.0), (10.0, 1.0)], is_scattered=True)
    root = ET.fromstring(line_chart([one], X, Y, title="t", width=492, height=250, has_diagonal=True).inline)
    assert list(root.iter("polyline")) == []
    [diagonal] = [each for each in root.iter("line") if each.get("class") == "rule"]
    places = [each.attrib["transform"].partition(" scale")[0] for each in root.iter("path")]
    ends = [f"translate({diagonal.attrib[x]} {diagonal.attrib[y]})" for x, y in (("x1", "y1"), ("x2", "y2"))]
    assert places == ends == ["translate(70 210)", "translate(470 10)"]
