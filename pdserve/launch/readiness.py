"""Proves that a cluster answers: generates a real token through the router, on the remote path if there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import Tls
from pdserve.client.results import Completion
from pdserve.client.retry import Retries
from pdserve.core.errors import Overloaded, Unavailable
from pdserve.wire.status import NO_CONNECTION

# Longer than a prompt that a decode worker would prefill itself, so that the prefill worker and the transfer are tested
# too.
PROMPT: Final = "def ready(cluster):\n    return all(worker.is_ready for worker in cluster.workers)\n" * 2
ANSWER_TOKENS: Final = 2
FIRST_ANSWER_S: Final = 120.0
_ASK_AGAIN_S: Final = 0.05


async def first_answer(
    target: str,
    *,
    token: str | None,
    workers: int,
    timeout_s: float,
    tls: Tls | None = None,
    insecure: bool = False,
    on_wait: Callable[[str], None] = lambda cause: None,
) -> Completion:
    """The first completion. Waits while workers are still connecting, and tells `on_wait` the cause; raises the last
    error after `timeout_s`, and an error of TLS at once."""
    deadline_s = time.monotonic() + timeout_s
    async with AsyncClient(target, token=token, tls=tls, insecure=insecure, retries=Retries(limit=0)) as client:
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.1)
            try:
                topology = await client.topology()
                connected = [worker.worker_id for worker in topology.workers if worker.is_connected]
                if len(connected) < workers:
                    seen = f" ({', '.join(sorted(connected))})" if connected else ""
                    raise Unavailable(f"the router is connected to {len(connected)} of {workers} workers{seen}")
                return await client.generate(PROMPT, max_tokens=ANSWER_TOKENS, temperature=0.0, timeout_s=left_s)
            except (Unavailable, Overloaded) as error:
                if time.monotonic() >= deadline_s or error.message.startswith(NO_CONNECTION):
                    raise
                on_wait(error.message)
            await asyncio.sleep(_ASK_AGAIN_S)
