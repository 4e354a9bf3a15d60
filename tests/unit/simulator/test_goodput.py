"""The search for the highest rate, on functions whose answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from pdserve.core.cost.latency import CostPrior
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from simulator.model import RequestRow, SimConfig, SimResult, TraceRequest, WorkerShape
from simulator.search.goodput import (
    ENOUGH,
    MARGIN,
    SPANS,
    TARGET,
    HighestRate,
    Probe,
    TraceWindow,
    cut,
    find_goodput,
    runner,
    shortage,
    surely_misses,
)
from simulator.traces.reshaped import first

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
CONFIG = SimConfig(workers=(WorkerShape(worker_id="d0", role=Role.DECODE, cost=CostPrior()),), slo=SLO)
WINDOW = TraceWindow(
    name="even",
    block_tokens=0,
    requests=tuple(TraceRequest(arrival_s=float(i), prompt_tokens=10, output_tokens=2) for i in range(100)),
)


def at(scale: float, met: int, of: int = 100) -> Probe:
    probe = Probe(scale=scale, rate_rps=10.0 * scale, num_rows=of, num_met=met)
    probe.misses["late first token"] = of - met
    return probe


def edge(attainment: Callable[[float], float]) -> tuple[Callable[[float, bool], Probe], list[float]]:
    asked: list[float] = []

    def run(scale: float, to_end: bool = False) -> Probe:
        asked.append(scale)
        return at(scale, round(100 * attainment(scale)))

    return run, asked


@pytest.mark.parametrize("begin", [0.1, 1.0, 3.9, 4.1, 40.0])
def test_the_search_finds_the_edge_from_any_start(begin: float) -> None:
    run, asked = edge(lambda scale: 1.0 if scale <= 4.0 else 0.5)
    found = find_goodput(run, begin, tolerance=0.02)
    assert 4.0 / 1.02 <= found.scale <= 4.0
    assert found.rate_rps == pytest.approx(10.0 * found.scale)
    assert found.missed is not None
    assert 4.0 < found.missed.scale <= found.scale * 1.02
    assert found.limit == "ttft"
    assert len(asked) <= 16
    assert [one.scale for one in found.probes] == asked


def test_with_noise_every_rate_up_to_the_answer_was_met() -> None:
    # Attainment falls below the target at 3 and rises again from 3.5 to 5. A lucky rate above the edge is not the
    # goodput.
    run, _ = edge(lambda scale: 1.0 if scale < 3.0 or 3.5 < scale < 5.0 else 0.8)
    found = find_goodput(run, 3.2, tolerance=0.02)
    assert 3.0 / 1.02 <= found.scale < 3.0
    assert all(one.has_met for one in found.probes if one.scale <= found.scale)


def test_a_target_missed_at_low_load_is_reported() -> None:
    def run(scale: float, to_end: bool = False) -> Probe:
        probe = at(scale, 40)
        probe.is_whole = to_end
        probe.ttfts_s = [0.1 * i for i in range(1, 101)] if to_end else [0.1]
        return probe

    found = find_goodput(run, 1.0)
    assert found.rate_rps == 0.0
    assert found.held is None
    assert found.verdict == "not attainable: 40% meet both targets at 0.156 requests/s; p90 TTFT alone is 9 s"


def test_requests_that_never_overload_the_cluster_have_no_edge() -> None:
    run, _ = edge(lambda scale: 1.0)
    found = find_goodput(run, 1.0)
    assert found.scale == 64.0
    assert found.missed is None
    assert found.verdict.startswith("at least 640 requests/s")


def test_the_search_stops_at_its_highest_rate() -> None:
    run, asked = edge(lambda scale: 1.0)
    assert find_goodput(run, 1.0, floor=64.0).missed is None
    assert len(asked) == 1


def test_a_candidate_below_the_floor_costs_one_run() -> None:
    run, asked = edge(lambda scale: 1.0 if scale <= 4.0 else 0.5)
    found = find_goodput(run, 1.0, floor=4.0)
    assert found.is_bound
    assert found.rate_rps == 0.0
    assert len(asked) == 1
    better = find_goodput(run, 1.0, floor=2.0)
    assert 3.8 < better.scale <= 4.0


@pytest.mark.parametrize(("field", "value"), [("first", 0.0), ("first", -1.0), ("tolerance", 0.0)])
def test_a_search_without_a_direction_is_rejected(field: str, value: float) -> None:
    run, _ = edge(lambda scale: 1.0)
    with pytest.raises(ConfigError, match=field):
        find_goodput(run, **({"first": 1.0} | {field: value}))


class Fake:
    """A fake simulator in which every request whose number is in `late` waits too long."""

    def __init__(self, late: set[int]) -> None:
        self.late = late
        self.ended = 0
        self.seeds: list[int] = []

    def __call__(
        self,
        trace: Iterable[TraceRequest],
        config: SimConfig,
        on_ended: Callable[[RequestRow], bool] | None = None,
    ) -> SimResult:
        self.seeds.append(config.seed)
        rows = []
        for number, one in enumerate(trace):
            is_late = number in self.late
            row = RequestRow(
                number=number,
                arrival_s=one.arrival_s,
                prompt_tokens=1,
                output_tokens=2,
                slo=config.slo,
                outcome="late" if is_late else "served",
                ttft_s=2.0 if is_late else 0.5,
                tpot_s=0.05,
                tokens=2,
            )
            rows.append(row)
            self.ended += 1
            if on_ended is not None and not on_ended(row):
                break
        return SimResult(trace="", config=config, requests=rows, workers=[], samples=[], span_s=1.0)


def test_exactly_nine_in_ten_suffice() -> None:
    assert runner([WINDOW], CONFIG, Fake(set(range(10))))(1.0).has_met
    assert not runner([WINDOW], CONFIG, Fake(set(range(11))))(1.0).has_met


def test_a_run_stops_when_its_target_is_impossible() -> None:
    hopeless = Fake(set(range(20, 40)))
    probe = runner([WINDOW], CONFIG, hopeless)(1.0)
    assert hopeless.ended == 31  # The eleventh miss is number 30.
    assert not probe.is_whole
    assert probe.attainment == pytest.approx(0.89)
    last_moment = Fake(set(range(90, 100)))
    assert runner([WINDOW], CONFIG, last_moment)(1.0).has_met
    assert last_moment.ended == 100


def test_a_failed_run_completes_if_its_figures_are_needed() -> None:
    hopeless = Fake(set(range(50)))
    probe = runner([WINDOW], CONFIG, hopeless)(1.0, True)
    assert hopeless.ended == 100
    assert probe.attainment == 0.5
    assert len(probe.ttfts_s) == 100


def test_the_rows_of_all_seeds_are_pooled() -> None:
    # A seed with 12 late requests of 100 fails alone. Pooled with a seed without any, both pass.
    calls = iter([set(range(12)), set()])

    def simulate(
        trace: Iterable[TraceRequest], config: SimConfig, on_ended: Callable[[RequestRow], bool] | None = None
    ) -> SimResult:
        return Fake(next(calls))(trace, config, on_ended)

    probe = runner([WINDOW, WINDOW], CONFIG, simulate)(1.0)
    assert probe.has_met
    assert probe.attainment == pytest.approx(0.94)


def test_arrivals_scale_and_depend_on_the_seed() -> None:
    fake = Fake(set())
    probe = runner([WINDOW, WINDOW, WINDOW], CONFIG, fake)(2.0)
    assert fake.seeds == [0, 1, 2]
    assert probe.rate_rps == pytest.approx(2.0 * 100 / 99)


def test_requests_that_all_come_at_once_have_no_rate() -> None:
    with pytest.raises(ConfigError, match="1 requests within 0 s"):
        cut(WINDOW, first(1))


def test_a_window_follows_the_reshaping_steps() -> None:
    assert len(cut(WINDOW, first(7))) == 7
    assert cut(WINDOW, first(7)).rate_rps == pytest.approx(7 / 6)


# --- when a run is long enough --------------------------------------------------------------------------------


def test_enough_requests_bound_the_error_of_attainment() -> None:
    """By simulation: in 19 of 20 samples, the share is within the margin."""
    rng = random.Random(1)
    shares = [sum(rng.random() < TARGET for _ in range(ENOUGH)) / ENOUGH for _ in range(1000)]
    assert 0.92 < sum(abs(share - TARGET) <= MARGIN for share in shares) / len(shares) < 0.98


def test_the_required_number_of_requests_is_tight() -> None:
    for rate_rps, stay_s, slo_ttft_s, num_runs in ((10.0, 0.5, 1.0, 1), (7856.0, 0.2, 1.0, 1), (0.5, 30.0, 2.0, 4)):
        facts = {"rate_rps": rate_rps, "stay_s": stay_s, "slo_ttft_s": slo_ttft_s, "num_runs": num_runs}
        lack = shortage(requests=175, **facts)  # type: ignore[arg-type]
        assert lack is not None
        assert shortage(requests=lack.needed_requests, **facts) is None  # type: ignore[arg-type]
        assert shortage(requests=lack.needed_requests * 9 // 10, **facts) is not None  # type: ignore[arg-type]


def test_many_requests_in_a_moment_are_too_short() -> None:
    lack = shortage(requests=175, rate_rps=7856.0, stay_s=0.5, slo_ttft_s=1.0)
    assert lack is not None
    assert lack.needed_s == pytest.approx(SPANS)
    assert lack.needed_requests == 78_560
    assert "175 requests last 0.0223 s at 7.86e+03 requests/s" in lack.text


def test_long_requests_need_a_long_run() -> None:
    assert shortage(requests=1000, rate_rps=10.0, stay_s=9.0, slo_ttft_s=1.0) is None
    assert shortage(requests=1000, rate_rps=10.0, stay_s=11.0, slo_ttft_s=1.0) is not None


def test_few_requests_may_show_that_a_target_cannot_be_met() -> None:
    assert surely_misses(0, 40)
    assert not surely_misses(0, 0)
    assert not surely_misses(34, 40)
    assert surely_misses(340, 400)


def test_a_search_without_a_miss_is_judged_by_its_length() -> None:
    held = Probe(scale=64.0, rate_rps=7856.0, num_rows=175, num_met=175, stayed_s=87.5, num_ended=175)
    found = HighestRate(scale=64.0, rate_rps=7856.0, held=held, missed=None, probes=(held,))
    assert found.shortage(1.0) is not None


def test_a_bound_needs_no_length() -> None:
    missed = Probe(scale=1.0, rate_rps=10.0, num_rows=40, num_met=1)
    found = HighestRate(scale=0.0, rate_rps=0.0, held=None, missed=missed, probes=(missed,), is_bound=True)
    assert found.shortage(1.0) is None
