"""Many concurrent requests over real gRPC and real transfers, cancelled at random moments, with too little memory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from tests.support.slow import slow_except

NUM_REQUESTS = 60


def is_empty(program: Any) -> bool:
    program.check()
    return program.is_idle and program.blocks.num_referenced == 0


class Life:
    """One request: placed until a worker accepts it, then run to its end or cancelled at a random point."""

    def __init__(self, router: Any, ask: Any, name: str, rng: random.Random) -> None:
        self.router, self.ask, self.name, self.rng = router, ask, name, rng
        self.is_local = rng.random() < 0.4
        # Few letters, so that prefixes are shared. None is the toy engine's EOT.
        self.prompt = [rng.choice((65, 66)) for _ in range(rng.randrange(1, 40))]
        self.num_tokens = rng.randrange(2, 30)
        self.patience_s = rng.random() * 0.15 if rng.random() < 0.5 else None
        self.attempt = 0
        self.tokens: list[int] | None = None

    async def run(self) -> None:
        driving = asyncio.create_task(self._drive())
        if self.patience_s is not None:
            await asyncio.wait((driving,), timeout=self.patience_s)
            if not driving.done():
                driving.cancel()
                await asyncio.gather(driving, return_exceptions=True)
                cancel = worker_pb2.Cancel(request_id=self.name, attempt=self.attempt)
                for role in (Role.PREFILL, Role.DECODE):
                    await self.router.send(role, cancel=cancel)
                    await self.router.released(self.name, role, self.attempt)
                return
        await driving

    async def _drive(self) -> None:
        while self.tokens is None:
            self.attempt += 1
            self.tokens = await self._try()

    async def _try(self) -> list[int] | None:
        router, name, attempt = self.router, self.name, self.attempt
        sequence = self.ask(name, self.prompt, attempt=attempt, max_tokens=self.num_tokens)
        reserve = worker_pb2.Reserve(sequence=sequence, is_local=self.is_local)
        await router.send(Role.DECODE, reserve=reserve)
        granted = await self._one_of("granted", "refused")
        if not isinstance(granted, worker_pb2.Granted):
            await asyncio.sleep(granted.retry_after_s)
            return None
        if self.is_local:
            got: list[int] = await router.finished(name, attempt)
            return got
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
        first = await self._one_of("first_token", "refused")
        if not isinstance(first, worker_pb2.FirstToken):
            await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id=name, attempt=attempt))
            await router.released(name, Role.DECODE, attempt)
            return None
        admit = worker_pb2.Admit(request_id=name, attempt=attempt, first_token_id=first.token.token_id)
        await router.send(Role.DECODE, admit=admit)
        return [first.token.token_id, *await router.finished(name, attempt)]

    async def _one_of(self, *kinds: str) -> Any:
        def found() -> list[Any]:
            every = [message for kind in kinds for message in self.router.all(kind, self.name)]
            return [message for message in every if message.attempt == self.attempt]

        return (await self.router.wait_for(found))[-1]


@pytest.mark.parametrize(
    ("transport", "seed", "async_scheduling"),
    slow_except([("tcp", 1, "off"), ("shm", 2, "off"), ("auto", 3, "on")], ("tcp", 1, "off"), ("auto", 3, "on")),
)
async def test_random_requests_are_exact_and_leave_no_blocks(
    start: Any, attach: Any, ask: Any, transport: str, seed: int, async_scheduling: str
) -> None:
    rng = random.Random(seed)
    settings = {"model": "toy", "transport": transport, "toy_step_s": 0.001, "inbox_depth": 6}
    p = start(Role.PREFILL, **settings, kv_blocks=24, max_batch_tokens=16)
    d = start(
        Role.DECODE,
        **settings,
        kv_blocks=24,
        max_context_tokens=96,
        async_scheduling=async_scheduling,
        speculation="off",
    )
    router = await attach(p, d)
    lives = [Life(router, ask, f"r{n}", rng) for n in range(NUM_REQUESTS)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(life.run() for life in lives))
    finished = [life for life in lives if life.tokens is not None]
    assert len(finished) >= NUM_REQUESTS // 4
    for life in finished:
        assert life.tokens == answer(life.prompt, life.num_tokens), life.name
    for worker in (p, d):
        await worker.until(is_empty, "an empty worker")
    assert not p.fatal
    assert not d.fatal
