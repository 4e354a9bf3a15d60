"""The last chunk is sent by groups of layers while it is computed, whatever happens to the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.core.effects import BlocksDone, PrefillEffect
from pdserve.engine.interface import RowOut

PROMPT = list(range(65, 84))  # 19 tokens: chunks of 8, 8 and 3; 5 blocks of 4
LAYERS = 4


@pytest.fixture
def bench(make_bench: Callable[..., Any]) -> Any:
    return make_bench(num_layers=LAYERS, push="layers")


def run_step(bench: Any, up_to: int = LAYERS) -> tuple[list[PrefillEffect], list[PrefillEffect]]:
    """The effects during a step that reports `up_to` layers, and the effects after it."""
    scheduler = bench.scheduler
    step, _ = scheduler.plan(bench.now_s)
    outs = bench.engine.step(step.rows)
    during = []
    if scheduler.wants_layers(step):
        for num_layers in range(1, up_to + 1):
            during += scheduler.stored(step, num_layers, LAYERS)
    after = scheduler.apply(step, outs, bench.now_s)
    scheduler.check()
    return during, after


def pushed(effects: list[PrefillEffect]) -> list[tuple[list[int], int, int, int, bool]]:
    return [
        ([index for index, _ in one.blocks], one.first_group, one.end_group, one.groups, one.is_last)
        for one in effects
        if isinstance(one, BlocksDone)
    ]


def test_only_the_last_chunk_is_sent_by_layers(bench: Any) -> None:
    bench.offer("a", PROMPT)
    for blocks in ([0, 1], [2, 3]):
        during, after = run_step(bench)
        assert (during, pushed(after)) == ([], [(blocks, 0, 4, 4, False)])
    during, after = run_step(bench)
    assert pushed(during) == [([4], group, group + 1, 4, False) for group in range(3)]
    assert pushed(after) == [([4], 3, 4, 4, True)]


@pytest.mark.parametrize("heard", [0, 1, 2, 3])
def test_unreported_groups_are_sent_after_the_step(bench: Any, heard: int) -> None:
    bench.offer("a", PROMPT[:8])
    during, after = run_step(bench, up_to=heard)
    assert len(pushed(during)) == heard
    assert pushed(after) == [([0, 1], heard, 4, 4, True)]


def test_layers_reported_late_are_sent_together(bench: Any) -> None:
    bench.offer("a", PROMPT[:8])
    step, _ = bench.scheduler.plan(0.0)
    assert pushed(bench.scheduler.stored(step, 3, LAYERS)) == [([0, 1], 0, 3, 4, False)]
    assert bench.scheduler.stored(step, 3, LAYERS) == []


def test_a_prompt_that_ended_meanwhile_sends_nothing(bench: Any) -> None:
    bench.offer("a", PROMPT[:8])
    step, _ = bench.scheduler.plan(0.0)
    bench.scheduler.cancel(bench.key("a"))
    assert bench.scheduler.stored(step, 2, LAYERS) == []
    assert bench.scheduler.apply(step, [RowOut()], 0.0) == []


def test_a_prompt_sent_at_the_end_is_sent_in_one_piece(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_layers=LAYERS, push="end")
    bench.offer("a", PROMPT)
    steps = [run_step(bench) for _ in range(3)]
    assert [during for during, _ in steps] == [[], [], []]
    assert [pushed(after) for _, after in steps] == [[], [], [([0, 1, 2, 3, 4], 0, 1, 1, True)]]


def test_cached_blocks_wait_if_all_kv_is_sent_at_the_end(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(push="end")
    for name in ("a", "b"):
        bench.offer(name, PROMPT)
        assert pushed(bench.run()) == [([0, 1, 2, 3, 4], 0, 1, 1, True)]
        bench.sent(name)


def test_failed_groups_are_counted(bench: Any) -> None:
    rule = bench.scheduler.pushing
    for number, (is_cancelled, groups) in enumerate([(True, 4), (True, 4), (False, 4), (False, 4), (False, 1)]):
        bench.offer(f"r{number}", PROMPT[:8])
        after = bench.run()
        assert pushed(after)[-1][3] == groups
        bench.scheduler.sent(bench.key(f"r{number}"), is_whole=False, error="lost", is_cancelled=is_cancelled)
    assert rule._failures["d"].in_a_row == 2
