"""Metrics over rows, compared with values computed by hand or by counting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost.latency import CostPrior
from pdserve.core.results import nearest_rank
from pdserve.core.types import Path, Role, Slo
from simulator.metrics import Percentiles, miss, percentiles, summarise, tokens_in_time
from simulator.model import RequestRow, SimConfig, SimResult, WorkerRow, WorkerShape
from simulator.report.comparison import why, worst

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def row(number: int = 0, outcome: str = "served", **values: Any) -> RequestRow:
    held: dict[str, Any] = {"arrival_s": float(number), "prompt_tokens": 100, "output_tokens": 11, "slo": SLO}
    if outcome in ("served", "late"):
        held |= {"ttft_s": 0.5, "tpot_s": 0.05, "tokens": 11, "ended_s": number + 1.0, "path": Path.REMOTE}
    return RequestRow(number=number, outcome=outcome, **(held | values))


def result(*rows: RequestRow, workers: tuple[WorkerRow, ...] = ()) -> SimResult:
    shapes = tuple(
        WorkerShape(worker_id=name, role=role, cost=CostPrior(), kv_capacity_tokens=1000)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    )
    span_s = rows[-1].arrival_s - rows[0].arrival_s if rows else 0.0
    return SimResult(
        trace="t",
        config=SimConfig(workers=shapes, slo=SLO),
        requests=list(rows),
        workers=list(workers),
        samples=[],
        span_s=span_s,
    )


MIXED = (
    row(0),
    row(1, path=Path.LOCAL),
    row(2, "late", ttft_s=1.5),
    row(3, "late", tpot_s=0.2, path=Path.LOCAL),
    row(4, "late", ttft_s=1.5, tpot_s=0.2),
    row(5, "rejected", ended_s=5.01, retry_after_s=2.0),
    row(6, "cancelled", ttft_s=0.1, tpot_s=0.01, tokens=4, ended_s=6.5),
    row(7, "failed"),
    row(10, "unfinished"),
)


def test_only_complete_answers_in_time_count() -> None:
    summary = summarise(result(*MIXED))
    assert (summary.requests, summary.met) == (9, 2)
    assert summary.attainment == pytest.approx(2 / 9)
    assert (summary.rate_rps, summary.goodput_rps) == (0.9, 0.2)
    assert summary.outcomes == {"late": 3, "served": 2, "cancelled": 1, "failed": 1, "rejected": 1, "unfinished": 1}
    assert summary.misses == {
        "both late": 1,
        "cancelled": 1,
        "failed": 1,
        "late first token": 1,
        "late tokens": 1,
        "rejected": 1,
        "unfinished": 1,
    }
    assert sum(summary.misses.values()) == summary.requests - summary.met
    assert summary.paths == {"local": (2, 1), "remote": (3, 1)}
    assert summary.rejection_s.of == 1
    assert summary.rejection_s.p50 == pytest.approx(0.01)
    assert summary.ttft_s.of == 6
    assert summary.ttft_attainment == pytest.approx(4 / 9)
    assert summary.tpot_attainment == pytest.approx(4 / 9)


def test_an_empty_run_divides_by_nothing() -> None:
    summary = summarise(result())
    assert (summary.attainment, summary.rate_rps, summary.goodput_rps, summary.lasted_s) == (0.0, 0.0, 0.0, 0.0)
    assert summary.ttft_s == Percentiles(of=0)


def test_a_burst_is_measured_by_its_duration() -> None:
    assert summarise(result(row(0), row(0, ended_s=4.0))).rate_rps == 0.5


def test_utilization_is_relative_to_the_last_end() -> None:
    workers = (
        WorkerRow(worker_id="p0", role=Role.PREFILL, busy_s=1.0, prefill_tokens=70),
        WorkerRow(
            worker_id="d0",
            role=Role.DECODE,
            busy_s=2.0,
            steps=10,
            mean_rows=3.0,
            decode_tokens=30,
            kv_token_s=1000.0,
            stranded_token_s=100.0,
            preemptions=2,
        ),
    )
    summary = summarise(result(row(0), row(3, ended_s=4.0), workers=workers))
    assert summary.lasted_s == 4.0
    prefill, decode = summary.roles["prefill"], summary.roles["decode"]
    assert (prefill.busy_share, prefill.prefill_tokens, prefill.stranded_share) == (0.25, 70, 0.0)
    assert (decode.busy_share, decode.mean_rows, decode.kv_share, decode.stranded_share) == (0.5, 3.0, 0.25, 0.1)
    assert decode.preemptions == 2
    assert summary.goodput_per_worker_rps == pytest.approx(2 / 3 / 2)


def test_prediction_errors_are_relative_medians() -> None:
    rows = [row(n, predicted_ttft_s=0.5 * told, predicted_tpot_s=0.06) for n, told in enumerate((1.0, 1.1, 2.0))]
    summary = summarise(result(*rows))
    assert summary.ttft_error == pytest.approx(0.1)
    assert summary.tpot_error == pytest.approx(0.2)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(float(one) for one in range(1, 101)) == Percentiles(
        of=100, mean=50.5, p50=50.0, p90=90.0, p95=95.0, p99=99.0
    )
    assert percentiles([None, 3.0]) == Percentiles(of=1, mean=3.0, p50=3.0, p90=3.0, p95=3.0, p99=3.0)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], share: float) -> None:
    found = nearest_rank(sorted(values), share)
    enough = share * len(values) - 1e-6
    assert sum(one <= found for one in values) >= enough
    assert sum(one < found for one in values) < enough + 1e-5


@given(st.integers(1, 50), st.integers(0, 300), st.integers(0, 30))
def test_tokens_in_time_are_counted_one_by_one(tokens: int, ttft_cs: int, tpot_cs: int) -> None:
    one = row(0, "late", ttft_s=ttft_cs / 100, tpot_s=tpot_cs / 100, tokens=tokens)
    counted = sum(ttft_cs + index * tpot_cs <= 100 + index * 10 for index in range(tokens))
    assert tokens_in_time(one) == counted


def test_token_attainment_counts_tokens_that_never_came() -> None:
    rows = (row(0), row(1, "rejected"), row(2, "cancelled", ttft_s=0.1, tpot_s=0.01, tokens=4))
    assert summarise(result(*rows)).token_attainment == pytest.approx(15 / 33)


def test_the_worst_are_lost_then_late_then_rejected() -> None:
    assert [one.number for one in worst(MIXED, 9)] == [7, 10, 3, 4, 2, 5, 6]
    assert [miss(one) for one in worst(MIXED, 3)] == ["failed", "unfinished", "late tokens"]
    assert [one.number for one in worst(MIXED, 2)] == [7, 10]


def test_reasons_are_shown_in_words() -> None:
    late = row(2, "late", ttft_s=1.5, queue_s=1.1, transfer_s=0.1, preemptions=2, attempts=2)
    assert why(late) == "first token 500 ms late, mostly queue (1.1 s of 1.5 s); preempted twice; placed twice"
    assert why(MIXED[3]) == "2 times the target time per token"
    assert why(MIXED[5]) == "rejected 10 ms after its arrival; told to retry after 2 s"
    assert why(MIXED[6]) == "cancelled 500 ms after its arrival, with 4 of 11 tokens"
    assert why(MIXED[8]) == "unfinished, with 0 of 11 tokens"
    assert why(MIXED[0]) == "met both targets"
