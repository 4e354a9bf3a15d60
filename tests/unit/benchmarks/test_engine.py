"""What benchmarks.engine reports of its turns, without engines."""

from __future__ import annotations

import math

import pytest

from benchmarks.engine.child import Stopwatch
from benchmarks.engine.report import cost_table, median_interval
from benchmarks.engine.turns import Point, Turn


def turn(peer: str, number: int, seconds: float, cpu_s: float) -> Turn:
    return Turn(
        point=Point("decode", 8),
        round=number,
        peer=peer,
        seconds=seconds,
        cpu_s=cpu_s,
        tokens=(),
        read_bytes_per_s=1.0,
        flops_per_s=1.0,
    )


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # The ranks of the usual tables: of 5 values the whole range has 94 %, of 10 the second to the ninth has 97.9 %.
    [(1, 1, 1), (5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18)],
)
def test_the_interval_of_a_median_has_the_known_ranks(count: int, low: int, high: int) -> None:
    middle = (count + 1) / 2
    assert median_interval([float(value) for value in range(count, 0, -1)]) == (middle, low, high)
    if count > 5:
        assert sum(math.comb(count, below) for below in range(low)) / 2**count <= 0.025


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is ten times slower in one round changes no ratio."""
    slow = [1.0, 10.0, 1.0]
    turns = [turn("vllm float32", at, 0.02 * factor, 0.04 * factor) for at, factor in enumerate(slow)]
    turns += [turn("pdserve-vllm float32", at, 0.03 * factor, 0.05 * factor) for at, factor in enumerate(slow)]
    [head, row] = cost_table(turns, "vllm float32")
    assert head[-2:] == ["time / vllm float32", "CPU time / vllm float32"]
    assert row == [
        "decode, batch 8",
        "pdserve-vllm float32",
        "30.00 and 20.00",
        "50.00 and 40.00",
        "1.500 (1.500 to 1.500)",
        "1.250 (1.250 to 1.250)",
    ]


def test_a_stopwatch_times_each_step() -> None:
    watch = Stopwatch()
    for size in (10, 1_000_000, 10):
        with watch:
            sum(range(size))
    found = watch.steps(1, 2)
    assert [len(found[name]) for name in ("step_s", "cpu_s")] == [2, 2]
    assert found["cpu_s"][0] > found["cpu_s"][1] >= 0.0
    assert min(found["step_s"]) > 0.0
