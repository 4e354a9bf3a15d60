"""The KV of an answer that leaves the worker: what is computed again, what is sent, and how long blocks are kept."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.decode_sequence import DecodeStage
from pdserve.core.attempt import FailureKind, RefusalReason
from pdserve.core.effects import BlocksDone, SendAborted, SendStarted, TransferLost
from pdserve.core.protocol import AttemptFailed, FirstToken, Refused, Released
from pdserve.core.types import FinishReason
from pdserve.engine.toy import answer

PROMPT = [11, 12, 13, 14, 15]


def leave(bench: Any, name: str = "a", num_tokens: int = 4, **settings: Any) -> list[Any]:
    """Computes an answer, cancels it, and orders the worker to send its KV. Returns the effects of the order."""
    bench.offer(name, PROMPT, max_tokens=100)
    while len(bench.sampled.get(name, ())) < num_tokens:
        bench.step()
    bench.scheduler.cancel(bench.key(name))
    return bench.send(name, PROMPT, **settings)


def finish(bench: Any, name: str = "a") -> tuple[BlocksDone, FirstToken]:
    """Steps until the answer's next token is sampled."""
    for _ in range(20):
        effects = bench.step()
        first = [one for one in effects if isinstance(one, FirstToken)]
        if first:
            [last] = [one for one in effects if isinstance(one, BlocksDone)]
            assert effects.index(last) < effects.index(first[0])
            return last, first[0]
    raise AssertionError("no token was sampled")


