"""The cost model: finite and non-negative for any samples, accurate after a minute, and robust against outliers."""

from __future__ import annotations

import csv
import math
import random
import statistics
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost.latency import LONGEST_S, WIDEST_BAND, CostModel, CostModels, CostPrior, Fit, LinkModel
from tests.support.slow import slow_except

CONTENDED: Final = Path(__file__).parent / "data" / "contended_batches.csv"
QUIET_AFTER: Final = 421  # batches
TRUTH = CostPrior(
    prefill_base_s=0.02,
    prefill_per_token_s=1e-3,
    prefill_per_token_context_s=2e-7,
    decode_base_s=0.03,
    decode_per_row_s=1e-3,
    decode_per_context_token_s=2e-6,
)
anything = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.floats(0.0, 10.0), st.sampled_from([0.0, 1e-300, 1e300])
)
counts = st.one_of(st.integers(-10, 10**7), st.just(10**300))
samples = st.lists(st.tuples(counts, counts, anything, counts, anything), max_size=60)


def feed(
    model: CostModel,
    truth: CostModel,
    rng: random.Random,
    batches: int,
    noise: float = 0.05,
    slowness: float = 1.0,
) -> None:
    """Observes so many decode and prefill batches."""
    for _ in range(batches):
        rows = rng.randint(1, 32)
        context = rows * rng.randint(10, 1000)
        step_s = truth.decode_s(rows, context) * slowness * max(0.1, rng.gauss(1.0, noise))
        model.observe(rows=rows, prefill_tokens=0, prefill_token_context=0.0, context_tokens=context, step_s=step_s)
        tokens, cached = rng.randint(1, 512), rng.randint(0, 2000)
        step_s = truth.prefill_s(tokens, cached) * slowness * max(0.1, rng.gauss(1.0, noise))
        model.observe(
            rows=0,
            prefill_tokens=tokens,
            prefill_token_context=tokens * (cached + tokens / 2),
            context_tokens=0,
            step_s=step_s,
        )


def scaled(factor: float) -> CostPrior:
    return CostPrior(**{name: factor * value for name, value in _fields(TRUTH).items()})


