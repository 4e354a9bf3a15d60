"""Cancels at each stage: all memory is freed, nothing too early, and other requests are not affected."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2

PROMPT = list(range(10, 70))


def cancel(name: str, attempt: int = 1) -> worker_pb2.Cancel:
    return worker_pb2.Cancel(request_id=name, attempt=attempt)


def is_empty(program: Any) -> bool:
    program.check()
    return program.is_idle and program.blocks.num_referenced == 0


async def test_cancel_of_an_unfilled_reservation(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT)))
    await router.next("granted", "r")
    await router.send(Role.DECODE, cancel=cancel("r"))
    await router.released("r", Role.DECODE)
    assert await d.on_engine(is_empty)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("order", [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)])
async def test_cancel_while_a_prompt_is_read_and_sent(
    start: Any, attach: Any, ask: Any, order: tuple[Role, Role], transport: str
) -> None:
    p = start(Role.PREFILL, toy_step_s=0.02, max_batch_tokens=4, transport=transport)
    d = start(Role.DECODE, transport=transport)
    router = await attach(p, d)
    sequence = ask("r", PROMPT)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    steps = p.program.num_steps
    await p.until(lambda program: program.num_steps >= steps + 4, "four chunks")
    for role in order:
        await router.send(role, cancel=cancel("r"))
    for role in order:
        await router.released("r", role)
    assert router.all("first_token", "r") == []
    assert await p.on_engine(is_empty)
    assert await d.on_engine(is_empty)
    assert await router.remote(ask("next", PROMPT)) == answer(PROMPT, 8, prefilled=len(PROMPT))


async def test_cancel_of_a_prompt_in_the_inbox(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, toy_step_s=0.02, max_batch_tokens=4), start(Role.DECODE)
    router = await attach(p, d)
    for name in ("first", "second"):
        sequence = ask(name, PROMPT)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
        granted = await router.next("granted", name)
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    for role in (Role.PREFILL, Role.DECODE):
        await router.send(role, cancel=cancel("second"))
        await router.released("second", role)
    first = await router.next("first_token", "first")
    admit = worker_pb2.Admit(request_id="first", attempt=1, first_token_id=first.token.token_id)
    await router.send(Role.DECODE, admit=admit)
    tokens = [first.token.token_id, *await router.finished("first")]
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))


@pytest.mark.parametrize("is_local", [True, False])
async def test_cancel_while_decoding_stops_the_tokens(start: Any, attach: Any, ask: Any, is_local: bool) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE, toy_step_s=0.005)
    router = await attach(p, d)
    sequence = ask("r", PROMPT, max_tokens=150)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=is_local))
    granted = await router.next("granted", "r")
    if not is_local:
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
        first = await router.next("first_token", "r")
        admit = worker_pb2.Admit(request_id="r", attempt=1, first_token_id=first.token.token_id)
        await router.send(Role.DECODE, admit=admit)
    await router.wait_for(lambda: len(router.rows("r")) >= 5)
    await router.send(Role.DECODE, cancel=cancel("r"))
    await router.released("r", Role.DECODE)
    kinds = [kind for role, kind, message in router.seen if role is Role.DECODE and kind in ("tokens", "released")]
    assert kinds[-1] == "released"
    assert not any(row.finish for row in router.rows("r"))
    assert await d.on_engine(is_empty)


async def test_cancelling_an_unknown_attempt_is_answered(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    await router.remote(ask("r", PROMPT))
    for role in (Role.PREFILL, Role.DECODE):
        before = len(router.all("released", "r", role))
        await router.send(role, cancel=cancel("r"))
        await router.wait_for(lambda role=role, before=before: len(router.all("released", "r", role)) == before + 1)
        await router.send(role, cancel=cancel("nobody"))
        await router.released("nobody", role)
