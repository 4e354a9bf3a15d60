"""Random events of a decode worker in random order: tokens are right and no block is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_worker.decode_sequence import DecodeStage
from pdserve.core.effects import BlocksReserved
from pdserve.core.protocol import FirstToken, Released, TokenRow
from pdserve.core.types import FinishReason
from pdserve.engine.toy import answer
from tests.support.examples import examples

NAMES = "abcdef"
SENDS = ["send", "send", "sent", "unsent"]
KINDS = ["local", "remote", "received", "received", "receive", "admit", "lose", "cancel", "drained", *["step"] * 9]
KINDS += SENDS
MOVES = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, len(NAMES) - 1),
        st.integers(1, 10),  # prompt length
        st.integers(1, 17),  # max_tokens
    ),
    min_size=20,
    max_size=60,
)


BENCHES = pytest.mark.parametrize(
    ("num_blocks", "num_answers", "max_drafts", "is_async"),
    [(5, 95, 0, False), (9, 95, 0, False), (5, 2, 6, False), (9, 1, 15, False), (5, 95, 0, True), (12, 95, 0, True)],
)
SAME_BENCH = [HealthCheck.function_scoped_fixture]


@BENCHES
@given(moves=MOVES)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=SAME_BENCH)
def test_tokens_are_right_and_no_block_is_lost(
    make_bench: Any, num_blocks: int, num_answers: int, max_drafts: int, is_async: bool, moves: list[Any]
) -> None:
    live(make_bench, num_blocks, num_answers, max_drafts, is_async, moves)


@pytest.mark.slow
@BENCHES
@given(moves=MOVES)
@settings(max_examples=examples(300), deadline=None, suppress_health_check=SAME_BENCH)
def test_tokens_are_right_with_more_examples(
    make_bench: Any, num_blocks: int, num_answers: int, max_drafts: int, is_async: bool, moves: list[Any]
) -> None:
    live(make_bench, num_blocks, num_answers, max_drafts, is_async, moves)


def live(make_bench: Any, num_blocks: int, num_answers: int, max_drafts: int, is_async: bool, moves: list[Any]) -> None:
    bench = make_bench(
        num_blocks=num_blocks, max_batch=3, num_answers=num_answers, max_drafts=max_drafts, is_async=is_async
    )
    scheduler, blocks = bench.scheduler, bench.scheduler.blocks
    attempts = dict.fromkeys(NAMES, 0)
    first: dict[str, int] = {}
    expected: dict[str, list[int]] = {}
    ended: dict[Any, int] = {}

    def see(effects: list[Any] | None) -> None:
        for one in effects or ():
            if isinstance(one, Released):
                ended[one.key] = ended.get(one.key, 0) + 1
                assert ended[one.key] == 1, "released twice"
            if isinstance(one, TokenRow) and one.finish is FinishReason.LENGTH:
                name = one.key.request_id
                assert bench.sampled[name] == expected[name]
            if isinstance(one, FirstToken):
                name = one.key.request_id
                assert [*bench.sampled[name], one.token.token_id] == expected[name][: len(bench.sampled[name]) + 1]
        scheduler.check()

    for move, which, length, max_tokens in moves:
        name = NAMES[which]
        key = bench.key(name, attempts[name])
        stage = scheduler.stage(key)
        if move in ("local", "remote", "received") and stage is None:
            attempts[name] += 1
            prompt = [10 + which] * length
            bench.sampled.pop(name, None)
            max_tokens += 1  # So that the first token never ends the text.
            expected[name] = answer(prompt, max_tokens, num_answers=num_answers)[: num_blocks * 4 - length]
            # The bad word is never sampled. Its row is sampled late in an asynchronous step.
            bad = ((1, 2),) if which % 2 else ()
            effects = bench.offer(
                name,
                prompt,
                is_local=move == "local",
                attempt=attempts[name],
                max_tokens=max_tokens,
                bad_token_ids=bad,
            )
            if isinstance(effects[0], BlocksReserved):
                first[name] = bench.write(name, attempts[name])
            see(effects)
            if move == "received" and isinstance(effects[0], BlocksReserved):
                see(bench.receive(name, attempts[name]))
                see(bench.admit(name, first[name], attempts[name]))
        elif move == "receive" and stage in (DecodeStage.RECEIVING, DecodeStage.ENDING):
            see(bench.receive(name, attempts[name]))
        elif move == "admit" and stage is DecodeStage.RECEIVING and name in first:
            see(bench.admit(name, first[name], attempts[name]))
        elif move == "lose" and stage is DecodeStage.RECEIVING:
            see(scheduler.lost(key, "lost"))
        elif move == "cancel" and stage is not None:
            see(scheduler.cancel(key))
        elif move == "drained" and stage is DecodeStage.ENDING:
            see(scheduler.lost(key, "drained"))
        elif move == "send" and stage is DecodeStage.RUNNING and len(bench.sampled.get(name, ())) > 0:
            if scheduler.sequences.by_key[key].is_sending:
                continue
            see(scheduler.cancel(key))
            attempts[name] += 1
            prompt = bench.prompts[key]
            bench.prompts[bench.key(name, attempts[name])] = prompt
            bad = ((1, 2),) if which % 2 else ()
            num_tokens = len(expected[name])
            see(bench.send(name, prompt, attempts[name], max_tokens=num_tokens, bad_token_ids=bad))
        elif move == "sent" and stage is DecodeStage.SENDING:
            see(scheduler.sent(key, is_whole=True))
        elif move == "unsent" and stage is not None and scheduler.sequences.by_key[key].is_sending:
            see(scheduler.sent(key, is_whole=False, error="cut"))
        elif move == "step":
            see(bench.step())

    for key in scheduler.live():
        if scheduler.sequences.by_key[key].is_sending:
            see(scheduler.cancel(key))
            see(scheduler.sent(key, is_whole=False))
            continue
        stage = scheduler.stage(key)
        if stage in (DecodeStage.RECEIVING, DecodeStage.ENDING):
            see(scheduler.cancel(key))
            see(scheduler.lost(key, "drained"))
    see(bench.run())
    assert scheduler.live() == []
    assert blocks.num_referenced == 0
