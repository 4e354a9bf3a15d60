"""Answers move from one decode worker to another with their KV, over real gRPC: tokens, bytes, memory and failures.

With `toy-marked`, the cells of a prompt that a prefill worker has computed differ from those that a decode worker would
compute, so the tokens show that its KV was sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.interface import OnLayer, Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from tests.support.slow import slow_except
from tests.unit.worker.conftest import DEADLINE_S

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes
MAX_TOKENS = 60
SLOW = {"toy_step_s": 0.02}


async def begin(router: Any, sequence: worker_pb2.Sequence, num_tokens: int) -> tuple[int, ...]:
    """Computes the prompt on the prefill worker, and at least `num_tokens` tokens in all. Cancels the attempt on the
    decode worker, and returns the first `num_tokens`: a fast worker may have computed the whole answer by then."""
    name = sequence.request_id
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", name)
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    first = await router.next("first_token", name, Role.PREFILL)
    token_id = first.token.token_id
    await router.send(Role.DECODE, admit=worker_pb2.Admit(request_id=name, attempt=1, first_token_id=token_id))
    await router.wait_for(lambda: len(router.text(name)) >= num_tokens - 1)
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id=name, attempt=1))
    await router.released(name, Role.DECODE)
    return (token_id, *router.text(name))[:num_tokens]


async def order(source: Any, target: Any, sequence: worker_pb2.Sequence) -> None:
    """Reserves blocks on the target, and orders the source to fill them."""
    await target.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await target.next("granted", sequence.request_id)
    await source.send(Role.DECODE, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))


async def finish(source: Any, target: Any, name: str) -> list[int]:
    """The tokens of attempt 2, of which the first comes from the source."""
    first = await source.next("first_token", name, Role.DECODE)
    admit = worker_pb2.Admit(request_id=name, attempt=2, first_token_id=first.token.token_id)
    await target.send(Role.DECODE, admit=admit)
    rest = await target.finished(name, 2)
    await source.released(name, Role.DECODE, 2)
    return [first.token.token_id, *rest]


def no_block_is_used(program: Any) -> bool:
    program.check()
    return program.is_idle and program.blocks.num_referenced == 0


@pytest.mark.parametrize("transport", slow_except(["tcp", "shm"], "shm"))
@pytest.mark.parametrize("num_tokens", [4, 5, 9])  # a text ends at the end of a block, or in it
async def test_an_answer_moves_with_its_kv(start: Any, attach: Any, ask: Any, transport: str, num_tokens: int) -> None:
    p, d0 = start(Role.PREFILL, transport=transport), start(Role.DECODE, transport=transport, **SLOW)
    d1 = start(Role.DECODE, worker_id="decode-1", transport=transport)
    source, target = await attach(p, d0), await attach(d1)
    assert source.hellos[Role.DECODE].sends_kv
    assert not source.hellos[Role.PREFILL].sends_kv
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), num_tokens)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
    assert [*before, *await finish(source, target, "r")] == answer(PROMPT, MAX_TOKENS, prefilled=len(PROMPT))
    [committed] = target.all("transfer_ended", "r")
    num_blocks = -(-(len(PROMPT) + len(before)) // 4)
    assert committed.num_bytes == num_blocks * d1.program.engine.spec.block_bytes
    first = source.all("first_token", "r", Role.DECODE)[0]
    assert first.cached_tokens == (len(PROMPT) + len(before) - 1) // 4 * 4
    assert ("decode-1", transport) in [link[:2] for link in await d0.on_engine(lambda program: program.kv_links())]


@pytest.mark.parametrize("sizes", [(4, 6), (8, 4)])
async def test_blocks_of_another_size_are_converted(start: Any, attach: Any, ask: Any, sizes: tuple[int, int]) -> None:
    p, d0 = start(Role.PREFILL, block_size=4), start(Role.DECODE, block_size=sizes[0], **SLOW)
    d1 = start(Role.DECODE, worker_id="decode-1", block_size=sizes[1])
    source, target = await attach(p, d0), await attach(d1)
    # with 9 tokens, the first worker has cached the whole prompt for each of the sizes
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), 9)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
    assert [*before, *await finish(source, target, "r")] == answer(PROMPT, MAX_TOKENS, prefilled=len(PROMPT))


async def test_a_seeded_answer_continues_with_its_noise(start: Any, attach: Any, ask: Any) -> None:
    p, d0 = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy", **SLOW)
    source, target = await attach(p, d0), await attach(start(Role.DECODE, worker_id="decode-1", model="toy"))
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 5}
    before = await begin(source, ask("r", PROMPT, **sampling), 6)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, **sampling))
    assert [*before, *await finish(source, target, "r")] == answer(PROMPT, MAX_TOKENS, seed=5)


async def test_blocks_that_the_new_worker_has_are_not_sent(start: Any, attach: Any, ask: Any) -> None:
    p, d0 = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy", **SLOW)
    d1 = start(Role.DECODE, worker_id="decode-1", model="toy")
    source, target = await attach(p, d0), await attach(d1)
    assert await target.local(ask("earlier", PROMPT, max_tokens=2)) == answer(PROMPT, 2)
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), 6)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
    assert [*before, *await finish(source, target, "r")] == answer(PROMPT, MAX_TOKENS)
    [committed] = target.all("transfer_ended", "r")
    block_bytes = d1.program.engine.spec.block_bytes
    assert committed.saved_bytes == 8 * block_bytes
    assert committed.num_bytes == (-(-(len(PROMPT) + len(before)) // 4) - 8) * block_bytes


async def test_two_workers_exchange_answers(start: Any, attach: Any, ask: Any) -> None:
    """Each sends and receives at the same time, also the attempts of one request id."""
    p, d0 = start(Role.PREFILL), start(Role.DECODE, **SLOW)
    d1 = start(Role.DECODE, worker_id="decode-1", **SLOW)
    one, other = await attach(p, d0), await attach(p, d1, name="router-1")
    prompts = {"a": PROMPT, "b": PROMPT[::-1]}
    sides = {"a": (one, other), "b": (other, one)}
    before = {
        name: await begin(sides[name][0], ask(name, prompt, max_tokens=MAX_TOKENS), 6)
        for name, prompt in prompts.items()
    }

    async def move(name: str) -> list[int]:
        sequence = ask(name, prompts[name], attempt=2, output=before[name], max_tokens=MAX_TOKENS)
        await order(*sides[name], sequence)
        return [*before[name], *await finish(*sides[name], name)]

    assert await asyncio.gather(*map(move, prompts)) == [
        answer(prompt, MAX_TOKENS, prefilled=len(prompt)) for prompt in prompts.values()
    ]


async def test_what_the_worker_has_not_cached_is_refused(start: Any, attach: Any, ask: Any) -> None:
    d0, d1 = start(Role.DECODE), start(Role.DECODE, worker_id="decode-1")
    source, target = await attach(d0), await attach(d1)
    await order(source, target, ask("r", PROMPT, attempt=2, output=(65,), max_tokens=MAX_TOKENS))
    refused = await source.next("refused", "r")
    assert refused.reason == worker_pb2.REFUSAL_REASON_NO_KV
    await target.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=2))
    await target.released("r", Role.DECODE, 2)


async def test_an_order_without_a_grant_is_rejected(start: Any, attach: Any, ask: Any) -> None:
    source = await attach(start(Role.DECODE))
    await source.send(Role.DECODE, prefill=worker_pb2.Prefill(sequence=ask("r", PROMPT)))
    assert (await source.next("failed", "r")).message.startswith("grant")
    await source.released("r", Role.DECODE)


async def test_a_worker_without_a_cache_sends_nothing(start: Any, attach: Any) -> None:
    source = await attach(start(Role.DECODE, is_prefix_cache_on=False))
    assert not source.hellos[Role.DECODE].sends_kv


async def test_kv_of_another_text_is_not_used(start: Any, attach: Any, ask: Any) -> None:
    p, d0 = start(Role.PREFILL), start(Role.DECODE, kv_check="off", **SLOW)
    source, target = await attach(p, d0), await attach(start(Role.DECODE, worker_id="decode-1"))
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), 6)

    def damage(program: Any) -> None:
        for block in range(program.blocks.num_blocks):
            program.blocks.stamps.mark(block, 1)

    await d0.on_engine(damage)
    await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
    ended = await target.next("transfer_ended", "r")
    assert not ended.is_committed
    await target.released("r", Role.DECODE, 2)
    await source.released("r", Role.DECODE, 2)


class GatedEngine:
    """A toy engine whose steps wait while the gate is closed."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self._engine = load_engine(config, role)
        self.spec, self.pool = self._engine.spec, self._engine.pool
        self.gate = threading.Event()
        self.gate.set()

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        assert self.gate.wait(DEADLINE_S)
        return self._engine.step(rows, on_layer)

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize("lost", ["source", "target", "router"])
async def test_both_workers_free_their_blocks_if_one_is_lost(start: Any, attach: Any, ask: Any, lost: str) -> None:
    """In the middle of the transfer: the first blocks have arrived, and the last one is not computed yet."""
    p, d0 = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy", load=GatedEngine)
    d1 = start(Role.DECODE, worker_id="decode-1", model="toy")
    source, target = await attach(p, d0), await attach(d1)
    before = await begin(source, ask("r", PROMPT, max_tokens=MAX_TOKENS), 3)
    d0.program.engine.gate.clear()
    try:
        await order(source, target, ask("r", PROMPT, attempt=2, output=before, max_tokens=MAX_TOKENS))
        await d1.until(lambda program: program._receiver.stats.chunks > 0, "the first blocks")
        if lost == "source":
            d0.program._sender.close()
            assert not (await target.next("transfer_ended", "r")).is_committed
        elif lost == "target":
            d1.program._receiver.close()  # the worker ends
            await d1.until_fatal()
        else:
            await source.close()
    finally:
        d0.program.engine.gate.set()
    if lost == "router":  # the step may end before the worker notices
        await target.next("transfer_ended", "r")
        await target.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=2))
    else:
        ended = await source.wait_for(lambda: [one for one in source.all("transfer_ended", "r") if one.attempt == 2])
        assert not ended[0].is_committed
        await source.released("r", Role.DECODE, 2)
    if lost != "target":
        await target.released("r", Role.DECODE, 2)
        await d1.until(no_block_is_used, "a worker without requests")
    await d0.until(no_block_is_used, "a worker without requests")
