"""Admission of grammars: reasons and limits, without delaying other callers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.grammar import Grammar, GrammarKind, choice
from pdserve.core.kv.kv_shape import Fingerprint, KvShape
from pdserve.core.types import Slo
from pdserve.text.tokenizer import load_tokenizer
from pdserve.v1 import inference_pb2
from router.service.admission import Admission, Limits
from router.service.model import ModelFacts
from router.service.text import child_pool
from router.service.text.child_pool import GrammarCheck
from router.service.text.fair_queue import ClientKey

FOLDER = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))
MODEL = ModelFacts(
    name=FOLDER.name,
    max_context_tokens=2048,
    vocab_size=4096,
    eos_token_ids=(0,),
    block_size=16,
    hash_seed=b"s" * 32,
    fingerprint=Fingerprint(
        protocol=1,
        model=FOLDER.name,
        engine="e",
        shape=KvShape(layout="toy.v1", dtype="uint64", num_layers=1, num_kv_heads=1, head_dim=1, block_size=16),
    ),
)
SLOW = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 999983}))  # seconds of CPU
GOOD = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    one = GrammarCheck(FOLDER)
    yield one
    await one.close()


async def refusal(check: GrammarCheck, grammar: Grammar, model: ModelFacts = MODEL) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await check.check(grammar, model)
    assert caught.value.field in (grammar.field, "structured_output")
    return str(caught.value)


def pids(check: GrammarCheck) -> list[int]:
    return [one.pid for pool in check.children.pools for one in pool.children if one.pid is not None]


async def test_grammar_results_are_cached(check: GrammarCheck) -> None:
    await check.check(GOOD, MODEL)
    assert len(pids(check)) == 1
    for _ in range(2):
        assert '"not" at #' in await refusal(check, Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'))
    assert "unclosed group" in await refusal(check, Grammar(GrammarKind.REGEX, "(a"))
    await check.close()
    await check.check(GOOD, MODEL)  # remembered: no process is needed
    assert '"not" at #' in await refusal(check, Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'))
    assert pids(check) == []


async def test_a_busy_compiler_can_be_retried() -> None:
    check = GrammarCheck(FOLDER, check_s=2.0)
    try:
        await check.check(GOOD, MODEL)
        os.killpg(pids(check)[0], signal.SIGSTOP)  # it gets no CPU
        longest_s = 0.0
        fine = Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["a"]}')
        waiting = asyncio.create_task(check.check(fine, MODEL))
        behind = asyncio.create_task(check.check(choice(["a", "b"]), MODEL))
        while not waiting.done():
            at_s = time.monotonic()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - at_s)
        with pytest.raises(Overloaded, match="too busy to compile a grammar"):
            await waiting
        assert longest_s < 1.9, "the event loop was held until the compiler's limit"
        await behind
        await check.check(fine, MODEL)
    finally:
        await check.close()


async def test_a_grammar_that_an_older_worker_refuses_is_rejected_while_it_is_there(check: GrammarCheck) -> None:
    """vLLM's environment has an older llguidance than the router's. The answer for other clusters is not reused."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 5}))
    lark = Grammar(GrammarKind.LARK, 'start: %json {"type": "integer", "multipleOf": 5}')
    older = replace(MODEL, has_older_grammars=True)
    await check.check(grammar, MODEL)
    for one in (grammar, lark):
        assert 'a worker\'s llguidance, before 1.9, needs a "minimum"' in await refusal(check, one, older)
    await check.check(GOOD, older)
    await check.check(grammar, MODEL)
    await check.check(lark, MODEL)


async def test_a_slow_grammar_is_ended_and_cached() -> None:
    check = GrammarCheck(FOLDER, check_s=60.0)
    try:
        refused = await refusal(check, SLOW)
        why = child_pool.TOO_LONG_TO_COMPILE
        assert refused == f"json_schema: got one that cannot be used ({why}), expected {child_pool.EXPECTED}"
        alive = pids(check)
        assert len(alive) == 2, "a slow grammar ends a child, and no process with a vocabulary"
        await check.check(GOOD, MODEL)
        assert pids(check) == alive
        await check.close()
        assert await refusal(check, SLOW) == refused
        assert pids(check) == [], "it was asked about again"
    finally:
        await check.close()