def error(model: CostModel, truth: CostModel, slowness: float = 1.0) -> float:
    """Median relative error over steps of all kinds."""
    rng, errors = random.Random(99), []
    for _ in range(99):
        rows, tokens = rng.randint(0, 32), rng.choice([0, rng.randint(1, 512)])
        step = (rows, rows * rng.randint(10, 1000), tokens, tokens * (rng.randint(0, 2000) + tokens / 2))
        true_s = slowness * truth.step_s(*step)
        if true_s:
            errors.append(abs(model.step_s(*step) - true_s) / true_s)
    return sorted(errors)[len(errors) // 2]


def assert_sane(model: CostModel) -> None:
    for seconds in (
        model.prefill_s(1),
        model.prefill_s(10**6, 10**6, 512),
        model.decode_s(1, 1),
        model.decode_s(10**6, 10**12),
    ):
        assert math.isfinite(seconds)
        assert 0.0 <= seconds <= LONGEST_S
    for error in (model.prefill_error, model.decode_error):
        assert 0.0 < error <= 10.0


def test_the_closed_forms_are_those_of_the_design() -> None:
    model = CostModel(TRUTH)
    assert model.prefill_s(100, 400) == pytest.approx(0.02 + 1e-3 * 100 + 2e-7 * 100 * (400 + 50))
    assert model.prefill_s(5) == pytest.approx(0.03 + 2e-7 * 5 * 2.5), "the weights are read for a tiny prompt also"
    assert model.decode_s(8, 4000) == pytest.approx(0.03 + 1e-3 * 8 + 2e-6 * 4000)


def test_a_mixed_step_reads_the_weights_once() -> None:
    model = CostModel(TRUTH)
    alone_s = model.decode_s(8, 4000)
    assert model.step_s(8, 4000) == alone_s
    assert model.step_s(8, 4000, 10, 0.0) == alone_s, "the arithmetic of ten tokens hides behind the weights"
    assert model.step_s(8, 4000, 10, 1000.0) == pytest.approx(alone_s + 2e-7 * 1000)
    assert model.step_s(8, 4000, 100, 1000.0) == pytest.approx(0.02 + 0.1 + 1e-3 * 8 + 2e-6 * 4000 + 2e-7 * 1000)
    assert model.step_s(0, 0, 100, 100 * 450.0) == pytest.approx(model.prefill_s(100, 400))


@given(
    limit_s=st.floats(0.0, 10.0),
    rows=st.integers(0, 256),
    context=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
)
def test_a_chunk_uses_its_whole_limit(limit_s: float, rows: int, context: int, cached: int) -> None:
    model = CostModel(TRUTH)
    tokens = model.chunk_tokens(limit_s, rows, context, cached)
    if tokens == 0.0:
        assert model.step_s(rows, context, 1e-9, 1e-9 * cached) >= limit_s
    else:
        assert model.step_s(rows, context, tokens, tokens * (cached + tokens / 2)) == pytest.approx(limit_s)


def test_a_chunk_that_costs_nothing_may_be_of_any_length() -> None:
    free = CostModel(CostPrior(prefill_per_token_s=0.0, prefill_per_token_context_s=0.0))
    assert free.chunk_tokens(1.0, 1, 10, 10) == math.inf


def test_each_chunk_pays_the_base_once() -> None:
    model = CostModel(TRUTH)
    chunks = [model.prefill_s(512, cached) for cached in (0, 512)]
    assert model.prefill_s(1024, 0, chunk_tokens=512) == pytest.approx(sum(chunks))


def test_a_decode_step_pays_no_prefill_base() -> None:
    model = CostModel(CostPrior(prefill_base_s=0.05, decode_base_s=0.01, decode_per_row_s=1e-3))
    assert model.step_s(4, 0) == model.decode_s(4, 0) < 0.05
    assert model.step_s(0, 0) == 0.0


def test_nothing_to_do_takes_no_time() -> None:
    model, link = CostModel(), LinkModel()
    assert (model.prefill_s(0), model.decode_s(0, 0), link.transfer_s(0)) == (0.0, 0.0, 0.0)


@given(prior=st.builds(CostPrior, *[], **dict.fromkeys(CostPrior.__dataclass_fields__, anything)), steps=samples)
def test_predictions_are_finite_and_not_negative(
    prior: CostPrior, steps: list[tuple[int, int, float, int, float]]
) -> None:
    model = CostModel(prior)
    for rows, prefill_tokens, load, context_tokens, step_s in steps:
        model.observe(
            rows=rows,
            prefill_tokens=prefill_tokens,
            prefill_token_context=load,
            context_tokens=context_tokens,
            step_s=step_s,
        )
        assert_sane(model)


@given(
    rows=st.integers(1, 256),
    context=st.integers(0, 10**6),
    more_rows=st.integers(0, 64),
    more_context=st.integers(0, 10**5),
    seed=st.integers(0, 20),
)
def test_more_work_is_never_predicted_to_take_less_time(
    rows: int, context: int, more_rows: int, more_context: int, seed: int
) -> None:
    model = CostModel()
    feed(model, CostModel(TRUTH), random.Random(seed), 20)
    assert model.decode_s(rows + more_rows, context + more_context) >= model.decode_s(rows, context)
    assert model.prefill_s(rows + more_rows, context) >= model.prefill_s(rows, context)
    assert model.prefill_s(rows, context + more_context) >= model.prefill_s(rows, context)


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
def test_a_wrong_prior_is_corrected_within_hundreds_of_batches(seed: int) -> None:
    model, truth = CostModel(), CostModel(TRUTH)
    feed(model, truth, random.Random(seed), 400)
    assert model.decode_s(16, 8000) == pytest.approx(truth.decode_s(16, 8000), rel=0.05)
    assert model.decode_s(1, 100) == pytest.approx(truth.decode_s(1, 100), rel=0.1)
    assert model.prefill_s(400, 100) == pytest.approx(truth.prefill_s(400, 100), rel=0.05)
    assert model.prefill_s(10) == pytest.approx(truth.prefill_s(10), rel=0.1)
    assert model.decode_error < 0.1
    assert model.prefill_error < 0.1


def test_the_error_follows_the_samples() -> None:
    model = CostModel(CostPrior())
    for _ in range(16):
        model.observe(
            rows=16, prefill_tokens=0, prefill_token_context=0, context_tokens=8000, step_s=model.decode_s(16, 8000)
        )
    assert model.decode_error < 0.05, "they are all exact; what was believed before any of them is no evidence"


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_prior_off_by_ten_is_corrected_in_fifty_batches(seed: int, factor: float) -> None:
    model, truth, rng = CostModel(scaled(factor)), CostModel(TRUTH), random.Random(seed)
    feed(model, truth, rng, 50)
    assert error(model, truth) < 0.05


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
def test_a_single_stall_moves_a_trained_model_by_a_few_percent(seed: int) -> None:
    model, truth = CostModel(TRUTH), CostModel(TRUTH)
    feed(model, truth, random.Random(seed), 200)
    before_s, before_error = model.decode_s(16, 8000), model.decode_error
    model.observe(rows=16, prefill_tokens=0, prefill_token_context=0.0, context_tokens=8000, step_s=50.0 * before_s)
    assert model.decode_s(16, 8000) == pytest.approx(before_s, rel=0.03)
    assert before_error < model.decode_error < 1.1 * before_error, "the band says that something was odd"


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
def test_regular_stalls_hardly_change_predictions(seed: int) -> None:
    model, truth, rng = CostModel(TRUTH), CostModel(TRUTH), random.Random(seed)
    for _ in range(60):
        feed(model, truth, rng, 9)
        feed(model, truth, rng, 1, slowness=rng.choice([3.0, 10.0, 50.0]))
    assert error(model, truth) < 0.1


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
def test_skewed_times_are_predicted_by_their_median(seed: int) -> None:
    model, truth, rng = CostModel(TRUTH), CostModel(TRUTH), random.Random(seed)
    ratios: list[float] = []
    for number in range(4000):
        rows, context = rng.randint(1, 32), rng.randint(100, 10_000)
        step_s = truth.decode_s(rows, context) * (0.8 + rng.expovariate(2.0))
        if number >= 200:
            ratios.append(step_s / model.decode_s(rows, context))
        model.observe(rows=rows, prefill_tokens=0, prefill_token_context=0.0, context_tokens=context, step_s=step_s)
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("seed", slow_except(range(5), 0, 1))
@pytest.mark.parametrize("slowness", [2.0, 3.0, 20.0])
def test_a_throttled_minute_is_learned_and_forgotten_within_a_dozen_batches(seed: int, slowness: float) -> None:
    model, truth, rng = CostModel(TRUTH), CostModel(TRUTH), random.Random(seed)
    feed(model, truth, rng, 200)
    for now in (slowness, 1.0):
        feed(model, truth, rng, 12, slowness=now)
        assert error(model, truth, slowness=now) < 0.15
        assert model.prefill_s(512) == pytest.approx(now * truth.prefill_s(512), rel=0.3)
        feed(model, truth, rng, 200, slowness=now)


def test_costs_recover_after_other_processes_stop() -> None:
    """Batches of a live worker. During the first QUIET_AFTER, other processes used the same cores, and batches took up
    to forty times as long, at random."""
    with CONTENDED.open() as lines:
        batches = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
    model = CostModel(CostPrior(prefill_base_s=0.02, prefill_per_token_s=8e-4, decode_base_s=0.019))
    ratios = []
    for number, batch in enumerate(batches):
        predicted_s = model.step_s(
            batch["rows"], batch["context_tokens"], batch["prefill_tokens"], batch["prefill_token_context"]
        )
        if number > QUIET_AFTER and batch["prefill_tokens"]:
            ratios.append(abs(math.log(batch["step_s"] / predicted_s)))
        model.observe(
            rows=int(batch["rows"]),
            prefill_tokens=int(batch["prefill_tokens"]),
            prefill_token_context=batch["prefill_token_context"],
            context_tokens=int(batch["context_tokens"]),
            step_s=batch["step_s"],
        )
    assert len(ratios) > 90
    assert statistics.median(ratios[10:]) < 0.15
    assert model.prefill_error < WIDEST_BAND


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 256),
    context=st.integers(0, 10**6),
    tokens=st.integers(0, 4096),
    load=st.floats(0.0, 1e9),
    step_s=st.floats(1e-9, LONGEST_S),
)
def test_no_single_sample_moves_a_trained_model_far(
    seed: int, rows: int, context: int, tokens: int, load: float, step_s: float
) -> None:
    model, truth = CostModel(TRUTH), CostModel(TRUTH)
    feed(model, truth, random.Random(seed), 60)
    asked = [(1, 100, 0, 0.0), (16, 8000, 0, 0.0), (0, 0, 16, 128.0), (0, 0, 512, 512.0 * 1256.0), (16, 8000, 256, 2e5)]
    before = [model.step_s(*each) for each in asked]
    band = (model.prefill_error, model.decode_error)
    model.observe(
        rows=rows, prefill_tokens=tokens, prefill_token_context=load, context_tokens=context, step_s=step_s
    )  # fmt: skip
    for each, was_s in zip(asked, before, strict=True):
        assert was_s / 1.5 < model.step_s(*each) < was_s * 1.5
    for is_now, was in zip((model.prefill_error, model.decode_error), band, strict=True):
        assert was / 1.2 < is_now < was * 1.2


