"""A transfer that is no longer needed is not begun, or is counted as cancelled instead of failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.telemetry import metric_names
from pdserve.v1 import worker_pb2

PROMPT = list(range(10, 71))


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """outcomes(p, d): the counter of TRANSFERS by outcome, of both workers together."""

    def watch(*workers: Any) -> Counter[str]:
        seen: Counter[str] = Counter()

        def add(metric: Any, amount: float = 1, **labels: str) -> None:
            if metric is metric_names.TRANSFERS:
                seen[labels["outcome"]] += int(amount)

        for worker in workers:
            monkeypatch.setattr(worker.program.context.metrics, "add", add)
        return seen

    return watch


async def test_one_token_needs_no_transfer(start: Any, attach: Any, ask: Any, outcomes: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router, seen = await attach(p, d), outcomes(p, d)
    for number in range(8):
        prompt = [number, *PROMPT]
        one = await router.remote(ask(f"r{number}", prompt, max_tokens=1))
        assert one == answer(prompt, 1, prefilled=len(prompt))
    assert seen == {"cancelled": 8}  # The grants. Nothing was sent.
    assert (await p.on_engine(lambda program: program._sender.stats.transfers)) == 0


@pytest.mark.parametrize("first", [Role.PREFILL, Role.DECODE])
async def test_a_late_cancel_counts_no_failure(start: Any, attach: Any, ask: Any, outcomes: Any, first: Role) -> None:
    """The other worker ends the transfer before the router's Cancel arrives here."""
    p, d = start(Role.PREFILL, push="chunk", max_batch_tokens=4, toy_step_s=0.02), start(Role.DECODE)
    router, seen = await attach(p, d), outcomes(p, d)
    last = first.other
    sequence = ask("a", PROMPT, max_tokens=4)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "a")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    await p.until(lambda program: program._sender.stats.transfers == 1, "the transfer")
    cancel = worker_pb2.Cancel(request_id="a", attempt=1)
    await router.send(first, cancel=cancel)
    ended = await router.next("transfer_ended", "a", last)
    assert not ended.is_committed
    await router.released("a", Role.PREFILL)
    await router.released("a", Role.DECODE)
    assert "failed" not in seen
    assert seen["cancelled"] >= 1
