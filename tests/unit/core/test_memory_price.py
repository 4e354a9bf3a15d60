"""The longest step that is worth its memory."""

from __future__ import annotations

import math

import pytest

from pdserve.core.cost.step_rule import MEMORY_WORTH, held_share, longest_step_s

WEIGHTS_S = 0.006


@pytest.mark.parametrize("rows_share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("held_per_second", [2.0, 8.0, 20.0])
def test_the_longest_worthwhile_step_maximises_throughput(rows_share: float, held_per_second: float) -> None:
    """Held memory grows with the step's length. The longest worthwhile step is then the one with the best
    throughput."""

    def served(step_s: float) -> float:
        held_share = held_per_second * step_s
        if held_share >= 1.0 or step_s * (1.0 - rows_share) <= WEIGHTS_S:
            return 0.0
        return float((1.0 - rows_share - WEIGHTS_S / step_s) * (1.0 - held_share) ** MEMORY_WORTH)

    lengths_s = [1e-4 * index for index in range(1, 5000)]
    best_s = max(lengths_s, key=served)
    worth_s = longest_step_s(WEIGHTS_S, held_per_second * best_s) / (1.0 - rows_share)
    assert worth_s == pytest.approx(best_s, rel=0.03)


def test_steps_shorten_as_memory_fills() -> None:
    lengths_s = [longest_step_s(WEIGHTS_S, held / 100) for held in range(101)]
    assert lengths_s == sorted(lengths_s, reverse=True)
    assert lengths_s[0] == math.inf
    assert lengths_s[100] == WEIGHTS_S
    assert longest_step_s(WEIGHTS_S, 1.5) == WEIGHTS_S  # More than all memory is booked.
    assert longest_step_s(WEIGHTS_S, -0.5) == math.inf


def test_a_rows_free_growth_block_counts_as_held() -> None:
    assert held_share(1600, 10, num_blocks=1000, block_size=16) == pytest.approx(0.11)
    assert held_share(1600, 10, num_blocks=100, block_size=160) == pytest.approx(0.2)
