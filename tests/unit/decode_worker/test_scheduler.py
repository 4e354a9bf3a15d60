"""Blocks, computed positions and sampled tokens of a decode worker, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decode_worker.decode_sequence import DecodeStage
from decode_worker.planning import MAX_CONSECUTIVE_WAITS
from pdserve.core.attempt import FailureKind
from pdserve.core.cost.latency import CostModel, CostPrior
from pdserve.core.effects import (
    BlocksReserved,
    KvCommitted,
    ReceiveAborted,
    StepAccount,
    TransferCancelled,
    TransferLost,
)
from pdserve.core.protocol import AttemptFailed, Granted, Released, TokenRow
from pdserve.core.types import FinishReason
from pdserve.engine.interface import OnLayer, Row, RowOut
from pdserve.engine.toy import answer
from tests.unit.decode_worker.conftest import spread

PROMPT = list(range(40, 50))  # two full blocks of four, and two tokens of a third


# -- the remote path -------------------------------------------------------------------------------------------


def test_reserved_blocks_are_contiguous(bench: Any) -> None:
    assert bench.offer("a", PROMPT, is_local=False) == [
        BlocksReserved(key=bench.key("a"), blocks=(0, 1, 2), num_cached_blocks=0)
    ]
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("is_admitted_first", [True, False])
def test_decoding_starts_with_kv_and_first_token(bench: Any, is_admitted_first: bool) -> None:
    first = bench.reserve_and_write("a", PROMPT)
    committed = KvCommitted(key=bench.key("a"), transfer_s=0.5, busy_s=0.25, num_bytes=64, num_cached_blocks=0)
    if is_admitted_first:
        assert bench.admit("a", first) == []
        assert not bench.scheduler.has_work
        assert bench.receive("a") == [committed]
    else:
        assert bench.receive("a") == [committed]
        assert not bench.scheduler.has_work
        assert bench.admit("a", first) == []
    effects = bench.run()
    assert bench.sampled["a"] == answer(PROMPT, 8)
    rows = [one for one in effects if isinstance(one, TokenRow)]
    assert [row.output_index for row in rows] == list(range(1, 8))
    assert [row.finish for row in rows] == [None] * 6 + [FinishReason.LENGTH]
    assert rows[-1].decode_s == 7.0
    assert effects[-1] == Released(key=bench.key("a"))


def test_a_cached_prefix_is_not_granted(bench: Any) -> None:
    bench.offer("a", PROMPT, max_tokens=2)
    bench.run()
    [effect] = bench.offer("b", [*PROMPT[:8], 7, 8, 9], is_local=False)
    assert (effect.num_cached_blocks, len(effect.blocks)) == (2, 1)
    first = bench.write("b")
    bench.receive("b")
    bench.admit("b", first)
    bench.run()
    assert bench.sampled["b"] == answer([*PROMPT[:8], 7, 8, 9], 8)


def test_a_fully_cached_prompt_still_receives_its_last_block(bench: Any) -> None:
    bench.offer("a", PROMPT[:8], max_tokens=1)
    bench.run()
    [effect] = bench.offer("b", PROMPT[:8], is_local=False)
    assert (effect.num_cached_blocks, len(effect.blocks)) == (1, 1)


def test_received_kv_serves_later_prompts(bench: Any) -> None:
    first = bench.reserve_and_write("a", PROMPT)
    bench.receive("a")
    bench.offer("b", PROMPT)
    bench.run()
    assert bench.sampled["b"] == answer(PROMPT, 8)
    bench.admit("a", first)
    bench.run()
    assert bench.scheduler.blocks.num_referenced == 0


def test_a_second_admit_is_ignored(bench: Any) -> None:
    first = bench.reserve_and_write("a", PROMPT)
    assert bench.admit("a", first) == []
    assert bench.admit("a", first) is None
    bench.receive("a")
    assert bench.admit("a", first) is None
    assert bench.admit("nobody", 1) is None
    bench.run()
    assert bench.sampled["a"] == answer(PROMPT, 8)


def test_a_lost_transfer_frees_its_blocks(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    key = bench.key("a")
    assert bench.scheduler.lost(key, "checksum") == [TransferLost(key=key, error="checksum"), Released(key=key)]


def test_a_transfer_cancelled_by_its_sender_is_reported_so(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    key = bench.key("a")
    lost = TransferLost(key=key, error="enough", is_cancelled=True)
    assert bench.scheduler.lost(key, "enough", is_cancelled=True) == [lost, Released(key=key)]
    assert bench.scheduler.blocks.num_free == 32


def test_a_final_first_token_is_not_decoded(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT, max_tokens=1)
    bench.receive("a")
    failed, released = bench.admit("a", 81) or []
    assert (failed.kind, released) == (FailureKind.INVALID, Released(key=bench.key("a")))


# -- the local path --------------------------------------------------------------------------------------------


def test_a_local_prompt_is_prefilled_in_chunks(bench: Any) -> None:
    bench.now_s = 5.0
    assert bench.offer("a", PROMPT) == [Granted(key=bench.key("a"))]
    plan, _ = bench.scheduler.plan(8.0)
    assert plan.account == StepAccount(prefill_tokens=8, prefill_token_context=32.0)
    bench.scheduler.apply(plan, bench.engine.step(plan.rows), 9.0)
    bench.now_s = 9.0
    effects = bench.run()
    assert bench.sampled["a"] == answer(PROMPT, 8)
    rows = [one for one in effects if isinstance(one, TokenRow)]
    assert [row.output_index for row in rows] == list(range(8))
    assert (rows[0].queue_s, rows[0].prefill_s, rows[0].cached_tokens) == (3.0, 2.0, 0)
    assert (rows[1].prefill_s, rows[-1].decode_s) == (0.0, 7.0)


def test_a_local_prompt_uses_the_cache(bench: Any) -> None:
    bench.offer("a", PROMPT, max_tokens=1)
    bench.run()
    bench.offer("b", PROMPT, max_tokens=2)
    [first, *_] = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert first.cached_tokens == 8
    assert bench.sampled["b"] == answer(PROMPT, 2)


def test_cached_blocks_make_a_waiting_prompt_short(bench: Any) -> None:
    bench.offer("first", list(range(1, 9)), max_tokens=1)
    bench.run()
    bench.offer("new", list(range(50, 54)), ttft_s=100.0)
    bench.offer("cached", list(range(1, 10)), ttft_s=100.0)
    step, _ = bench.scheduler.plan(bench.now_s)
    assert [(each.key.request_id, count) for each, count in step.prefilling] == [("cached", 1), ("new", 4)]


def test_generated_blocks_are_cached_for_the_next_turn(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.run()
    turn = [*PROMPT, *bench.sampled["a"], 5]
    bench.offer("b", turn, max_tokens=1)
    [first] = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert first.cached_tokens == 16
    assert bench.sampled["b"] == answer(turn, 1)


def test_earlier_output_counts_as_output(bench: Any) -> None:
    whole = answer(PROMPT, 8)
    bench.offer("a", PROMPT, output=tuple(whole[:5]))
    rows = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert [row.output_index for row in rows] == [5, 6, 7]
    assert bench.sampled["a"] == whole[5:]


def test_running_sequences_decode_during_a_prefill(bench: Any) -> None:
    bench.offer("a", PROMPT[:2], max_tokens=6)
    bench.step()
    bench.offer("b", list(range(12)), max_tokens=1)
    chunks = []
    while len(bench.sampled.get("b", ())) == 0:
        plan, _ = bench.scheduler.plan(bench.now_s)
        chunks.append([len(row.tokens) for row in plan.rows])
        for one in spread(bench.scheduler.apply(plan, bench.engine.step(plan.rows), bench.now_s)):
            if isinstance(one, TokenRow):
                bench.sampled.setdefault(one.key.request_id, []).append(one.tokens[0].token_id)
    assert chunks == [[1, 4], [1, 4], [1, 4]]  # A share of the largest chunk of 8, but at least a block.
    bench.run()
    assert bench.sampled == {"a": answer(PROMPT[:2], 6), "b": answer(list(range(12)), 1)}


def test_chunks_leave_each_row_time_to_meet_its_target(make_bench: Any) -> None:
    bench = make_bench(max_batch_tokens=64)
    bench.offer("loose", PROMPT[:2], max_tokens=9, tpot_s=0.5)
    bench.offer("strict", PROMPT[:3], max_tokens=4, tpot_s=0.2)
    bench.step()
    bench.offer("reader", list(range(100)), max_tokens=1)
    chunks = []
    while "reader" not in bench.sampled:
        plan, _ = bench.scheduler.plan(bench.now_s)
        chunks.append(plan.account.prefill_tokens)
        bench.step()
        bench.now_s += 0.2 - 1.0  # The sequence with the strict target is on time after each step.
    # The strict one's tokens are due every 0.95 * 0.2 s. A step may end later by 0.142 s for each token after the next,
    # which may take 1.5 decode steps of 0.04 s. The model is untrained, so a step may have 1 / 1.25 of this time. After
    # 0.01 s for each of two rows, 34, 22 and 13 tokens of 0.01 s remain. After the strict one has ended, the other one
    # is 0.9 s ahead, which is enough for all tokens that remain.
    assert chunks == [35, 23, 13, 29]
    bench.run()
    assert bench.sampled["reader"] == answer(list(range(100)), 1)


FIXED_COST = CostPrior(
    prefill_base_s=0.07,  # 0.05 s more than reading the weights, for any number of prompt tokens.
    prefill_per_token_s=0.001,
    prefill_per_token_context_s=0.0,
    decode_base_s=0.02,
    decode_per_row_s=0.01,
    decode_per_context_token_s=0.0,
)


def timed_step(bench: Any) -> int:
    """Runs a step that takes as long as its cost, and returns its prompt tokens."""
    before_s = bench.now_s
    bench.step()
    account = bench.accounts[-1]
    bench.now_s = before_s + CostModel(FIXED_COST).step_s(account.decode_rows, 0, account.prefill_tokens, 0.0)
    return int(account.prefill_tokens)


def test_a_prompt_waits_for_slack_if_prompt_steps_have_a_fixed_cost(make_bench: Any) -> None:
    bench = make_bench(max_batch_tokens=64, prior=FIXED_COST)
    bench.offer("row", PROMPT[:2], max_tokens=60, tpot_s=0.045)
    bench.step()
    bench.offer("prompt", list(range(90)), max_tokens=2)
    chunks = []
    while "prompt" not in bench.sampled:
        chunks.append(timed_step(bench))
    # A step of the row alone gains 0.04275 - 0.03 s. A chunk of 64 tokens needs (0.03 + 0.05 + 0.064) * 1.25 s, of
    # which the row allows 0.04275 + 15 * (0.04275 - 0.036) s at once.
    assert [count for count in chunks if count] == [64, 26]
    assert 2 <= chunks.index(64) <= 4
    bench.run()
    assert bench.sampled == {"prompt": answer(list(range(90)), 2), "row": answer(PROMPT[:2], 60)}


@pytest.mark.parametrize("tpot_s", [0.04, 0.06, 0.1, 0.3])
def test_prompts_never_wait_long_for_slack(make_bench: Any, tpot_s: float) -> None:
    """New rows have no slack, and one joins after each chunk."""
    bench = make_bench(max_batch_tokens=16, max_batch=8, inbox_depth=8, num_blocks=256, prior=FIXED_COST)
    bench.offer("row", PROMPT[:2], max_tokens=60, tpot_s=tpot_s)
    bench.step()
    for number in range(5):
        bench.offer(f"prompt{number}", list(range(number, number + 15)), max_tokens=30, tpot_s=tpot_s)
    waits = [0]
    while "prompt4" not in bench.sampled:
        if timed_step(bench):
            waits.append(0)
        else:
            waits[-1] += 1
    assert max(waits) <= MAX_CONSECUTIVE_WAITS


def test_a_step_has_no_more_rows_than_the_batch(make_bench: Any) -> None:
    bench = make_bench(max_batch=2, inbox_depth=8)
    prompts = {name: [n + 11, n + 12] for n, name in enumerate("abcde")}
    for name, prompt in prompts.items():
        bench.offer(name, prompt)
    sizes = []
    while bench.scheduler.has_work:
        plan, _ = bench.scheduler.plan(bench.now_s)
        sizes.append(len(plan.rows))
        for one in spread(bench.scheduler.apply(plan, bench.engine.step(plan.rows), bench.now_s)):
            if isinstance(one, TokenRow):
                bench.sampled.setdefault(one.key.request_id, []).append(one.tokens[0].token_id)
    assert max(sizes) == 2
    assert bench.sampled == {name: answer(prompt, 8) for name, prompt in prompts.items()}


def test_received_sequences_beyond_the_batch_wait_by_age(make_bench: Any) -> None:
    bench = make_bench(max_batch=2)
    prompts = {name: [n + 11, n + 12, n + 13] for n, name in enumerate("abc")}
    for name, prompt in prompts.items():
        first = bench.reserve_and_write(name, prompt)
        bench.receive(name)
        bench.admit(name, first)
    plan, _ = bench.scheduler.plan(0.0)
    assert [key.request_id for key in plan.keys] == ["a", "b"]
    bench.run()
    assert bench.sampled == {name: answer(prompt, 8) for name, prompt in prompts.items()}


# -- ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "expected", "finish"),
    [
        ([104, 3, 4], {}, 4, FinishReason.STOP),
        ([104, 3, 4], {"ignore_eos": True}, 8, FinishReason.LENGTH),
        ([104, 3, 4], {"min_tokens": 5}, 8, FinishReason.LENGTH),
        ([65, 66], {"stop_token_ids": (answer([65, 66], 3)[2],)}, 3, FinishReason.STOP),
    ],
)
def test_a_text_ends_by_its_rules(
    bench: Any, prompt: list[int], sampling: dict[str, Any], expected: int, finish: FinishReason
) -> None:
    bench.offer("a", prompt, **sampling)
    rows = [one for one in bench.run() if isinstance(one, TokenRow)]
    assert (len(rows), rows[-1].finish) == (expected, finish)


def test_cancel_keeps_blocks_until_the_transfer_ends(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    key = bench.key("a")
    assert bench.scheduler.cancel(key) == [ReceiveAborted(key=key)]
    assert bench.scheduler.cancel(key) == []
    assert bench.scheduler.stage(key) is DecodeStage.ENDING
    assert bench.scheduler.blocks.num_referenced == 3
    assert bench.admit("a", 5) is None
    assert bench.scheduler.lost(key, "drained") == [TransferCancelled(key=key), Released(key=key)]
    assert bench.scheduler.blocks.num_free == 32


def test_a_transfer_verified_after_the_cancel_frees_too(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    key = bench.key("a")
    bench.scheduler.cancel(key)
    assert bench.receive("a") == [TransferCancelled(key=key), Released(key=key)]
    assert bench.receive("a") == []


def test_cancel_after_the_commit_frees_at_once(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    bench.receive("a")
    assert bench.scheduler.cancel(bench.key("a")) == [Released(key=bench.key("a"))]
    assert bench.scheduler.blocks.num_referenced == 0


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_cancel_of_a_local_attempt_frees_at_once(bench: Any, num_steps: int) -> None:
    bench.offer("a", PROMPT)
    for _ in range(num_steps):
        bench.step()
    assert bench.scheduler.cancel(bench.key("a")) == [Released(key=bench.key("a"))]
    assert bench.scheduler.blocks.num_referenced == 0
    assert bench.step() == []


def test_failing_an_unknown_attempt_does_nothing(bench: Any) -> None:
    key = bench.key("a")
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "nobody asked") == []
    bench.offer("a", PROMPT)
    failed, released = bench.scheduler.fail(key, FailureKind.INTERNAL, "the engine raised")
    assert failed == AttemptFailed(key=key, kind=FailureKind.INTERNAL, message="the engine raised")
    assert released == Released(key=key)
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "again") == []


def test_failing_a_receiving_attempt_reports_once(bench: Any) -> None:
    bench.reserve_and_write("a", PROMPT)
    key = bench.key("a")
    failed, aborted = bench.scheduler.fail(key, FailureKind.INTERNAL, "the engine raised")
    assert (failed.kind, aborted) == (FailureKind.INTERNAL, ReceiveAborted(key=key))
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "again") == []
    assert bench.scheduler.lost(key, "drained") == [TransferCancelled(key=key), Released(key=key)]


def test_a_cancel_between_plan_and_apply_skips_the_row(bench: Any) -> None:
    bench.offer("a", PROMPT[:2])
    bench.offer("b", PROMPT[:3])
    plan, _ = bench.scheduler.plan(0.0)
    sampled = bench.engine.step(plan.rows)
    bench.scheduler.cancel(bench.key("a"))
    [row] = spread(bench.scheduler.apply(plan, sampled, 1.0))
    assert row.key == bench.key("b")


def test_a_deadline_ends_an_attempt_at_every_stage(bench: Any) -> None:
    bench.offer("running", PROMPT[:2], deadline_at_s=5.0)
    bench.step()
    bench.offer("receiving", PROMPT, is_local=False, deadline_at_s=5.0)
    bench.offer("waiting", PROMPT, deadline_at_s=5.0)
    effects = bench.scheduler.expire(5.0)
    assert {one.key.request_id for one in effects if isinstance(one, AttemptFailed)} == {
        "running",
        "receiving",
        "waiting",
    }
    assert {one.key.request_id for one in effects if isinstance(one, Released)} == {"running", "waiting"}
    key = bench.key("receiving")
    assert bench.scheduler.lost(key, "drained") == [TransferCancelled(key=key), Released(key=key)]
    assert bench.scheduler.live() == []


# -- adapters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_every_row_names_its_adapter(make_bench: Any, is_async: bool, max_drafts: int) -> None:
    bench = make_bench(num_blocks=12, is_async=is_async, max_drafts=max_drafts)
    seen, step, table = set[tuple[str, bool]](), bench.engine.step, bench.scheduler.sequences.by_key

    def checked(rows: list[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        owners = {each.blocks[0]: each.attempt.adapter for each in table.values() if each.blocks}
        for row in rows:
            assert row.adapter == owners.get(row.blocks[0], row.adapter)
            seen.add((row.adapter, row.start >= len(PROMPT)))
        return step([replace(row, adapter="") for row in rows], on_layer)

    bench.engine.step = checked
    for name, adapter in (("a", "one"), ("b", "two"), ("c", "")):
        bench.offer(name, [ord(name), *PROMPT[1:]], adapter=adapter, max_tokens=16)
    first = bench.reserve_and_write("d", [9, *PROMPT[1:]], adapter="two", max_tokens=4)
    bench.receive("d")
    bench.admit("d", first)
    bench.run()
    assert seen == {(adapter, is_decode) for adapter in ("one", "two", "") for is_decode in (False, True)}
    assert (bench.num_async > 3) == (is_async and not max_drafts)
