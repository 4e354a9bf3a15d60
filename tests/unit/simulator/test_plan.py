"""The search over splits, on curves whose best split is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from pdserve.core.errors import ConfigError
from simulator.search.goodput import HighestRate, Probe
from simulator.search.plan import Plan, climb, sweep, workers_for


def worth(rate_rps: float) -> HighestRate:
    """The result for a split. Scale and rate are equal here."""
    probe = Probe(scale=rate_rps, rate_rps=rate_rps, num_rows=1)
    return HighestRate(scale=rate_rps, rate_rps=rate_rps, held=probe, missed=None, probes=())


def bound(rate_rps: float, own_rps: float) -> HighestRate:
    """A split that is known to be no better than this. The better it is, the more requests were met before its run was
    stopped."""
    probe = Probe(scale=rate_rps, rate_rps=rate_rps, num_rows=10_000, num_met=round(1000 * own_rps))
    return HighestRate(scale=0.0, rate_rps=0.0, held=None, missed=probe, probes=(), is_bound=True)


def by(curve: Callable[[int], float], asked: list[int]) -> Callable[[Sequence[int], float], Iterable[HighestRate]]:
    def evaluate(splits: Sequence[int], floor: float) -> Iterable[HighestRate]:
        asked.extend(splits)
        return [worth(curve(one)) if curve(one) > floor else bound(floor, curve(one)) for one in splits]

    return evaluate


def tent(peak: int, num_workers: int = 16) -> Callable[[int], float]:
    return lambda prefill: min(prefill / peak, (num_workers - prefill) / (num_workers - peak)) if prefill else 0.1


@pytest.mark.parametrize("peak", range(1, 16))
@pytest.mark.parametrize("search", ["sweep", "climb"])
def test_the_best_split_of_a_curve_with_one_peak_is_found(search: str, peak: int) -> None:
    asked: list[int] = []
    evaluate = by(tent(peak), asked)
    plan = sweep(16, range(16), evaluate) if search == "sweep" else climb(16, range(16), 5, evaluate)
    assert plan.best == plan.advice == peak
    assert len(asked) == len(set(asked)) < 16
    assert 0 in asked


@pytest.mark.parametrize("search", ["sweep", "climb"])
def test_the_search_finds_zero_prefill_workers(search: str) -> None:
    evaluate = by(lambda prefill: 2.0 if prefill == 0 else tent(9)(prefill), [])
    plan = sweep(16, range(16), evaluate) if search == "sweep" else climb(16, range(16), 9, evaluate)
    assert plan.best == plan.advice == 0


@pytest.mark.parametrize("peak", range(1, 16))
@pytest.mark.parametrize("search", ["sweep", "climb"])
def test_a_peak_is_found_behind_worse_splits(search: str, peak: int) -> None:
    evaluate = by(lambda prefill: 0.9 if prefill == 0 else tent(peak)(prefill), [])
    plan = sweep(16, range(16), evaluate) if search == "sweep" else climb(16, range(16), 5, evaluate)
    assert plan.best == peak


def test_zero_prefill_workers_may_be_excluded() -> None:
    plan = climb(16, range(1, 16), 5, by(lambda prefill: 2.0 if prefill == 0 else tent(9)(prefill), []))
    assert (plan.best, 0 in plan.curve) == (9, False)


def test_disaggregation_that_gains_less_than_the_margin_is_not_advised() -> None:
    plan = Plan(num_workers=4, curve={0: worth(1.0), 1: worth(1.02)})
    assert (plan.best, plan.advice) == (1, 0)
    plan = Plan(num_workers=4, curve={0: worth(1.0), 1: worth(1.05)})
    assert (plan.best, plan.advice) == (1, 1)


def test_one_worker_has_one_split() -> None:
    assert sweep(1, range(1), by(lambda _: 1.0, [])).best == 0
    assert climb(1, range(1), 7, by(lambda _: 1.0, [])).best == 0


def test_the_fewest_workers_for_a_rate_are_found() -> None:
    plan = Plan(num_workers=4, curve={0: worth(1.0), 1: worth(4.0)})
    ran: list[tuple[int, int]] = []

    def sustains(num_prefill: int, num_decode: int) -> bool:
        ran.append((num_prefill, num_decode))
        return min(4 * num_prefill, 4 / 3 * num_decode) >= 12.0

    assert workers_for(12.0, plan, sustains) == (3, 9)
    assert len(ran) <= 8
    assert workers_for(12.0, plan, lambda *_: False, most=16) is None


def test_an_invalid_rate_is_rejected() -> None:
    with pytest.raises(ConfigError, match="rate"):
        workers_for(0.0, Plan(num_workers=1, curve={0: worth(1.0)}), lambda *_: True)