def test_a_prior_of_zeros_learns() -> None:
    """A calibration that took no measurements leaves zeros."""
    model, truth = CostModel(scaled(0.0)), CostModel(TRUTH)
    feed(model, truth, random.Random(0), 200)
    assert error(model, truth) < 0.1


def test_equal_batches_keep_unobserved_coefficients() -> None:
    model = CostModel(TRUTH)
    feed(model, CostModel(TRUTH), random.Random(1), 300)
    for _ in range(5000):
        model.observe(
            rows=4,
            prefill_tokens=0,
            prefill_token_context=0.0,
            context_tokens=2000,
            step_s=CostModel(TRUTH).decode_s(4, 2000),
        )
    assert model.decode_s(4, 2000) == pytest.approx(CostModel(TRUTH).decode_s(4, 2000), rel=0.02)
    assert model.decode_s(32, 16000) == pytest.approx(CostModel(TRUTH).decode_s(32, 16000), rel=0.5)


@pytest.mark.parametrize("factor", [0.05, 0.5, 20.0])
def test_equal_batches_far_from_their_prior_are_learned(factor: float) -> None:
    """The samples cannot distinguish the coefficients, and one that reached zero must not distort the others."""
    fit = Fit((0.01, 0.001, 0.0, 0.1), (1.0, 16.0, 16.0 * 1024.0, 16.0))
    features = (1.0, 1.0, 9.0, 2.0)
    seconds = factor * fit.predict(features)
    for _ in range(60):
        fit.observe(features, seconds)
    assert fit.predict(features) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("tokens", "wrong"), [(256, "prefill_per_token_s"), (8, "decode_base_s")])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_mixed_batches_correct_the_limiting_side(tokens: int, wrong: str, factor: float) -> None:
    truth = CostModel(TRUTH)
    model = CostModel(CostPrior(**{**_fields(TRUTH), wrong: factor * getattr(TRUTH, wrong)}))
    load = tokens * tokens / 2
    step_s = truth.step_s(8, 4000, tokens, load)
    for _ in range(200):
        model.observe(rows=8, prefill_tokens=tokens, prefill_token_context=load, context_tokens=4000, step_s=step_s)
    assert model.step_s(8, 4000, tokens, load) == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_an_impossible_time_is_dropped(step_s: float) -> None:
    model = CostModel(TRUTH)
    before = model.coefficients
    assert not model.observe(rows=1, prefill_tokens=0, prefill_token_context=0.0, context_tokens=10, step_s=step_s)
    assert model.coefficients == before


