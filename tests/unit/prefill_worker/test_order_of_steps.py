"""Which prompts the steps of a prefill worker compute, with TTFT targets."""

from __future__ import annotations

from typing import Any

from prefill_worker.prefill_sequence import PrefillStage
from tests.unit.prefill_worker.conftest import Bench


def planned(bench: Bench) -> dict[str, int]:
    """Computes the next step, and returns the tokens of each prompt in it, in order."""
    step, _ = bench.scheduler.plan(bench.now_s)
    bench.now_s += 1.0
    bench.scheduler.apply(step, bench.engine.step(step.rows), bench.now_s)
    bench.scheduler.check()
    return {prompt.attempt.key.request_id: count for prompt, count in step.shares}


def test_a_short_prompt_goes_before_a_long_one_that_has_time(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("long", list(range(24)), ttft_s=100.0)
    assert planned(bench) == {"long": 8}
    bench.offer("short", [1, 2, 3], ttft_s=100.0)
    assert planned(bench) == {"short": 3, "long": 5}
    assert planned(bench) == {"long": 8}


def test_cached_blocks_make_a_waiting_prompt_short(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("first", list(range(8)), ttft_s=100.0, max_tokens=1)
    planned(bench)
    bench.offer("new", list(range(50, 54)), ttft_s=100.0)
    bench.offer("cached", list(range(9)), ttft_s=100.0)
    assert planned(bench) == {"cached": 1, "new": 4}


def test_a_preempted_prompt_keeps_its_blocks(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("long", list(range(24)), ttft_s=100.0)
    planned(bench)
    bench.offer("short", list(range(50, 60)), ttft_s=100.0)
    assert planned(bench) == {"short": 8}
    assert bench.scheduler.stage(bench.key("long")) is PrefillStage.COMPUTING
    assert bench.scheduler.blocks.num_referenced == 6 + 3
    assert planned(bench) == {"short": 2, "long": 6}


def test_a_prompt_that_would_be_late_behind_short_ones_goes_first(make_bench: Any) -> None:
    bench = make_bench()
    cost = bench.scheduler.order.cost
    bench.offer("short", list(range(50, 58)), ttft_s=100.0)
    bench.offer("long", list(range(24)), ttft_s=1.1 * cost.prefill_s(24, 0, 8))
    assert list(planned(bench)) == ["long"]


def test_a_late_prompt_yields_but_gets_a_share(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("late", list(range(24)), ttft_s=1e-6)
    bench.offer("late too", list(range(30, 42)), ttft_s=1e-6)
    bench.offer("on time", list(range(50, 62)), ttft_s=100.0)
    assert planned(bench) == {"on time": 7, "late": 1}
    assert planned(bench) == {"on time": 5, "late": 3}
    assert planned(bench) == {"late": 8}
    assert planned(bench) == {"late": 8}
    assert planned(bench) == {"late": 4, "late too": 4}


def test_prompts_without_targets_are_computed_as_they_arrive(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("long", list(range(12)))
    bench.offer("short", [1])
    assert planned(bench) == {"long": 8}
    assert planned(bench) == {"long": 4, "short": 1}


def test_an_answer_that_was_interrupted_goes_first(make_bench: Any) -> None:
    bench = make_bench()
    bench.offer("new", [1, 2, 3], ttft_s=100.0)
    bench.offer("resumed", list(range(24)), output=(7,), ttft_s=1e-6)
    assert list(planned(bench)) == ["resumed"]


def test_no_prompt_overtakes_one_that_waits_for_memory(make_bench: Any) -> None:
    bench = make_bench(num_blocks=4)
    bench.offer("large", list(range(12)), ttft_s=100.0)
    planned(bench)
    bench.offer("waits", list(range(50, 58)), ttft_s=100.0)
    bench.offer("longer", list(range(60, 70)), ttft_s=100.0)
    assert planned(bench) == {"large": 4}
    bench.offer("small", [1], ttft_s=100.0)  # Shorter, so it comes before both in the order of service.
    assert planned(bench) == {"small": 1}
    assert planned(bench) == {}
