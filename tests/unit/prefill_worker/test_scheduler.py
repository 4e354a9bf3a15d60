"""Computed positions, pushed blocks and held blocks of a prefill worker, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.effects import BlocksDone, SendAborted, SendStarted, StepAccount, TransferLost
from pdserve.core.protocol import AttemptFailed, FirstToken, Refused, Released
from pdserve.core.types import FinishReason
from pdserve.engine.toy import answer, cell
from prefill_worker.prefill_sequence import PrefillStage

PROMPT = list(range(40, 50))  # two full blocks of four, and two tokens of a third


def test_blocks_are_sent_as_chunks_fill_them(bench: Any) -> None:
    key = bench.key("a")
    assert bench.offer("a", PROMPT) == []
    plan, before = bench.scheduler.plan(0.0)
    assert before == [SendStarted(key=key, plan="chunk")]
    assert plan.account == StepAccount(prefill_tokens=8, prefill_token_context=32.0)
    after = bench.scheduler.apply(plan, bench.engine.step(plan.rows), 1.0)
    [early] = after
    assert early == BlocksDone(key=key, blocks=((0, 0), (1, 1)), is_last=False)
    bench.now_s = 1.0
    last, first = bench.step()
    assert last == BlocksDone(key=key, blocks=((2, 2),), is_last=True)
    assert (first.queue_s, first.prefill_s, first.cached_tokens, first.finish) == (0.0, 2.0, 0, None)
    assert [first.token.token_id] == answer(PROMPT, 1)


def test_pushed_blocks_hold_the_prompts_cells(bench: Any) -> None:
    bench.offer("a", PROMPT)
    cells = [cell(token, position) for position, token in enumerate(PROMPT)]
    sent = [one for push in bench.pushes(bench.run(), "a") for one in bench.contents(push.blocks).items()]
    assert [index for index, _ in sent] == [0, 1, 2]
    assert [one for _, block in sent for one in block][: len(PROMPT)] == cells


def test_blocks_that_the_receiver_has_are_not_pushed(bench: Any) -> None:
    bench.offer("a", PROMPT, receiver_cached_blocks=1)
    effects = bench.run()
    pushed = [block for push in bench.pushes(effects, "a") for block in push.blocks]
    assert [index for index, _ in pushed] == [0, 1]
    held = bench.contents(tuple(pushed))
    assert held[0] == [cell(token, position) for position, token in enumerate(PROMPT)][4:8]
    assert list(bench.firsts(effects).values()) == answer(PROMPT, 1)


def test_chunks_of_several_prompts_share_a_step(bench: Any) -> None:
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    for name, prompt in prompts.items():
        bench.offer(name, prompt)
    plan, _ = bench.scheduler.plan(0.0)
    assert [(key.request_id, len(row.tokens)) for key, row in zip(plan.keys, plan.rows, strict=True)] == [
        ("a", 3),
        ("b", 3),
        ("c", 2),
    ]
    effects = bench.scheduler.apply(plan, bench.engine.step(plan.rows), 1.0) + bench.run()
    assert bench.firsts(effects) == {name: answer(prompt, 1)[0] for name, prompt in prompts.items()}


def test_chunks_give_the_token_of_a_whole_prompt(make_bench: Any) -> None:
    prompt = list(range(60))
    for limit in (1, 3, 4, 7, 64):
        bench = make_bench(max_batch_tokens=limit)
        bench.offer("a", prompt)
        assert bench.firsts(bench.run()) == {"a": answer(prompt, 1)[0]}


def test_emitted_tokens_are_prefilled_and_the_next_sampled(bench: Any) -> None:
    whole = answer(PROMPT, 5)
    bench.offer("a", PROMPT, output=tuple(whole[:4]))
    assert bench.firsts(bench.run()) == {"a": whole[4]}


def test_a_cached_prefix_is_reused_and_pushed_at_once(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.run()
    bench.sent("a")
    bench.offer("b", [*PROMPT[:8], 99])
    effects = bench.step()
    at_once, rest = bench.pushes(effects, "b")
    assert [index for index, _ in at_once.blocks] == [0, 1]
    assert [index for index, _ in rest.blocks] == [2]
    kinds = [type(one) for one in effects]
    assert kinds.index(SendStarted) + 1 == kinds.index(BlocksDone), "before the step, not after it"
    [first] = [one for one in effects if isinstance(one, FirstToken)]
    assert first.cached_tokens == 8
    assert [first.token.token_id] == answer([*PROMPT[:8], 99], 1)


def test_a_fully_cached_prompt_recomputes_its_last_block(bench: Any) -> None:
    for name in ("a", "b"):
        bench.offer(name, PROMPT[:8])
        effects = bench.run()
        bench.sent(name)
    [first] = [one for one in effects if isinstance(one, FirstToken)]
    assert first.cached_tokens == 4
    assert [first.token.token_id] == answer(PROMPT[:8], 1)


def test_source_blocks_are_kept_until_sent(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.run()
    assert bench.scheduler.stage(bench.key("a")) is PrefillStage.SENDING
    assert bench.scheduler.blocks.num_referenced == 3
    assert bench.sent("a") == [Released(key=bench.key("a"))]
    assert bench.scheduler.blocks.num_referenced == 0
    assert bench.sent("a") == []


def test_a_prompt_waiting_for_memory_is_not_overtaken(make_bench: Any) -> None:
    bench = make_bench(num_blocks=4)
    bench.offer("a", list(range(12)))
    bench.offer("b", list(range(100, 108)))
    bench.offer("c", [1])
    bench.step()
    bench.step()
    assert [bench.scheduler.stage(bench.key(name)) for name in "abc"] == [
        PrefillStage.SENDING,
        PrefillStage.WAITING,
        PrefillStage.WAITING,
    ]
    assert bench.step() == []  # "c" would fit, but came later
    bench.sent("a")
    assert bench.firsts(bench.run()) == {"b": answer(list(range(100, 108)), 1)[0], "c": answer([1], 1)[0]}


def test_a_waiting_prompt_does_not_hold_its_cached_prefix(make_bench: Any) -> None:
    bench = make_bench(num_blocks=4)
    blocks = bench.scheduler.blocks
    bench.offer("a", PROMPT[:8])
    bench.run()
    bench.sent("a")
    assert blocks.num_evictable == 2
    bench.offer("b", list(range(100, 108)))  # Takes the two free blocks.
    bench.run()
    bench.offer("c", [*PROMPT[:8], 99])  # Two blocks are in the cache, and there is none for the third.
    for _ in range(3):
        bench.step()
        assert bench.scheduler.stage(bench.key("c")) is PrefillStage.WAITING
        assert (blocks.num_referenced, blocks.num_evictable) == (2, 2)
    bench.sent("b")
    assert bench.firsts(bench.run()) == {"c": answer([*PROMPT[:8], 99], 1)[0]}
    bench.sent("c")
    assert blocks.num_referenced == 0


def test_the_inbox_is_bounded(make_bench: Any) -> None:
    bench = make_bench(inbox_depth=2)
    assert bench.offer("a", PROMPT) == bench.offer("b", PROMPT) == []
    assert bench.offer("c", PROMPT) == [Refused(key=bench.key("c"), reason=RefusalReason.INBOX_FULL)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": list(range(65))}, RefusalReason.TOO_LARGE),
        ({"deadline_at_s": 0.0}, RefusalReason.DEADLINE),
    ],
)
def test_declined_attempts_have_a_reason(bench: Any, settings: dict[str, Any], reason: RefusalReason) -> None:
    assert bench.offer("a", **{"prompt": PROMPT, **settings}) == [Refused(key=bench.key("a"), reason=reason)]


def test_a_draining_worker_finishes_its_attempts(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.scheduler.is_draining = True
    assert bench.offer("b", PROMPT) == [Refused(key=bench.key("b"), reason=RefusalReason.DRAINING)]
    assert bench.firsts(bench.run()) == {"a": answer(PROMPT, 1)[0]}


def test_a_grant_of_the_wrong_size_fails_the_attempt(bench: Any) -> None:
    failed, released = bench.offer("a", PROMPT, num_granted=2)
    assert (failed.kind, released) == (FailureKind.TRANSFER, Released(key=bench.key("a")))
    assert bench.scheduler.live() == []


def test_cancel_while_waiting_frees_at_once(bench: Any) -> None:
    bench.offer("a", PROMPT)
    assert bench.scheduler.cancel(bench.key("a")) == [Released(key=bench.key("a"))]
    assert bench.step() == []


@pytest.mark.parametrize("num_steps", [1, 2])
def test_cancel_holds_blocks_until_the_sender_has_stopped_reading(bench: Any, num_steps: int) -> None:
    bench.offer("a", PROMPT)
    for _ in range(num_steps):
        bench.step()
    key = bench.key("a")
    assert bench.scheduler.cancel(key) == [SendAborted(key=key)]
    assert bench.scheduler.cancel(key) == []
    assert bench.scheduler.blocks.num_referenced == 3
    assert bench.step() == []  # Not computed any further.
    assert bench.scheduler.sent(key, is_whole=False, error="aborted") == [Released(key=key)]
    assert bench.scheduler.blocks.num_referenced == 0


def test_cancel_of_an_unknown_attempt_is_answered(bench: Any) -> None:
    assert bench.scheduler.cancel(bench.key("a")) == [Released(key=bench.key("a"))]


def test_failing_an_attempt_reports_it_once(bench: Any) -> None:
    key = bench.key("a")
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "nobody asked") == []
    bench.offer("a", PROMPT)
    bench.step()
    failed, aborted = bench.scheduler.fail(key, FailureKind.INTERNAL, "the engine raised")
    assert failed == AttemptFailed(key=key, kind=FailureKind.INTERNAL, message="the engine raised")
    assert aborted == SendAborted(key=key)
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "again") == []
    assert bench.scheduler.sent(key, is_whole=False, error="aborted") == [Released(key=key)]
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "late") == []


def test_a_cancel_between_plan_and_apply_skips_the_row(bench: Any) -> None:
    bench.offer("a", PROMPT[:3])
    plan, _ = bench.scheduler.plan(0.0)
    sampled = bench.engine.step(plan.rows)
    bench.scheduler.cancel(bench.key("a"))
    assert bench.scheduler.apply(plan, sampled, 1.0) == []
    bench.sent("a")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_lost_transfer_ends_the_attempt(bench: Any, num_steps: int) -> None:
    bench.offer("a", PROMPT)
    for _ in range(num_steps):
        bench.step()
    key = bench.key("a")
    effects = bench.scheduler.sent(key, is_whole=False, error="no route")
    assert effects == [TransferLost(key=key, error="no route"), Released(key=key)]
    assert bench.run() == []


def test_a_deadline_drops_the_attempt_before_it_starts(bench: Any) -> None:
    bench.offer("a", PROMPT, deadline_at_s=3.0)
    bench.now_s = 3.0
    failed, released = bench.step()
    assert isinstance(failed, AttemptFailed)
    assert (failed.kind, released) == (FailureKind.DEADLINE, Released(key=bench.key("a")))


def test_a_deadline_while_computing_aborts_the_transfer(bench: Any) -> None:
    bench.offer("a", PROMPT, deadline_at_s=1.0)
    bench.step()
    failed, aborted = bench.step()
    assert (failed.kind, aborted) == (FailureKind.DEADLINE, SendAborted(key=bench.key("a")))
    bench.scheduler.sent(bench.key("a"), is_whole=False)


@pytest.mark.parametrize(
    ("prompt", "sampling", "finish"),
    [
        ([104, 0, 4], {}, FinishReason.STOP),
        ([104, 0, 4], {"ignore_eos": True}, None),
        ([65, 66], {"max_tokens": 1}, FinishReason.LENGTH),
        ([65, 66], {"stop_token_ids": (81,)}, FinishReason.STOP),
        (list(range(64)), {}, FinishReason.LENGTH),
        (list(range(63)), {}, FinishReason.LENGTH),
        (list(range(62)), {}, None),
    ],
)
def test_the_first_token_reports_whether_it_is_the_last(
    bench: Any, prompt: list[int], sampling: dict[str, Any], finish: FinishReason | None
) -> None:
    bench.offer("a", prompt, **sampling)
    [first] = [one for one in bench.run() if isinstance(one, FirstToken)]
    assert first.finish is finish


def test_two_attempts_of_one_request_are_independent(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.step()
    bench.scheduler.cancel(bench.key("a"))
    bench.offer("a", PROMPT, attempt=2)
    effects = bench.run()
    assert [one.key.attempt for one in effects if isinstance(one, FirstToken)] == [2]
    bench.sent("a")
    assert bench.scheduler.live() == [bench.key("a", 2)]


def test_the_load_counts_waiting_and_remaining_tokens(bench: Any) -> None:
    bench.offer("a", PROMPT)
    bench.offer("b", PROMPT)
    bench.step()
    load = bench.scheduler.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens, load.context_tokens) == (1, 1, 12, 8)
    assert (load.free_blocks, load.evictable_blocks) == (13, 0)


def test_finished_blocks_are_stamped_before_sending(make_bench: Any) -> None:
    bench = make_bench(max_batch_tokens=4)
    prompt = list(range(10, 20))
    bench.offer("a", prompt)
    [live] = bench.scheduler._prompts.values()
    names = live.attempt.content_hashes(live.hashes, prompt, 4)
    assert len(set(names)) == 3
    stamps = bench.scheduler.blocks.stamps
    for _ in range(3):
        [done] = [effect for effect in bench.step() if isinstance(effect, BlocksDone)]
        assert stamps.content_hashes([block for _, block in done.blocks]) == tuple(
            names[index] for index, _ in done.blocks
        )
    bench.sent("a")
    bench.offer("b", [*prompt[:8], 1])  # Two blocks come from the cache and keep their content hashes.
    effects = bench.run()
    blocks = [block for effect in effects if isinstance(effect, BlocksDone) for _, block in effect.blocks]
    assert stamps.content_hashes(blocks)[:2] == names[:2]
    assert stamps.content_hashes(blocks)[2] not in names
    bench.sent("b")


@pytest.mark.parametrize("facts", [{"max_tokens": 1}, {"output": (5, 6), "max_tokens": 3}])
def test_unneeded_kv_is_not_sent(bench: Any, facts: dict[str, Any]) -> None:
    """The first token is certainly the last one, so no transfer begins that could only be cancelled."""
    bench.offer("a", PROMPT, **facts)
    effects = bench.run()
    assert [type(one) for one in effects] == [FirstToken, Released]
    assert effects[0].finish is FinishReason.LENGTH
    assert bench.scheduler.blocks.num_referenced == 0


def test_kv_is_not_sent_at_the_context_limit(make_bench: Any) -> None:
    bench = make_bench(num_blocks=3)  # 12 tokens
    bench.offer("a", list(range(11)))
    assert [type(one) for one in bench.run()] == [FirstToken, Released]


def test_a_first_token_that_happens_to_end_the_text_ends_the_transfer(bench: Any) -> None:
    bench.offer("free", PROMPT, max_tokens=2)
    token = bench.firsts(bench.run())["free"]
    bench.sent("free")
    bench.offer("a", PROMPT, stop_token_ids=(token,))
    effects = bench.run()
    assert [type(one) for one in effects if not isinstance(one, BlocksDone)] == [SendStarted, FirstToken, SendAborted]
    assert not any(one.is_last for one in effects if isinstance(one, BlocksDone))
    assert bench.scheduler.cancel(bench.key("a")) == []  # The router need not send a message.
    assert bench.sent("a") == [Released(key=bench.key("a"))]


def test_cancelling_a_prompt_without_a_transfer_frees_at_once(bench: Any) -> None:
    bench.offer("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.scheduler.cancel(bench.key("a")) == [Released(key=bench.key("a"))]
    assert bench.run() == []


def test_every_chunk_names_its_adapter(bench: Any) -> None:
    bench.offer("a", PROMPT, adapter="one")
    bench.offer("b", PROMPT)
    seen, now_s = [], 0.0
    while bench.scheduler.has_work:
        plan, _ = bench.scheduler.plan(now_s)
        seen += [(key.request_id, row.adapter) for key, row in zip(plan.keys, plan.rows, strict=True)]
        now_s += 1.0
        bench.scheduler.apply(plan, bench.engine.step([replace(row, adapter="") for row in plan.rows]), now_s)
    assert set(seen) == {("a", "one"), ("b", "")}
    assert len(seen) > 2