async def test_a_quick_grammar_does_not_wait_for_slow_ones() -> None:
    """The slow ones' processes get no CPU: only the order decides."""
    check = GrammarCheck(FOLDER, check_s=60.0)
    try:
        with pytest.raises(InvalidRequest):
            await check.check(SLOW, MODEL)  # starts a process of each kind
        slow_pid = check.children.pools[1].children[-1].pid or check.children.pools[1].children[0].pid
        assert slow_pid is not None
        os.killpg(slow_pid, signal.SIGSTOP)
        number = iter(range(100))
        others = [
            asyncio.create_task(check.check(slow(next(number)), MODEL, ClientKey("other", f"other:{port}")))
            for port in range(8)
        ]
        fine = choice(["a", "b"])
        await asyncio.wait_for(check.check(fine, MODEL, ClientKey("mine", "mine:1")), 60)
        assert not all(one.done() for one in others)
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    finally:
        await check.close()


def slow(number: int) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 999983 + 2 * number}))


async def test_a_killed_checker_does_not_reject_the_grammar() -> None:
    check = GrammarCheck(FOLDER, check_s=30.0)
    try:
        await check.check(GOOD, MODEL)
        os.killpg(pids(check)[0], signal.SIGKILL)
        fine = choice(["a", "b"])
        with pytest.raises(Overloaded, match="was killed"):
            await check.check(fine, MODEL)
        await check.check(fine, MODEL)
    finally:
        await check.close()


async def test_a_disconnected_caller_does_not_delay_the_next(check: GrammarCheck) -> None:
    leaving = asyncio.create_task(check.check(GOOD, MODEL))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert "unclosed" in await refusal(check, Grammar(GrammarKind.REGEX, "(a"))
    await check.check(GOOD, MODEL)


async def test_equal_grammars_are_checked_once_and_many_are_limited(check: GrammarCheck) -> None:
    await asyncio.gather(*(check.check(GOOD, MODEL) for _ in range(200)))
    many = [check.check(choice([str(number)]), MODEL) for number in range(child_pool.QUEUE.of_client + 6)]
    results = await asyncio.gather(*many, return_exceptions=True)
    # One of them is being checked, and does not wait.
    assert [type(one) for one in results if one is not None] == [Overloaded] * 5


async def test_a_model_without_grammar_support_rejects_each() -> None:
    assert "does not support them" in await refusal(GrammarCheck(None), GOOD)
    for folder, ends in ((FOLDER, ()), (FOLDER.parent, (0,))):
        check = GrammarCheck(folder)
        model = ModelFacts(
            **{name: getattr(MODEL, name) for name in MODEL.__slots__ if name != "eos_token_ids"}, eos_token_ids=ends
        )
        assert "expected none" in await refusal(check, GOOD, model)
        await check.close()


async def test_admission_refuses_before_a_request_is_placed() -> None:
    limits = Limits(max_new_tokens=100, default_slo=Slo(), request_timeout_s=60.0)
    check = GrammarCheck(FOLDER)
    admission = Admission(load_tokenizer(str(FOLDER)), None, limits, check)
    try:
        message = inference_pb2.GenerateRequest(text="hello")
        message.sampling.structured_output.json_schema = GOOD.text
        assert (await admission.prepare(message, MODEL, None)).sampling.grammar == GOOD
        message.sampling.structured_output.json_schema = "false"
        with pytest.raises(InvalidRequest, match=r"json_schema: got one that cannot be used \(Unsatisfiable"):
            await admission.prepare(message, MODEL, None)
    finally:
        await admission.close()
        await check.close()