@pytest.mark.parametrize("num_tokens", range(1, 10))
@pytest.mark.parametrize(
    "settings", [{}, {"is_async": True}, {"max_drafts": 6, "num_answers": 1}, {"is_checked": True}]
)
def test_all_blocks_are_sent_and_the_next_token_is_sampled(
    make_bench: Any, settings: dict[str, Any], num_tokens: int
) -> None:
    bench = make_bench(**settings)
    started, *early = leave(bench, num_tokens=num_tokens)
    output = bench.sampled["a"]
    tokens = PROMPT + output
    assert isinstance(started, SendStarted)
    before = len(bench.accounts)
    last, first = finish(bench)
    assert last.is_last
    assert first.token.token_id == answer(PROMPT, len(output) + 1, num_answers=bench.num_answers)[-1]
    assert first.finish is None
    in_flight = int(bench.is_async and num_tokens > 1)  # a step with the cancelled attempt
    again = sum(one.prefill_tokens + one.decode_rows for one in bench.accounts[before:]) - in_flight
    assert again == len(tokens) - (len(tokens) - 1) // 4 * 4, "only the last block is computed again"
    sent = [pair for done in (*early, last) for pair in done.blocks]
    assert [index for index, _ in sent] == list(range(-(-len(tokens) // 4)))
    bench.assert_right_kv(tokens, dict(sent))
    stamps = bench.scheduler.blocks.stamps.content_hashes([block for _, block in sent])
    assert all(stamps), "the receiver compares content hashes"
    assert bench.scheduler.stage(bench.key("a", 2)) is DecodeStage.SENDING
    assert not bench.scheduler.has_work
    assert bench.scheduler.sent(bench.key("a", 2), is_whole=True) == [Released(key=bench.key("a", 2))]


def test_full_blocks_are_sent_before_the_last_token_is_computed(bench: Any) -> None:
    _, early = leave(bench, num_tokens=4)
    assert [index for index, _ in early.blocks] == [0, 1]
    assert not early.is_last


def test_blocks_that_the_receiver_has_are_not_sent(bench: Any) -> None:
    """Indexes count from the first block that it lacks."""
    _, early = leave(bench, num_tokens=8, cached_blocks=1)
    last, _ = finish(bench)
    assert [index for index, _ in (*early.blocks, *last.blocks)] == [0, 1, 2]
    bench.assert_right_kv(PROMPT + bench.sampled["a"], {index + 1: block for index, block in early.blocks})


def test_an_answer_that_the_cache_lacks_is_refused(bench: Any) -> None:
    bench.sampled["a"] = answer(PROMPT, 4)
    key = bench.key("a", 2)
    assert bench.send("a", PROMPT) == [Refused(key=key, reason=RefusalReason.NO_KV)]
    assert key not in bench.scheduler


def test_an_answer_with_an_evicted_block_is_refused(make_bench: Any) -> None:
    bench = make_bench(num_blocks=5)
    bench.offer("a", PROMPT, max_tokens=100)
    while len(bench.sampled.get("a", ())) < 8:
        bench.step()
    bench.scheduler.cancel(bench.key("a"))
    bench.offer("other", list(range(50, 62)), max_tokens=2)
    bench.run()
    assert bench.send("a", PROMPT) == [Refused(key=bench.key("a", 2), reason=RefusalReason.NO_KV)]


def test_a_draining_worker_sends(bench: Any) -> None:
    bench.offer("a", PROMPT, max_tokens=100)
    bench.step()
    bench.scheduler.is_draining = True
    bench.scheduler.cancel(bench.key("a"))
    assert isinstance(bench.send("a", PROMPT)[0], SendStarted)
    assert bench.offer("b", PROMPT) == [Refused(key=bench.key("b"), reason=RefusalReason.DRAINING)]


def test_a_grant_of_another_size_is_rejected(bench: Any) -> None:
    effects = leave(bench, num_granted=9)
    assert [type(one) for one in effects] == [AttemptFailed, Released]
    assert effects[0].kind is FailureKind.TRANSFER


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_of_a_cancelled_send_are_kept_until_it_has_ended(
    make_bench: Any, is_computed: bool, is_async: bool
) -> None:
    bench = make_bench(is_async=is_async)
    leave(bench)
    key = bench.key("a", 2)
    if is_computed:
        finish(bench)
    held = bench.scheduler.num_held(key)
    assert bench.scheduler.cancel(key) == [SendAborted(key=key)]
    assert bench.scheduler.cancel(key) == []
    assert bench.scheduler.stage(key) is DecodeStage.ENDING
    assert bench.scheduler.num_held(key) == held == 3
    bench.run()
    assert bench.scheduler.sent(key, is_whole=False, error="aborted") == [Released(key=key)]


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_failed_send_frees_the_blocks(bench: Any, is_computed: bool) -> None:
    leave(bench)
    key = bench.key("a", 2)
    if is_computed:
        finish(bench)
    lost = TransferLost(key=key, error="the receiver died")
    assert bench.scheduler.sent(key, is_whole=False, error="the receiver died") == [lost, Released(key=key)]
    assert bench.run() == []


def test_a_last_token_ends_the_send(bench: Any) -> None:
    """No decode worker needs the KV of a complete answer."""
    leave(bench, max_tokens=5)
    effects = bench.step()
    [first] = [one for one in effects if isinstance(one, FirstToken)]
    assert first.finish is FinishReason.LENGTH
    assert effects[-1] == SendAborted(key=bench.key("a", 2))


def test_a_row_that_fails_ends_the_send(bench: Any) -> None:
    leave(bench)
    key = bench.key("a", 2)
    effects = bench.scheduler.fail(key, FailureKind.INTERNAL, "broken")
    assert [type(one) for one in effects] == [AttemptFailed, SendAborted]
    assert bench.scheduler.fail(key, FailureKind.INTERNAL, "broken") == []


def test_a_wrong_block_is_not_sent(make_bench: Any) -> None:
    bench = make_bench(is_checked=True)
    leave(bench, num_tokens=8)
    key = bench.key("a", 2)
    sequence = bench.scheduler.sequences.by_key[key]
    bench.scheduler.blocks.stamps.mark(sequence.blocks[0], 1)
    effects = bench.step()
    assert [one.kind for one in effects if isinstance(one, AttemptFailed)] == [FailureKind.TRANSFER]
    assert effects[-1] == SendAborted(key=key)
    assert not [one for one in effects if isinstance(one, FirstToken)]


def test_a_sent_answer_is_never_preempted(make_bench: Any) -> None:
    """Its blocks may be read, so the older sequence is preempted instead."""
    bench = make_bench(num_blocks=6, max_batch=4)
    bench.offer("old", [21, 22, 23], max_tokens=60)
    leave(bench, num_tokens=4)
    finish(bench)
    key = bench.key("a", 2)
    for _ in range(40):
        bench.step()
        assert bench.scheduler.num_held(key) == 3
        assert bench.scheduler.stage(key) is DecodeStage.SENDING
    assert bench.scheduler.num_held(bench.key("old")) <= 3
    bench.scheduler.sent(key, is_whole=True)
    bench.run()
    assert bench.sampled["old"] == answer([21, 22, 23], 60)[: 6 * 4 - 3]
