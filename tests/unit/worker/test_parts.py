"""The small parts of a worker: the stall rule, the outbox, the cost prior, the isolation of bad rows, the step times
that it reports."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.access.gate import MOST_PACE_S
from pdserve.core.attempt import AttemptKey
from pdserve.core.effects import PlainTokens, PromptScored, StepAccount
from pdserve.core.errors import InternalError
from pdserve.core.kv.blocks import BlockAllocator
from pdserve.core.kv.cache import KvCache
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.interface import Row, RowOut
from pdserve.engine.toy import ToyEngine
from pdserve.profiles import load_profile
from pdserve.v1 import inference_pb2, worker_pb2
from pdserve.worker import calibrate, messages
from pdserve.worker.engine_thread import StallRule, Watchdog
from pdserve.worker.reports import LONGEST_SPANS, STEPS, TimedSteps
from pdserve.worker.session import SessionOutbox
from pdserve.worker.steps import MAX_BARREN_STEPS, EngineBroken, Isolation, RowFailed

# -- the stall rule --------------------------------------------------------------------------------------------


def test_a_thread_hangs_if_it_is_busy_with_one_beat_for_too_long() -> None:
    rule = StallRule(stall_s=2.0)
    looks = [(False, 0, 0.0), (True, 1, 1.0), (True, 1, 2.9), (True, 2, 3.0), (True, 2, 4.9), (True, 2, 5.0)]
    assert [rule.look(is_busy=busy, beats=beats, now_s=now_s) for busy, beats, now_s in looks] == [False] * 5 + [True]


def test_an_idle_thread_never_hangs() -> None:
    rule = StallRule(stall_s=2.0)
    assert not any(rule.look(is_busy=False, beats=7, now_s=now_s) for now_s in range(100))
    assert not rule.look(is_busy=True, beats=8, now_s=100.0)


def test_the_watchdog_calls_once() -> None:
    class Hung:
        is_busy, beats = True, 1

    calls: list[float] = []
    watchdog = Watchdog(Hung(), 0.05, lambda: calls.append(time.monotonic()))
    watchdog.start()
    watchdog._thread.join(60.0)
    assert len(calls) == 1


# -- messages --------------------------------------------------------------------------------------------------


def test_prompt_scores_are_sent_in_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_SCORED", 12)
    tokens = tuple(TokenOut(token_id=n, logprob=-1.0, top=((n, -1.0), (0, -2.0))) for n in range(9))
    effect = PromptScored(key=AttemptKey(1, "a", 2), first_position=5, tokens=tokens)
    sent = list(messages.prompt_scored(effect))
    assert [(one.scores.first_position, len(one.scores.tokens)) for one in sent] == [(5, 4), (9, 4), (13, 1)]
    assert [token.token_id for one in sent for token in one.scores.tokens] == list(range(9))
    assert {(one.request_id, one.attempt) for one in sent} == {("a", 2)}


async def test_scores_fill_an_outbox_as_token_rows_do() -> None:
    scores = inference_pb2.PromptLogprobs(tokens=[inference_pb2.TokenLogprobs(token_id=1, logprob=-1.0)] * 1000)
    outbox = SessionOutbox(limit=100)
    outbox.put([worker_pb2.AttachResponse(prompt_scored=worker_pb2.PromptScored(scores=scores))])
    assert outbox.is_closed


# -- the outbox ------------------------------------------------------------------------------------------------


async def test_messages_leave_the_outbox_in_order() -> None:
    outbox = SessionOutbox()
    messages = [worker_pb2.AttachResponse(load=worker_pb2.Load(steps=n)) for n in range(5)]
    outbox.put(messages[:2])
    seen = []

    async def read() -> None:
        async for message in outbox:
            seen.append(message.load.steps)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    outbox.put(messages[2:])
    while len(seen) < 5:
        await asyncio.sleep(0)
    outbox.close()
    await asyncio.wait_for(reader, 60)
    assert seen == [0, 1, 2, 3, 4]


async def test_an_unread_outbox_closes_at_its_limit() -> None:
    outbox = SessionOutbox(limit=3)
    outbox.put([worker_pb2.AttachResponse()] * 3)
    assert not outbox.is_closed
    outbox.put([worker_pb2.AttachResponse()])
    assert outbox.is_closed
    assert [message async for message in outbox] == []


async def test_ready_messages_are_batched_except_cache_changes() -> None:
    outbox, seen = SessionOutbox(is_batching=True), []
    loads = [worker_pb2.AttachResponse(load=worker_pb2.Load(steps=n)) for n in range(5)]
    change = worker_pb2.AttachResponse(kv_events=worker_pb2.KvEvents(sequence=7))
    outbox.put([*loads[:3], change, change, *loads[3:4]])
    async for message in outbox:
        seen.append(message)
        if len(seen) == 4:
            outbox.put(loads[4:])
        if len(seen) == 5:
            outbox.close()
    assert [one.load.steps for one in seen[0].batch.messages] == [0, 1, 2]
    assert seen[1:] == [change, change, *loads[3:]]


def pace(interval_s: float = 0.0, tokens_interval_s: float = 0.0) -> worker_pb2.SetPace:
    return worker_pb2.SetPace(interval_s=interval_s, tokens_interval_s=tokens_interval_s)


async def reading(outbox: SessionOutbox, seen: list[list[str]]) -> None:
    async for message in outbox:
        ones = message.batch.messages if message.HasField("batch") else [message]
        seen.append([one.WhichOneof("message") or "" for one in ones])


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_pace_merges_what_becomes_ready_meanwhile() -> None:
    """In the first part, nothing follows the first message: the pace is longer than the test."""
    load = worker_pb2.AttachResponse(load=worker_pb2.Load())
    granted = worker_pb2.AttachResponse(granted=worker_pb2.Granted())
    outbox, seen = SessionOutbox(is_batching=True), list[list[str]]()
    outbox.set_pace(pace(math.nan, -1.0))
    assert (outbox._pace_s, outbox._tokens_s) == (MOST_PACE_S, 0.0)
    outbox._pace_s = 1000.0
    reader = asyncio.create_task(reading(outbox, seen))
    for _ in range(3):
        outbox.put([granted])
        await turns()
    assert seen == [["granted"]]
    outbox.set_pace(pace())
    await turns()
    assert seen == [["granted"], ["granted"] * 2]
    outbox.set_pace(pace(0.001))
    for one in (load, granted, load, load, granted):
        outbox.put([one])
        await turns(1)
    while sum(map(len, seen)) < 8:
        await asyncio.sleep(0.001)
    assert [kind for kinds in seen[2:] for kind in kinds] == ["load", "granted", "load", "load", "granted"]
    outbox.close()
    await asyncio.wait_for(reader, 60)


async def test_tokens_wait_for_others_and_for_nothing_urgent() -> None:
    plain = worker_pb2.PlainTokens(request_ids=["a"], attempts=[1], output_indexes=[3], token_ids=[1])
    row = worker_pb2.TokenRow(request_id="a", finish=inference_pb2.FINISH_REASON_LENGTH)
    step = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(plain=plain))
    last = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(rows=[row]))
    first = worker_pb2.AttachResponse(first_token=worker_pb2.FirstToken())
    timed = worker_pb2.AttachResponse(batch_timed=worker_pb2.BatchTimed())
    outbox, seen = SessionOutbox(is_batching=True), list[list[str]]()
    outbox._tokens_s = 1000.0
    reader = asyncio.create_task(reading(outbox, seen))
    outbox.put([first])
    await turns()
    for _ in range(3):
        outbox.put([step, timed])
        await turns()
    assert seen == [["first_token"]]
    outbox.put([first])
    await turns()
    assert seen[1:] == [["tokens", "batch_timed"] * 3 + ["first_token"]], "waiting tokens go with the first urgent one"
    outbox.put([step])
    await turns()
    outbox.put([last])
    await turns()
    assert seen[2:] == [["tokens"]], "an answer's end waits for nothing"
    outbox.set_pace(pace(tokens_interval_s=0.001))
    outbox.put([step])
    while len(seen) < 4:
        await asyncio.sleep(0.001)
    outbox.close()
    await asyncio.wait_for(reader, 60)


async def test_a_batch_is_bounded() -> None:
    outbox, sizes = SessionOutbox(is_batching=True), []
    row = worker_pb2.TokenRow(request_id="a", tokens=[worker_pb2.Token(token_id=1)])
    load = worker_pb2.AttachResponse(load=worker_pb2.Load())
    step = worker_pb2.AttachResponse(tokens=worker_pb2.Tokens(rows=[row] * 600))
    outbox.put([load, step, load, step, load, step])
    async for message in outbox:
        sizes.append([len(one.tokens.rows) for one in message.batch.messages] or len(message.tokens.rows))
        if len(sizes) == 2:
            outbox.close()
    assert sizes == [[0, 600, 0, 600], [0, 600]]


async def test_waiting_steps_are_merged_in_order() -> None:
    outbox, seen = SessionOutbox(), []
    plain = worker_pb2.PlainTokens(request_ids=["a"], attempts=[1], output_indexes=[3], token_ids=[1])
    row = worker_pb2.TokenRow(request_id="a", tokens=[worker_pb2.Token(token_id=2)])
    steps = [worker_pb2.Tokens(plain=plain), worker_pb2.Tokens(plain=plain, rows=[row]), worker_pb2.Tokens(plain=plain)]
    outbox.put([worker_pb2.AttachResponse(tokens=one) for one in steps])
    async for message in outbox:
        seen.append((len(message.tokens.plain.token_ids), len(message.tokens.rows)))
        if len(seen) == 2:  # Plain tokens are read before rows, so they cannot follow one.
            outbox.close()
    assert seen == [(2, 1), (1, 0)]


def test_each_router_gets_the_plain_tokens_of_its_requests() -> None:
    keys = [AttemptKey(2, "a", 1), AttemptKey(1, "b", 3), AttemptKey(2, "c", 1)]
    effect = PlainTokens(keys=keys, output_indexes=[4, 5, 6], token_ids=[7, 8, 9])
    assert dict(messages.plain_tokens(effect)) == {
        1: worker_pb2.PlainTokens(request_ids=["b"], attempts=[3], output_indexes=[5], token_ids=[8]),
        2: worker_pb2.PlainTokens(request_ids=["a", "c"], attempts=[1, 1], output_indexes=[4, 6], token_ids=[7, 9]),
    }


# -- the cost prior --------------------------------------------------------------------------------------------


class PricedEngine(ToyEngine):
    """A toy engine whose steps take the time of the closed form."""

    def __init__(self, clock: Any) -> None:
        super().__init__(num_blocks=512, max_context_tokens=4096)
        self._clock = clock

    def step(self, rows: Any) -> Any:
        for row in rows:
            count = len(row.tokens)
            self._clock.now_s += 2e-5 * count + 3e-8 * count * (row.start + count / 2) + 4e-6
        self._clock.now_s += 1e-3
        return super().step(rows)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_calibration_finds_the_engines_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)
    cost = calibrate.measure_cost(PricedEngine(clock), Role.DECODE, max_batch=32, max_batch_tokens=512, budget_s=10.0)
    assert cost.prefill_base_s == pytest.approx(1.004e-3, rel=1e-3)
    assert cost.prefill_per_token_s == pytest.approx(2e-5, rel=1e-3)
    assert cost.prefill_per_token_context_s == pytest.approx(3e-8, rel=1e-3)
    assert cost.decode_base_s == pytest.approx(1e-3, rel=1e-2)
    assert cost.decode_per_row_s == pytest.approx(2.4e-5, rel=1e-2)
    assert cost.decode_per_context_token_s == pytest.approx(3e-8, rel=1e-2)


@pytest.mark.parametrize(("num_cached", "num_left"), [(300, 300), (512, 480)])
def test_a_pool_in_use_is_measured_beside_its_cache(
    monkeypatch: pytest.MonkeyPatch, num_cached: int, num_left: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)
    monkeypatch.setattr(calibrate, "BUDGET_S", 10.0)
    engine, config = PricedEngine(clock), WorkerConfig(model="toy", worker_id="d", max_batch=32)
    kv = KvCache(BlockAllocator(512), 16)
    blocks = kv.extend(num_cached)
    assert blocks is not None
    kv.commit(blocks, [bytes([number // 256, number % 256] * 8) for number in range(num_cached)], 0, num_cached)
    kv.release(blocks)
    before = {block: bytes(engine.pool.buffer[block * 128 : block * 128 + 128]) for block in blocks}
    known = replace(calibrate.UNKNOWN, prefill_base_s=1.0)
    assert calibrate.calibrate_again(engine, Role.PREFILL, config, known, kv) == known
    cost = calibrate.calibrate_again(engine, Role.DECODE, config, known, kv)
    assert cost.prefill_base_s == 1.0
    assert cost.decode_base_s == pytest.approx(1e-3, rel=2e-2)
    assert cost.decode_per_row_s == pytest.approx(2.4e-5, rel=2e-2)
    assert calibrate.calibrate_again(engine, Role.DECODE, config, cost, kv) == cost
    assert (kv.blocks.num_evictable, kv.blocks.num_referenced) == (num_left, 0)
    same = [block for block in blocks if bytes(engine.pool.buffer[block * 128 : block * 128 + 128]) == before[block]]
    assert len(same) >= num_left
    kv.blocks.check([])


@pytest.mark.parametrize(("num_blocks", "max_batch", "max_batch_tokens"), [(1, 1, 1), (2, 64, 512), (3, 2, 1)])
def test_a_small_pool_still_gives_a_prior(num_blocks: int, max_batch: int, max_batch_tokens: int) -> None:
    engine = ToyEngine(num_blocks=num_blocks, block_size=2, step_s=0.001)
    cost = calibrate.measure_cost(engine, Role.DECODE, max_batch=max_batch, max_batch_tokens=max_batch_tokens)
    values = [getattr(cost, name) for name in cost.__dataclass_fields__]
    assert all(value >= 0.0 and math.isfinite(value) for value in values)
    assert cost.prefill_base_s + cost.prefill_per_token_s + cost.prefill_per_token_context_s > 0.0


def test_calibration_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step of each kind takes all of it."""
    num_steps, step = 0, ToyEngine.step

    def counted(self: ToyEngine, *args: Any, **named: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return step(self, *args, **named)

    monkeypatch.setattr(ToyEngine, "step", counted)
    engine = ToyEngine(num_blocks=256, step_s=0.06)
    calibrate.measure_cost(engine, Role.DECODE, max_batch=64, max_batch_tokens=512, budget_s=0.1)
    assert 2 <= num_steps <= 4


SLOW_S = 0.3  # longer than another process takes the core


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_first_step_that_compiles_is_no_measure_on_a_gpu(is_on_host: bool) -> None:
    seen: list[Any] = []

    def step(rows: Any) -> None:
        if rows not in seen:
            time.sleep(SLOW_S)
        seen.append(rows)

    engine: Any = SimpleNamespace(step=step, pool=SimpleNamespace(is_on_host=is_on_host))
    sizes: Any = iter([("first size", (1.0, 1.0, 1.0)), ("second size", (1.0, 2.0, 2.0))])
    [sample] = calibrate._time(engine, sizes, SLOW_S / 2)
    assert len(seen) == (1 if is_on_host else 2)
    assert (sample.seconds >= SLOW_S) == is_on_host


@pytest.mark.parametrize(
    ("per_token_s", "num_blocks", "expected"), [(1e-3, 512, 512), (4e-3, 512, 128), (9.0, 512, 1), (1e-3, 4, 64)]
)
def test_a_warm_up_runs_the_longest_prompt_that_takes_a_second(
    per_token_s: float, num_blocks: int, expected: int
) -> None:
    class CountingEngine(ToyEngine):
        def step(self, rows: Any) -> Any:
            counts.append(sum(len(row.tokens) for row in rows))
            return super().step(rows)

    counts: list[int] = []
    engine = CountingEngine(num_blocks=num_blocks, block_size=16, max_context_tokens=4096)
    cost = replace(calibrate.UNKNOWN, prefill_per_token_s=per_token_s)
    calibrate.warm_up(engine, cost, max_batch_tokens=512)
    assert counts == [expected]


def test_a_worker_with_a_profile_uses_it_and_measures_nothing(start: Any) -> None:
    name = "h100-sxm.llama-3.1-8b.bf16"
    assert start(Role.PREFILL, profile=name).program.cost == load_profile(name).cost


def test_an_engine_without_a_token_is_not_ready() -> None:
    class Mute(ToyEngine):
        def step(self, rows: Any) -> Any:
            return [RowOut() for _ in rows]

    with pytest.raises(InternalError, match="first step"):
        calibrate.draw_one_token(Mute())


# -- isolation -------------------------------------------------------------------------------------------------


class Picky(ToyEngine):
    """Raises on a step that contains token 7, and on every step once it is broken."""

    is_broken = False

    def step(self, rows: Any) -> Any:
        if self.is_broken or any(7 in row.tokens for row in rows):
            raise ValueError("no")
        return super().step(rows)


def row(token: int, block: int) -> Row:
    greedy = Sampling(temperature=0.0)
    return Row(tokens=[token], start=0, blocks=[block], sample=greedy, history=[token], prompt_len=1)


def test_a_bad_row_fails_alone() -> None:
    engine = Picky()
    isolation = Isolation(engine, lambda: row(1, 9))
    good, bad, fine = isolation.step([row(1, 0), row(7, 1), row(2, 2)])
    assert [good, fine] == engine.step([row(1, 0), row(2, 2)])
    assert bad == RowFailed("ValueError: no")
    assert isolation.step([row(7, 1)]) == [RowFailed("ValueError: no")]


def test_an_engine_that_fails_the_probe_is_broken() -> None:
    engine = Picky()
    engine.is_broken = True
    with pytest.raises(EngineBroken):
        Isolation(engine, lambda: row(1, 9)).step([row(1, 0), row(2, 1)])


def test_without_a_free_block_several_failed_steps_are_needed() -> None:
    engine = Picky()
    isolation = Isolation(engine, lambda: None)
    for _ in range(MAX_BARREN_STEPS - 1):
        isolation.step([row(7, 0)])
    isolation.step([row(1, 0)])
    for _ in range(MAX_BARREN_STEPS - 1):
        isolation.step([row(7, 0)])
    with pytest.raises(EngineBroken):
        isolation.step([row(7, 0)])


# -- step times that are reported ------------------------------------------------------------------------------

READS = StepAccount(prefill_tokens=64, prefill_token_context=2048.0)


def decodes(rows: int, context_tokens: int) -> StepAccount:
    return StepAccount(decode_rows=rows, context_tokens=context_tokens)


def test_equal_decode_steps_are_reported_as_a_mean() -> None:
    steps = TimedSteps(0.025)
    for number in range(STEPS - 1):
        assert steps.observe(decodes(2, 100 + 2 * number), 0.004, 0.004 * number) is None
    assert steps.observe(decodes(2, 100 + 2 * (STEPS - 1)), 0.012, 0.1) == (
        decodes(2, 100 + STEPS - 1),
        pytest.approx((0.004 * (STEPS - 1) + 0.012) / STEPS),
    )
    assert steps.observe(decodes(2, 120), 0.004, 0.2) is None, "the next mean begins anew"


def test_steps_with_other_rows_are_averaged_separately() -> None:
    steps = TimedSteps(0.025)
    told = []
    for number in range(2 * STEPS):
        rows = 2 + number % 2
        told.append(steps.observe(decodes(rows, 100 * rows), 0.002 * rows, 0.005 * number))
    assert told[:-2] == [None] * (2 * STEPS - 2)
    assert told[-2] == (decodes(2, 200), pytest.approx(0.004))
    assert told[-1] is None, "so soon after the other"
    assert steps.observe(decodes(3, 300), 0.006, 1.0) == (decodes(3, 300), pytest.approx(0.006))


def test_slow_periods_count_by_steps() -> None:
    steps, told, now_s = TimedSteps(0.025), [], 0.0
    for number in range(100 * STEPS):
        step_s = 0.004 if number // STEPS % 2 else 0.012
        now_s += step_s
        found = steps.observe(decodes(1, 50), step_s, now_s)
        if found is not None:
            told.append(found[1])
    assert sum(told) / len(told) == pytest.approx(0.008, rel=0.02)


def test_long_steps_are_not_waited_for() -> None:
    steps = TimedSteps(0.025)
    assert steps.observe(decodes(1, 50), LONGEST_SPANS * 0.025, 1.0) == (decodes(1, 50), LONGEST_SPANS * 0.025)


def test_a_prefill_step_is_reported_individually() -> None:
    steps = TimedSteps(1.0)
    mixed = StepAccount(decode_rows=2, context_tokens=100, prefill_tokens=64, prefill_token_context=2048.0)
    assert steps.observe(decodes(2, 100), 0.010, 0.0) is None
    assert steps.observe(mixed, 0.2, 0.5) == (mixed, 0.2)
    assert steps.observe(READS, 0.1, 1.1) is None
    assert steps.observe(READS, 0.1, 1.6) == (READS, 0.1)


def test_short_steps_are_not_reported_more_often() -> None:
    steps = TimedSteps(1.0)
    told = [number for number in range(3000) if steps.observe(decodes(1, 50), 0.001, 0.001 * number) is not None]
    assert told == [STEPS - 1, 1000 + STEPS - 1, 2000 + STEPS - 1]
