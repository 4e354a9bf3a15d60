"""Requests through real workers over real gRPC: both paths, their tokens and their books."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.core.types import Role
from pdserve.engine.toy import answer

PROMPT = list(b"The quick brown fox jumps over it")


async def test_the_remote_path_gives_the_tokens_of_an_engine_that_read_prefilled_kv(
    start: Any, attach: Any, ask: Any
) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    tokens = await router.remote(ask("r", PROMPT, max_tokens=8))
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))
    ended = router.all("transfer_ended", "r")
    assert [one.is_committed for one in ended] == [True]
    assert ended[0].bytes == 9 * d.program.engine.spec.block_bytes


async def test_the_local_path_gives_the_tokens_of_an_engine_that_read_the_prompt_itself(
    start: Any, attach: Any, ask: Any
) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    assert await router.local(ask("r", PROMPT, max_tokens=8)) == answer(PROMPT, 8)


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
