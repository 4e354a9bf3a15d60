"""Table, page and fields of a benchmark."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from pdserve.core.json_text import to_json
from pdserve.plot.drawing import figure_svg
from simulator.bench.load import LoadLevel
from simulator.bench.report import bench_figure, bench_page, focus_level, render_bench, vllm_fields
from simulator.bench.server import BenchAnswer, BenchOutcome
from simulator.bench.statistics import BenchResult, LevelResult, summarise_bench
from tests.unit.bench.given import SLO, answer, result, turn
from tests.unit.simulator.test_report import read

#: Fields of the result of `vllm bench serve`, without those per request and those of speculative decoding.
VLLM: tuple[str, ...] = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "std", "p99")),
)


def test_fields_have_vllms_names() -> None:
    found = vllm_fields(summarise_bench([turn(answer(chunks_s=[0.1, 0.3, 0.4]), lasted_s=2.0)], SLO))
    assert set(VLLM) <= set(found)
    assert found["mean_ttft_ms"] == pytest.approx(100.0)
    assert found["mean_tpot_ms"] == pytest.approx(150.0)
    assert found["mean_itl_ms"] == pytest.approx(150.0)
    assert found["p99_itl_ms"] == pytest.approx(199.0)
    assert found["mean_e2el_ms"] == pytest.approx(400.0)
    assert (found["request_throughput"], found["output_throughput"], found["request_goodput"]) == (0.5, 1.5, 0.0)


def test_fields_are_json_without_completed_requests() -> None:
    found = json.loads(to_json(vllm_fields(summarise_bench([turn(answer())], None))))
    assert found["mean_ttft_ms"] is None
    assert found["request_goodput"] is None


def test_the_table_names_errors_and_ratios() -> None:
    text = render_bench(result())
    assert "1/s, one: 2 failed with HTTP 500: <b>out of order</b>" in text
    assert "TTFT, median        0.50 (0.50 to 0.50)" in text
    assert "targets: TTFT within 1 s, TPOT within 100 ms" in text


def test_a_rejection_is_explained() -> None:
    late = "the requests ahead leave no time for its prefill of 0.368 s, the target is 2.000 s"
    turns = [turn(answer(outcome=BenchOutcome.REJECTED, detail=late), answer(chunks_s=[0.1, 0.2]))]
    level = LevelResult(level=LoadLevel(rate_rps=1.0), server="one", turns=turns)
    text = render_bench(BenchResult(servers=[], slo=None, levels=[level]))
    assert f"1/s, one: 1 rejected, for example: {late}" in text


@pytest.mark.parametrize("has_shared_prefixes", [False, True])
def test_cached_prompts_are_reported(*, has_shared_prefixes: bool) -> None:
    cached = turn(answer(chunks_s=[0.1, 0.2], cached_tokens=9))
    level = LevelResult(level=LoadLevel(rate_rps=1.0), server="one", turns=[cached])
    text = render_bench(BenchResult(servers=[], slo=None, levels=[level], has_shared_prefixes=has_shared_prefixes))
    assert "1/s, one: 90% of the prompt tokens were in a prefix cache" in text
    assert ("--seed" in text) is not has_shared_prefixes
    assert "prefix cache" not in render_bench(result())


@pytest.mark.parametrize("servers", [("one",), ("one", "<two>")])
@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0, 4.0)])
@pytest.mark.parametrize("slo", [None, SLO])
def test_the_page_is_whole_html_without_network(
    servers: tuple[str, ...], rates: tuple[float, ...], slo: object
) -> None:
    page = bench_page(result(servers=servers, rates=rates, slo=slo), command="pdserve bench <x>", caption=["<today>"])  # type: ignore[arg-type]
    found = read(page)
    assert not re.search(r"https?://(?!one|two|&lt;two)", page.replace("http://www.w3.org/2000/svg", ""))
    assert "script" not in found.tags
    assert "link" not in found.tags
    assert "<two>" not in page
    assert "<b>out of order" not in page
    assert any(one.startswith("Comparison at") for one in found.texts) is (len(servers) > 1)
    assert ("By load" in found.texts) is (len(rates) > 1)
    assert any("1/s, one: 2 failed with HTTP 500" in one for one in found.texts), "the text of the terminal"
    assert "<today>" in found.texts
    assert "prefers-color-scheme: dark" in page


def test_a_page_without_results_is_whole() -> None:
    read(bench_page(BenchResult(servers=[], slo=None, is_interrupted=True), command="x", caption=["y"]))


def test_the_page_shows_the_highest_load_within_the_targets() -> None:
    found = result(rates=(1.0, 2.0))
    assert focus_level(found) == found.shown_levels[-1]  # one of three fails, so none is good: the last


def placed(number: int, actual_s: float, predicted_s: float | None) -> BenchAnswer:
    return answer(
        number,
        sent_s=0.1 * number,
        chunks_s=[actual_s, actual_s + 0.1, actual_s + 0.2],
        server_ttft_s=actual_s,
        server_tpot_s=0.1,
        prefill_worker="p0",
        decode_worker="d<0>",
        predicted_ttft_s=predicted_s,
    )


def test_a_router_s_predictions_and_workers_are_shown() -> None:
    found = result(servers=("one",), rates=(1.0,))
    found.levels[0].turns[0] = turn(*(placed(number, 0.2, 0.3 if number else None) for number in range(5)))
    panels = {one.title: one for one in bench_figure(found, caption=["c"]).panels}
    [predicted] = panels["Predicted against actual at 1/s"].drawings
    assert ET.fromstring(predicted.inline).findall(".//path").__len__() == 4
    assert "one TTFT 50.0%" in panels["Predicted against actual at 1/s"].note
    [workers] = panels["Requests on the workers: one at 1/s, first turn"].drawings
    root = ET.fromstring(workers.inline)
    assert {"p0", "d<0>"} <= {one.text for one in root.iter("text")}
    assert len(list(root.iter("rect"))) == 10


def test_an_answer_without_tokens_is_not_on_the_page_of_workers() -> None:
    """A router names the workers also of an answer that turned out empty, which is a failure."""
    found = result(servers=("one",), rates=(1.0,))
    found.levels[0].turns[0] = turn(*(placed(number, 0.2, 0.3) for number in range(3)), answer(3, decode_worker="d<0>"))
    panels = {one.title: one for one in bench_figure(found, caption=["c"]).panels}
    [workers] = panels["Requests on the workers: one at 1/s, first turn"].drawings
    assert len(list(ET.fromstring(workers.inline).iter("rect"))) == 6


def test_the_svg_of_a_benchmark_is_xml_that_names_the_targets() -> None:
    figure = bench_figure(result(servers=("one", "<two>")), caption=["pdserve bench, seed 3"])
    root = ET.fromstring(figure_svg(figure))
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "pdserve bench, seed 3" in texts
    assert "Targets: TTFT within 1 s, TPOT within 100 ms." in texts
    assert "<two>" in texts
    assert any(one.startswith("Comparison at") for one in texts)
