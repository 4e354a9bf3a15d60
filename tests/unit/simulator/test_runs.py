"""The time of a run is the sum of its steps, and the step at a given time is found exactly."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from simulator.cluster.speed import StepTimes


@pytest.mark.parametrize("growth_s", [0.0, 1e-12, 4e-8, 1e-4, 0.5])
def test_the_closed_form_is_the_sum(growth_s: float) -> None:
    times = StepTimes(0.008, growth_s)
    ends = list(accumulate(0.008 + growth_s * i for i in range(400)))
    assert [times.after(k) for k in range(1, 401)] == pytest.approx(ends)


@pytest.mark.parametrize("growth_s", [0.0, 1e-12, 4e-8, 1e-4, 0.5])
def test_a_time_falls_into_the_first_step_that_ends_no_earlier(growth_s: float) -> None:
    rng, times = random.Random(0), StepTimes(0.008, growth_s)
    for _ in range(500):
        seconds = rng.uniform(-0.01, times.after(300))
        steps = times.steps_until(seconds)
        assert times.after(steps) >= seconds
        assert steps == 1 or times.after(steps - 1) < seconds
    for steps in (1, 2, 77):
        assert times.steps_until(times.after(steps)) == steps
