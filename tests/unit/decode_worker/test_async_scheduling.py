"""Asynchronous scheduling: the same tokens, no extra token, and no reuse of a block that a launched step may write."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.decode_sequence import DecodeStage
from pdserve.core.effects import PlainTokens
from pdserve.core.errors import InternalError
from pdserve.core.protocol import Released, TokenRow
from pdserve.core.types import FinishReason
from pdserve.engine.toy import EOT, answer

LONG = list(range(40, 46))


def finished(effects: list[Any]) -> dict[str, FinishReason | None]:
    return {one.key.request_id: one.finish for one in effects if isinstance(one, TokenRow) and one.finish}


def test_asynchronous_steps_sample_the_same_tokens(make_bench: Any) -> None:
    outcome = {}
    for is_async in (False, True):
        bench = make_bench(is_async=is_async)
        for name, length in (("a", 20), ("b", 9), ("c", 14)):
            bench.offer(name, [*LONG, ord(name)], max_tokens=length)
        effects = bench.run()
        outcome[is_async] = dict(bench.sampled), finished(effects)
        assert bench.scheduler.blocks.num_referenced == 0
        assert (bench.num_async > 10) == is_async
        assert any(isinstance(one, PlainTokens) for one in effects) == is_async
    assert outcome[True] == outcome[False]


def test_an_ended_text_gets_no_token_of_the_next_step(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    prompt = [*b"hi", 5, EOT]  # Five characters, then the end of sequence.
    bench.offer("a", prompt, max_tokens=20)
    effects = bench.run()
    assert finished(effects) == {"a": FinishReason.STOP}
    assert len(bench.sampled["a"]) == 6
    assert bench.sampled["a"] == answer(prompt, 6)
    assert sum(isinstance(one, Released) for one in effects) == 1


def test_a_stop_token_ends_one_of_several_texts(make_bench: Any) -> None:
    for is_async in (False, True):
        bench = make_bench(is_async=is_async)
        stop = answer(LONG, 20)[7]
        bench.offer("a", LONG, max_tokens=20, stop_token_ids=(stop,))
        bench.offer("b", LONG, max_tokens=20)
        assert finished(bench.run()) == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}
        assert bench.sampled["a"] == answer(LONG, 20)[: answer(LONG, 20).index(stop) + 1]
        assert len(bench.sampled["b"]) == 20


def test_blocks_are_freed_after_the_last_launched_step(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    scheduler, blocks = bench.scheduler, bench.scheduler.blocks
    for name in "ab":
        bench.offer(name, [*LONG, ord(name)], max_tokens=20)
    while bench.num_async == 0:
        bench.step()
    held = set(scheduler.sequences.by_key[bench.key("a")].blocks)
    num_private = sum(block not in blocks._hash_of for block in held)
    assert num_private > 0
    free = blocks.num_free
    assert [type(one) for one in scheduler.cancel(bench.key("a"))] == [Released]
    assert scheduler.stage(bench.key("a")) is None
    assert blocks.num_free == free, "a launched step writes into them"
    assert scheduler.sequences.deferred_free.held == [
        list(one) for one in scheduler.sequences.deferred_free.held if held == set(one)
    ]
    bench.step()
    bench.step()
    assert blocks.num_free > free
    bench.run()
    assert bench.sampled["b"] == answer([*LONG, ord("b")], 20)


def test_a_dropped_step_frees_deferred_blocks(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    bench.offer("a", LONG, max_tokens=20)
    while bench.num_async == 0:
        bench.step()
    bench.scheduler.cancel(bench.key("a"))
    assert bench.scheduler.blocks.num_referenced > 0
    (step, _), bench.flight = bench.flight, None
    bench.scheduler.dropped(step)
    assert bench.scheduler.blocks.num_referenced == 0
    bench.scheduler.dropped(step)


def test_rows_that_need_the_last_token_are_sampled_late(make_bench: Any) -> None:
    """Together with rows that do not. One of them ends while it has a row in the next step."""
    bench = make_bench(is_async=True)
    ends = [*b"hi", 5, EOT]
    bench.offer("a", LONG, max_tokens=15, bad_token_ids=((1, 2),))
    bench.offer("b", [*LONG, 7], max_tokens=12)
    bench.offer("c", ends, max_tokens=20, bad_token_ids=((1, 2),))
    bench.run()
    assert bench.num_async > 8
    assert bench.num_sampled_late > 8
    assert bench.sampled["a"] == answer(LONG, 15)
    assert bench.sampled["b"] == answer([*LONG, 7], 12)
    assert bench.sampled["c"] == answer(ends, 6)


def test_ended_sequences_are_not_sampled_late(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    for name in "abc":
        bench.offer(name, [*LONG, ord(name)], max_tokens=20, bad_token_ids=((1, 2),))
    while bench.num_async == 0:
        bench.step()
    step, flight = bench.flight
    assert list(flight.unsampled) == list(range(len(step.decoding)))
    bench.scheduler.cancel(step.decoding[1].key)
    known = step.known_rows(flight.unsampled)
    assert list(known) == [0, 2]
    for index, row in known.items():
        sequence = step.decoding[index]
        assert (row.follows, row.history) == (None, sequence.tokens)
        assert list(row.tokens) == sequence.tokens[-1:]
        assert row.start == len(sequence.tokens) - 1
    bench.run()
    for name in {"a", "b", "c"} - {step.decoding[1].key.request_id}:
        assert bench.sampled[name] == answer([*LONG, ord(name)], 20)


def test_an_unsampled_step_cannot_be_waited_for(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    bench.offer("a", LONG, max_tokens=9, bad_token_ids=((1, 2),))
    while bench.num_async == 0:
        bench.step()
    _, flight = bench.flight
    with pytest.raises(InternalError, match="not sampled"):
        flight.wait()
    bench.run()
    assert bench.sampled["a"] == answer(LONG, 9)


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}, {"min_tokens": 4}])
def test_penalties_keep_steps_asynchronous(make_bench: Any, sampling: dict[str, Any]) -> None:
    bench = make_bench(is_async=True)
    bench.offer("a", LONG, max_tokens=9, **sampling)
    bench.run()
    assert bench.num_async > 4
    assert len(bench.sampled["a"]) == 9


def test_asynchronous_steps_pause_for_a_prompt(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    bench.offer("a", LONG, max_tokens=20)
    while bench.num_async == 0:
        bench.step()
    bench.offer("b", [*LONG, 7], max_tokens=3)
    bench.step()
    before = bench.num_async
    bench.step()
    assert bench.scheduler.stage(bench.key("b")) is DecodeStage.RUNNING
    assert bench.num_async <= before + 1
    bench.run()
    assert bench.sampled["b"] == answer([*LONG, 7], 3)


def test_steps_are_synchronous_if_memory_is_short(make_bench: Any) -> None:
    bench = make_bench(num_blocks=5, is_async=True)
    for name in "ab":
        bench.offer(name, [50, ord(name)], max_tokens=12)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for name in "ab":
        assert bench.sampled[name] == answer([50, ord(name)], 12)


def test_a_text_has_no_row_after_its_known_end(make_bench: Any) -> None:
    bench = make_bench(is_async=True)
    for name, length in (("a", 20), ("b", 9)):
        bench.offer(name, [*LONG, ord(name)], max_tokens=length)
    bench.run()
    assert bench.num_async > 0
    sampled_by_prefill = 2
    assert sum(one.decode_rows for one in bench.accounts) == 20 + 9 - sampled_by_prefill
