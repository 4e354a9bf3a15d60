"""Figures as SVG files and as pages, read back by parsers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from pdserve.plot.charts import Series, line_chart
from pdserve.plot.drawing import CONTENT, HALF, Axis, Drawing, Figure, Panel, figure_page, figure_svg, line_legend, safe
from tests.unit.simulator.test_report import read

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('x')</script>\"&\x00"


def chart(width: int = HALF) -> Drawing:
    axis = Axis(low=0.0, high=1.0)
    return line_chart([Series(name="a", points=[(0.0, 0.0), (1.0, 1.0)])], axis, axis, title="chart", width=width)


def figure(*panels: Panel) -> Figure:
    return Figure(title="title", caption=["machine, commit and seed"], panels=panels)


def test_charts_are_side_by_side_below_the_texts() -> None:
    panel = Panel(title="p", drawings=[chart(), chart(), chart(CONTENT)], note="n", legend=line_legend({"a": 0}))
    root = ET.fromstring(figure_svg(figure(panel)))
    drawn = [one for one in root.findall(f"{SVG}svg") if one.get("role") == "img"]
    (left, first_y), (right, second_y), (below, third_y) = (
        (float(one.attrib["x"]), float(one.attrib["y"])) for one in drawn
    )
    assert right == left + HALF + 16
    assert first_y == second_y
    assert below == left
    assert third_y == first_y + 280 + 8
    texts = [float(one.attrib["y"]) for one in root.findall(f"{SVG}text")]
    assert max(texts) < first_y, "title, caption, heading, note and legend are above the charts"
    [card] = [one for one in root.findall(f"{SVG}rect") if one.get("class") == "card"]
    assert float(card.attrib["y"]) + float(card.attrib["height"]) >= third_y + 280
    assert float(root.attrib["height"]) > float(card.attrib["y"]) + float(card.attrib["height"])


def test_a_file_has_an_accessible_title_and_both_themes() -> None:
    text = figure_svg(figure(Panel(title="p", drawings=[chart()])))
    root = ET.fromstring(text)
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == "title"
    assert root[1].text == "machine, commit and seed"
    assert [one.text for one in root.iter(f"{SVG}title")] == ["title", "chart"]
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|url\(|@import|<script", text)


def test_names_are_escaped_everywhere() -> None:
    drawing = Drawing(width=10, height=10, title=EVIL, body="")
    panel = Panel(title=EVIL, drawings=[drawing], note=EVIL, legend=line_legend({EVIL: 0}))
    hostile = Figure(title=EVIL, caption=[EVIL], panels=[panel])
    shown = EVIL.replace("\x00", "\ufffd")
    root = ET.fromstring(figure_svg(hostile))
    assert [one.text for one in root.iter(f"{SVG}text")] == [shown] * 5
    assert {one.text for one in root.iter(f"{SVG}title")} == {shown}
    page = read(figure_page(hostile))
    assert "script" not in page.tags
    assert "".join(page.texts).count(shown) >= 5
    assert safe("\ud800a\x1f") == "\ufffda\ufffd"


def test_a_folded_panel_is_only_on_the_page() -> None:
    shown = figure(Panel(title="open", drawings=[chart()]), Panel(title="folded", drawings=[chart()], is_folded=True))
    assert "folded" not in figure_svg(shown)
    assert "<summary>folded</summary>" in figure_page(shown)


def test_long_texts_and_legends_wrap() -> None:
    names = {f"a name of some length, number {number}": number for number in range(12)}
    panel = Panel(title="p", drawings=[chart()], note="word " * 100, legend=line_legend(names))
    root = ET.fromstring(figure_svg(figure(panel)))
    assert all(len(one.text or "") < 160 for one in root.iter(f"{SVG}text"))
    keys = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in root.findall(f"{SVG}svg")[:12]]
    assert len(set(keys)) == 12
    assert len({y for _, y in keys}) > 1
    assert max(x for x, _ in keys) < CONTENT
