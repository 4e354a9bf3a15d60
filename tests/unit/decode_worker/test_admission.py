"""Attempts that a decode worker accepts, and exhausted memory."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.attempt import RefusalReason
from pdserve.core.effects import BlocksReserved
from pdserve.core.kv.reuse_rates import Kind
from pdserve.core.protocol import Granted, Refused, TokenRow
from pdserve.core.types import FinishReason
from pdserve.engine.toy import answer

PROMPT = list(range(40, 50))  # two full blocks of four, and two tokens of a third


# -- memory ----------------------------------------------------------------------------------------------------


def test_without_memory_the_youngest_is_preempted(make_bench: Any) -> None:
    bench = make_bench(num_blocks=9)
    prompts = {name: [n + 11, n + 12, n + 13] for n, name in enumerate("abc")}
    for name, prompt in prompts.items():
        bench.offer(name, prompt, max_tokens=20)
    effects = bench.run()
    assert bench.sampled == {name: answer(prompt, 20) for name, prompt in prompts.items()}
    assert bench.scheduler.num_preemptions > 0
    rows = [one for one in effects if isinstance(one, TokenRow)]
    assert [one.key.request_id for one in rows if one.finish] == ["a", "b", "c"]
    counts = {name: [one.preemptions for one in rows if one.key.request_id == name] for name in prompts}
    assert sum(map(sum, counts.values())) == bench.scheduler.num_preemptions == bench.scheduler.load().preemptions
    assert not any(counts["a"])
    assert any(counts["c"][:-1])  # Reported when it resumes, not only at its end.


def test_a_preemption_is_no_use_of_a_text(make_bench: Any) -> None:
    bench = make_bench(num_blocks=9)
    for name in "abc":
        bench.offer(name, [ord(name), 12, 13], max_tokens=20)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    turns = {one.reuse_class for one in bench.scheduler.blocks._retention._known.values()}
    assert turns == {(Kind.PRIVATE, 1)}


def test_a_preempted_remote_sequence_prefills_locally(make_bench: Any) -> None:
    bench = make_bench(num_blocks=7)
    prompts = {name: [n + 11, n + 12, n + 13] for n, name in enumerate("ab")}
    for name, prompt in prompts.items():
        first = bench.reserve_and_write(name, prompt, max_tokens=16)
        bench.receive(name)
        bench.admit(name, first)
    effects = bench.run()
    assert bench.sampled == {name: answer(prompt, 16) for name, prompt in prompts.items()}
    assert bench.scheduler.num_preemptions > 0
    for name in prompts:
        indexes = [one.output_index for one in effects if isinstance(one, TokenRow) and one.key.request_id == name]
        assert indexes == list(range(1, 16))


def test_the_last_sequence_waits_for_transfers_and_keeps_its_kv(make_bench: Any) -> None:
    bench = make_bench(num_blocks=4)
    bench.offer("a", [1, 2, 3], max_tokens=6)
    bench.step()
    bench.reserve_and_write("b", list(range(8)))
    while bench.scheduler.blocks.num_available:
        bench.step()
    bench.step()
    bench.step()
    bench.step()
    plan, _ = bench.scheduler.plan(bench.now_s)
    assert plan.rows == []
    assert bench.scheduler.num_preemptions == 0
    bench.scheduler.lost(bench.key("b"), "gone")
    bench.run()
    assert bench.sampled["a"] == answer([1, 2, 3], 6)


def test_reservations_leave_room_for_running_sequences(make_bench: Any) -> None:
    bench = make_bench(num_blocks=4)
    bench.offer("a", [1, 2, 3])
    bench.step()
    assert bench.offer("b", list(range(12)), is_local=False) == [
        Refused(key=bench.key("b"), reason=RefusalReason.NO_BLOCKS)
    ]
    assert isinstance(bench.offer("c", list(range(8)), is_local=False)[0], BlocksReserved)


def test_no_reservation_overtakes_a_waiting_local_prompt(make_bench: Any) -> None:
    bench = make_bench(num_blocks=6)
    bench.reserve_and_write("a", list(range(16)))
    bench.offer("b", list(range(50, 62)))
    bench.step()
    assert bench.offer("c", [1], is_local=False) == [Refused(key=bench.key("c"), reason=RefusalReason.NO_BLOCKS)]
    bench.scheduler.lost(bench.key("a"), "gone")
    bench.run()
    assert bench.sampled["b"] == answer(list(range(50, 62)), 8)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_waiting_sequence_does_not_hold_its_cached_prefix(make_bench: Any, is_local: bool) -> None:
    bench = make_bench(num_blocks=4)
    blocks = bench.scheduler.blocks
    bench.offer("a", PROMPT[:8], max_tokens=1)
    bench.run()
    bench.reserve_and_write("b", list(range(100, 108)))  # Takes the two free blocks.
    prompt = [*PROMPT[:8], 99]  # Two blocks are in the cache, and there is none for the third.
    refused = [Refused(key=bench.key("c"), reason=RefusalReason.NO_BLOCKS)]
    assert bench.offer("c", prompt, is_local=is_local, max_tokens=4) == (
        [Granted(key=bench.key("c"))] if is_local else refused
    )
    for _ in range(3):
        bench.step()
        assert (blocks.num_referenced, blocks.num_evictable) == (2, 2)
    bench.scheduler.lost(bench.key("b"), "gone")
    bench.run()
    assert bench.sampled.get("c") == (answer(prompt, 4) if is_local else None)


def test_a_text_ends_at_the_context_window(make_bench: Any) -> None:
    bench = make_bench(num_blocks=3)
    bench.offer("a", PROMPT, max_tokens=100)
    rows = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert rows[-1].finish is FinishReason.LENGTH
    assert bench.sampled["a"] == answer(PROMPT, 2)


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": list(range(129))}, RefusalReason.TOO_LARGE),
        ({"prompt": list(range(128)), "is_local": False}, RefusalReason.TOO_LARGE),
        ({"deadline_at_s": 0.0}, RefusalReason.DEADLINE),
        ({"deadline_at_s": -1.0, "is_local": False}, RefusalReason.DEADLINE),
    ],
)
def test_declined_attempts_have_a_reason(bench: Any, settings: dict[str, Any], reason: RefusalReason) -> None:
    assert bench.offer("a", **{"prompt": PROMPT, **settings}) == [Refused(key=bench.key("a"), reason=reason)]


def test_the_inbox_is_bounded_over_both_paths(make_bench: Any) -> None:
    bench = make_bench(inbox_depth=2)
    bench.offer("a", PROMPT, is_local=False)
    bench.offer("b", PROMPT)
    assert bench.offer("c", PROMPT) == [Refused(key=bench.key("c"), reason=RefusalReason.INBOX_FULL)]
    bench.step()
    assert bench.offer("d", PROMPT) == [Granted(key=bench.key("d"))]  # "b" runs, so there is room


def test_a_draining_worker_finishes_its_attempts(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.scheduler.is_draining = True
    assert bench.offer("b", PROMPT) == [Refused(key=bench.key("b"), reason=RefusalReason.DRAINING)]
    bench.run()
    assert bench.sampled["a"] == answer(PROMPT, 8)


def test_the_load_counts_running_waiting_and_prefill_tokens(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.step()
    bench.offer("b", PROMPT)
    bench.offer("c", [9] * 8, is_local=False)
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.context_tokens, load.pending_prefill_tokens) == (1, 2, 8, 12)
    assert (load.free_blocks, load.evictable_blocks) == (27, 0)
