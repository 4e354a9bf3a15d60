"""Several messages of a router in one."""

from __future__ import annotations

from typing import Any

from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2

PROMPT = list(range(10, 70))


async def test_batches_are_read_and_sent_only_on_request(start: Any, attach: Any, ask: Any) -> None:
    router = await attach(start(Role.DECODE))
    assert router.hellos[Role.DECODE].reads_batches
    reserves = [worker_pb2.Reserve(sequence=ask(name, PROMPT, max_tokens=8), is_local=True) for name in ("a", "b")]
    messages = [worker_pb2.AttachRequest(reserve=one) for one in reserves]
    await router.send(Role.DECODE, batch=worker_pb2.AttachRequests(messages=messages))
    for name in ("a", "b"):
        assert await router.finished(name) == answer(PROMPT, 8)
        await router.released(name, Role.DECODE)
    assert not router.all("batch")