def test_an_impossible_prior_is_replaced() -> None:
    prior = CostPrior(prefill_base_s=math.nan, decode_base_s=-1.0, decode_per_row_s=0.5)
    assert CostModel(prior).coefficients == CostPrior(decode_per_row_s=0.5)


def test_a_link_starts_from_its_declared_values() -> None:
    link = LinkModel(latency_s=0.02, bandwidth_bytes_s=100.0)
    assert (link.latency_s, link.bandwidth_bytes_s) == (pytest.approx(0.02), pytest.approx(100.0))
    assert link.transfer_s(50.0) == pytest.approx(0.52)
    assert not link.observe(0.0, 1.0), "nothing travelled: it is no sample"
    assert link.transfer_s(50.0) == pytest.approx(0.52)


def test_transfers_reveal_latency_and_bandwidth() -> None:
    link, rng = LinkModel(), random.Random(0)
    for _ in range(100):
        num_bytes = rng.randint(10**5, 10**8)
        link.observe(num_bytes, (5e-3 + num_bytes / 4e8) * rng.gauss(1.0, 0.05))
    assert link.transfer_s(10**5) == pytest.approx(5.25e-3, rel=0.1)
    assert link.transfer_s(10**8) == pytest.approx(0.255, rel=0.05)
    assert link.error < 0.1


