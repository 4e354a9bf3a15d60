"""Requests through real workers over real gRPC, on both paths: tokens and memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.durations import DAY_S
from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from tests.unit.worker.conftest import BUILDS

PROMPT = list(b"The quick brown fox jumps over it")


async def test_the_remote_path_gives_the_engines_tokens(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    tokens = await router.remote(ask("r", PROMPT, max_tokens=8))
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))
    ended = router.all("transfer_ended", "r")
    assert [one.is_committed for one in ended] == [True, True]
    told_by_p, told_by_d = sorted(ended, key=lambda one: one.num_bytes)
    assert told_by_d.num_bytes == 9 * d.program.engine.spec.block_bytes
    assert 0.0 < told_by_d.busy_s <= told_by_d.transfer_s
    assert told_by_p.exposed_s > 0.0
    [granted] = router.all("granted", "r")
    assert granted.grant_s > 0.0


async def test_the_local_path_gives_the_engines_tokens(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    assert await router.local(ask("r", PROMPT, max_tokens=8)) == answer(PROMPT, 8)


async def test_clocks_that_go_back_give_no_negative_duration(
    start: Any, attach: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers refuse a message with one. Each reading is up to 10 s before the last one."""
    rng = random.Random(1)
    for role, build in BUILDS.items():
        monkeypatch.setitem(
            BUILDS,
            role,
            lambda context, load, build=build: build(replace(context, now=lambda: 1e6 - 10.0 * rng.random()), load),
        )
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    assert await router.remote(ask("r", PROMPT)) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert await router.local(ask("l", [1, *PROMPT])) == answer([1, *PROMPT], 8)
    messages = [message for _, kind, message in router.seen if kind != "ended"]
    found = [named for message in messages for named in durations_of(message)]
    assert {"grant_s", "prefill_s", "transfer_s"} <= {name for name, _ in found}
    assert [one for one in found if not 0.0 <= one[1] < DAY_S] == []


def durations_of(message: Any) -> Iterator[tuple[str, float]]:
    """The fields of the message, and of those in it, whose unit is a second."""
    for field, value in message.ListFields():
        for one in value if field.is_repeated else [value]:
            if field.message_type is not None:
                yield from durations_of(one)
            elif field.name.endswith("_s"):
                yield field.name, one


async def test_many_requests_at_once_do_not_mix(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy")
    router = await attach(p, d)
    prompts = {f"r{n}": list(range(1, 5 + 3 * n)) for n in range(8)}
    tokens = await asyncio.gather(
        *(
            (router.remote if n % 2 else router.local)(ask(name, prompt, max_tokens=10 + n))
            for n, (name, prompt) in enumerate(prompts.items())
        )
    )
    for n, (prompt, got) in enumerate(zip(prompts.values(), tokens, strict=True)):
        assert got == answer(prompt, 10 + n)


async def test_a_cached_prefix_is_not_transferred_again(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy")
    router = await attach(p, d)
    assert await router.remote(ask("first", PROMPT)) == answer(PROMPT, 8)
    again = [*PROMPT, 65, 66]
    assert await router.remote(ask("again", again)) == answer(again, 8)
    moved = {
        one.request_id: one.num_bytes // d.program.engine.spec.block_bytes
        for one in router.all("transfer_ended")
        if one.num_bytes
    }
    saved = {
        one.request_id: one.saved_bytes // d.program.engine.spec.block_bytes
        for one in router.all("transfer_ended")
        if one.num_bytes
    }
    assert saved == {"first": 0, "again": 8}
    assert moved == {"first": 9, "again": 1}  # The ninth block of "again" is not full in the prompt of "first".
    assert router.all("first_token", "again")[0].cached_tokens == 32


async def test_a_prefill_worker_learns_link_and_slowdown(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, model="toy", max_batch_tokens=8), start(Role.DECODE, model="toy")
    router = await attach(p, d)
    assert await router.remote(ask("r", PROMPT)) == answer(PROMPT, 8)
    block_bytes = d.program.engine.spec.block_bytes
    links, moved = await p.on_engine(lambda one: (one.scheduler.pushing._links, one._sender.moved_bytes))
    assert moved == 9 * block_bytes
    assert {name: link.num_samples for name, link in links.items()} == {"decode-0": 1}
    assert await p.on_engine(lambda one: one.scheduler.pushing._step.num_samples) == -(-len(PROMPT) // 8)


async def test_preemption_changes_no_token_and_is_reported(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, kv_blocks=10, model="toy", toy_step_s=0.01)  # Slow enough that all three overlap.
    router = await attach(d)
    prompts = {name: [n + 11, n + 12, n + 13] for n, name in enumerate("abc")}
    tokens = await asyncio.gather(
        *(router.local(ask(name, prompt, max_tokens=24, temperature=1.0, seed=7)) for name, prompt in prompts.items())
    )
    assert tokens == [answer(prompt, 24, seed=7) for prompt in prompts.values()]
    assert sum(row.preemptions for name in prompts for row in router.rows(name)) > 0


async def test_an_empty_pool_refuses_rather_than_waits(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, kv_blocks=10)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("a", list(range(10, 40)))))
    await router.next("granted", "a")
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("b", list(range(10, 40)))))
    refused = await router.next("refused", "b")
    assert refused.reason == worker_pb2.REFUSAL_REASON_NO_BLOCKS
    assert refused.retry_after_s > 0
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="a", attempt=1))
    await router.released("a", Role.DECODE)


async def test_a_grant_does_not_wait_for_the_next_step(start: Any, attach: Any, ask: Any) -> None:
    step_s = 0.4
    d = start(Role.DECODE, model="toy", toy_step_s=step_s)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("resident", PROMPT), is_local=True))
    await router.wait_for(lambda: len(router.rows("resident")) >= 2)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("newcomer", PROMPT)))
    before = len(router.rows("resident"))
    await router.wait_for(lambda: len(router.rows("resident")) > before)  # The step during which Reserve arrived.
    await router.next("granted", "newcomer")
    assert len(router.rows("resident")) == before + 1, "the grant came behind another step"
    for name in ("resident", "newcomer"):
        await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id=name, attempt=1))
        await router.released(name, Role.DECODE)
