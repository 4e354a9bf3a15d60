"""When blocks are read instead of computed, and what a router predicts of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.core.kv.tier_reads import (
    Tier,
    TierDepths,
    TierReads,
    TierSpeed,
    best_read,
    known_tiers,
    predict_given,
    predict_reads,
)

COPIES = TierSpeed(tier=Tier.HOST, block_s=0.01, is_at_once=True, most_given=3)
PINNED = TierSpeed(tier=Tier.HOST, block_s=0.1)
DISK = TierSpeed(tier=Tier.DISK, block_s=0.5, fixed_s=1.0, queue_s=2.0)
SPLIT = TierDepths(pool=2, memory=6)  # of 10 blocks


def computed_s(num_blocks: int, first: int) -> float:
    return 1.0 * num_blocks


def predict(*speeds: TierSpeed, turn_s: float = 0.0, **others: Any) -> TierReads:
    known = {"num_blocks": 10, "tiers": SPLIT, "computed_s": computed_s, "most_read": 100, **others}
    return predict_reads(speeds=speeds, turn_s=turn_s, **known)


def test_a_tier_of_a_newer_process_counts_as_the_slowest() -> None:
    assert known_tiers(bytes((0, 1, 2, 3, 255))) == bytes((0, 1, 2, 2, 2))


def test_all_blocks_are_read_or_those_that_arrive_before_the_turn() -> None:
    def read_s(count: int) -> float:
        return 2.0 * count

    def alone_s(count: int) -> float:
        return 1.0 * count

    assert best_read(read_s, alone_s, 10, 0.0) is None
    assert best_read(read_s, alone_s, 10, 5.0) == (2, 2.0)
    assert best_read(read_s, alone_s, 10, 15.0) == (7, 7.0)
    assert best_read(read_s, alone_s, 10, 20.0) == (10, 10.0)
    assert best_read(alone_s, read_s, 10, 0.0) == (10, 10.0)
    assert best_read(lambda count: math.inf, alone_s, 10, 5.0) is None
    assert best_read(lambda count: math.inf, lambda count: math.inf, 10, 5.0) is None
    assert best_read(read_s, lambda count: math.inf, 10, 0.0) == (10, math.inf)


def test_blocks_of_a_tier_without_a_speed_are_computed() -> None:
    assert predict() == TierReads(2, 0, 2, 0.0, 0.0, 0.0, 0.0)
    assert predict(DISK) == TierReads(2, 0, 2, 0.0, 0.0, 0.0, 0.0)  # behind those in host memory
    assert predict(TierSpeed(tier=7, block_s=0.0)).num_blocks == 2


def test_copies_at_once_are_kept_by_a_worker_that_receives_the_rest() -> None:
    assert predict(COPIES) == TierReads(6, 4, 6, pytest.approx(0.04), 0.0, 4.0, 0.0)
    slow = TierSpeed(tier=Tier.HOST, block_s=1.5, is_at_once=True)
    assert predict(slow, turn_s=100.0).num_blocks == 2
    assert predict(slow, computed_s=lambda count, first: 0.0).num_blocks == 6  # computing is unknown
    hanging = TierSpeed(tier=Tier.HOST, block_s=math.inf, is_at_once=True)
    assert predict(hanging, computed_s=lambda count, first: 0.0).num_blocks == 2


def test_a_prompt_waits_for_reads_beyond_its_turn() -> None:
    reads = predict(PINNED)
    assert reads == TierReads(6, 4, 2, 0.0, pytest.approx(0.4), 4.0, pytest.approx(0.4))
    assert (reads.wait_s(0.0), reads.wait_s(0.5)) == (pytest.approx(0.4), 0.0)
    assert predict(COPIES, DISK).num_blocks == 6  # 5 s to read what takes 4 s to compute
    both = predict(COPIES, DISK, turn_s=2.0)
    assert both == TierReads(10, 8, 6, pytest.approx(0.04), 5.0, 8.0, 3.0)
    assert both.wait_s(2.0) == 3.0
    assert predict(COPIES, DISK, turn_s=4.1, computed_s=lambda count, first: 0.1 * count).num_blocks == 8


def test_a_second_read_begins_after_the_first() -> None:
    fast = TierSpeed(tier=Tier.DISK, block_s=0.9)
    assert predict(PINNED, fast) == TierReads(10, 8, 2, 0.0, pytest.approx(4.0), 8.0, pytest.approx(4.0))
    hidden = predict(PINNED, TierSpeed(tier=Tier.DISK, block_s=2.0), turn_s=6.4)
    assert (hidden.num_blocks, hidden.read_s) == (9, pytest.approx(6.4))
    part = predict(PINNED, TierSpeed(tier=Tier.DISK, block_s=4.0), turn_s=8.4)
    assert (part.num_blocks, part.read_s) == (8, pytest.approx(8.4))


def test_blocks_that_a_prompt_cannot_use_are_not_read() -> None:
    """The last token is computed, so a prompt of full blocks uses all but one of them."""
    assert predict(COPIES, num_blocks=5) == TierReads(5, 3, 5, pytest.approx(0.03), 0.0, 3.0, 0.0)
    assert predict(COPIES, num_blocks=1) == TierReads(1, 0, 1, 0.0, 0.0, 0.0, 0.0)
    assert predict_given(3, SPLIT, [COPIES], computed_s, 100) == (3, pytest.approx(0.01))


def test_a_read_takes_a_part_of_the_pool() -> None:
    assert predict(PINNED, DISK, most_read=3).num_blocks == 5


def given(*speeds: TierSpeed, split: TierDepths = SPLIT) -> tuple[int, float]:
    return predict_given(10, split, speeds, computed_s, 100)


def test_what_a_worker_gives() -> None:
    assert given() == (2, 0.0)
    assert given(PINNED) == (2, 0.0)  # only for its own prompts
    assert given(COPIES) == (5, pytest.approx(0.03))  # one allocation
    assert given(COPIES, DISK) == (6, pytest.approx(0.04))  # reading the disk is slower than computing
    assert given(COPIES, TierSpeed(tier=Tier.DISK, block_s=0.5)) == (10, pytest.approx(2.04))
    assert given(PINNED, DISK) == (6, pytest.approx(0.4))
    assert given(DISK, split=TierDepths(8, 8)) == (8, 0.0)