def test_a_slower_link_is_learned_in_a_dozen_transfers() -> None:
    link = LinkModel(latency_s=0.0, bandwidth_bytes_s=1e9)
    for _ in range(100):
        link.observe(10**7, 0.01)
    for _ in range(12):
        link.observe(10**7, 0.1)
    assert link.transfer_s(10**7) == pytest.approx(0.1, rel=0.05)


@given(st.lists(st.tuples(anything, anything), max_size=30), st.floats(0, 1e15))
def test_transfer_predictions_are_finite(measured: list[tuple[float, float]], num_bytes: float) -> None:
    link = LinkModel()
    for size, seconds in measured:
        link.observe(size, seconds)
        assert 0.0 <= link.transfer_s(num_bytes) <= LONGEST_S


def _fields(prior: CostPrior) -> dict[str, float]:
    return {name: getattr(prior, name) for name in CostPrior.__dataclass_fields__}


@pytest.mark.parametrize("chunk_tokens", [(512, 512, 512), (512, 100, 0)])
@pytest.mark.parametrize("uncached", [1.0, 512.0, 1024.0, 1500.0])
def test_several_models_predict_as_each_of_them(uncached: float, chunk_tokens: tuple[int, ...]) -> None:
    models = [CostModel(CostPrior(prefill_per_token_s=1e-5 * one, decode_base_s=1e-3 * one)) for one in (1, 7, 30)]
    models[2].observe(rows=1, prefill_tokens=0, prefill_token_context=0.0, context_tokens=10, step_s=0.2)
    several = CostModels(models, chunk_tokens)
    expected = [one.prefill_s(uncached, 0.0, chunk) for one, chunk in zip(models, chunk_tokens, strict=True)]
    assert several.prefill_s(uncached) == pytest.approx(expected, rel=1e-12)
    assert several.least_decode_s(100.0) == pytest.approx(min(one.decode_s(1.0, 100.0) for one in models), rel=1e-12)
