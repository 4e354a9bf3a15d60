"""KV that is sent during prefill, between two real workers on the bundled model: tokens equal those of sending at the
end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvtransfer.protocol.grants import decode_grant
from pdserve.core.types import Role
from pdserve.engine.interface import Engine, OnLayer, Row, RowOut
from pdserve.engine.load_engine import load_engine
from tests.support.slow import slow_except
from tests.unit.worker.conftest import DEADLINE_S

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
TEXT = [(37 * n) % 4000 + 5 for n in range(75)]  # Chunks of 32, 32 and 11. The last of 5 blocks is partly filled.
COMMON: Final[dict[str, Any]] = {
    "model": str(BUNDLED),
    "block_size": 16,
    "max_context_tokens": 256,
    "is_prefix_cache_on": False,
    "deterministic": "on",  # blocks of two sizes, and prompts read in two ways, are compared
}


class Stumbling:
    """An engine whose first step with the end of a prompt fails after its layers were reported.

    The repeated step stores its first layer, and then waits in `while_repeated`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.spec, self.pool, self.close = engine.spec, engine.pool, engine.close
        self.num_told = 0
        self.while_repeated: Callable[[], None] = lambda: None

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        if on_layer is None and self.num_told:
            return self._engine.step(rows, lambda num_layers: self.while_repeated() if num_layers == 1 else None)
        outs = self._engine.step(rows, on_layer)
        if on_layer is not None and not self.num_told:
            self.num_told = self.spec.num_layers
            raise RuntimeError("after all layers were told")
        return outs


class SlowSender:
    """A sender that reads no block before `read`."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._held: list[Callable[[], None]] = []
        self._is_held = True
        self.source_of: dict[int, int] = {}  # by grant index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def push(self, *args: Any) -> None:
        self.source_of.update(args[1])
        if self._is_held:
            self._held.append(partial(self._sender.push, *args))
        else:
            self._sender.push(*args)

    def read(self, num_bytes: int) -> None:
        """Returns when so many bytes were read."""
        self._is_held, until_s = False, time.monotonic() + DEADLINE_S
        for push in self._held:
            push()
        while self._sender.stats.moved_bytes < num_bytes:
            assert time.monotonic() < until_s, self._sender.stats
            time.sleep(0.001)


def num_groups(p: Any) -> int:
    return max(p.program.scheduler.pushing.groups)


@pytest.mark.parametrize("transport", slow_except(["tcp", "shm"], "tcp"))
async def test_every_push_plan_gives_the_same_tokens(start: Any, attach: Any, ask: Any, transport: str) -> None:
    answers, chunks = {}, {}
    for push in ("end", "chunk", "layers"):
        p = start(Role.PREFILL, push=push, transport=transport, worker_id=f"p-{push}", **COMMON)
        d = start(Role.DECODE, transport=transport, worker_id=f"d-{push}", **COMMON)
        router = await attach(p, d)
        answers[push] = await router.remote(ask("r", TEXT, max_tokens=16))
        chunks[push] = d.program._receiver.stats.chunks
        assert p.program._sender.stats.moved_bytes == 5 * p.program.engine.spec.block_bytes
    assert answers["chunk"] == answers["layers"] == answers["end"]
    assert chunks["end"] <= chunks["chunk"] < chunks["layers"]


async def test_a_repeated_step_sends_each_layer_once_and_whole(start: Any, attach: Any, ask: Any) -> None:
    plain = start(Role.PREFILL, push="end", worker_id="p-end", **COMMON)
    d = start(Role.DECODE, **COMMON)
    expected = await (await attach(plain, d)).remote(ask("r", TEXT, max_tokens=16))
    engines: list[Stumbling] = []

    def load(config: Any, role: Role) -> Engine:
        engines.append(Stumbling(load_engine(config, role)))
        return engines[-1]

    p = start(Role.PREFILL, load, push="layers", **COMMON)
    block_bytes, sender = p.program.engine.spec.block_bytes, SlowSender(p.program._sender)
    # Four blocks by chunks; of the last one, the last group is sent after the step.
    early_bytes = 5 * block_bytes - block_bytes // num_groups(p)
    p.program._sending._sender, engines[0].while_repeated = sender, partial(sender.read, early_bytes)
    router = await attach(p, d)
    assert await router.remote(ask("s", TEXT, max_tokens=16)) == expected
    assert engines[0].num_told > 1, "the step did fail with layers on their way"
    assert sender.stats.moved_bytes == 5 * block_bytes
    assert sender.stats.failed == 0
    targets = decode_grant(router.all("granted", "s")[0].grant).blocks
    for index, target in enumerate(targets):  # tokens of such a text may hide that a layer is missing
        num_filled = min(16, len(TEXT) - 16 * index)
        kv = (d.program.engine.pool.tensor[target], p.program.engine.pool.tensor[sender.source_of[index]])
        ours, theirs = (x[:, :, :num_filled] for x in kv)
        assert ours.equal(theirs), f"block {index}"


async def test_cached_blocks_are_sent_whole_before_layer_groups(start: Any, attach: Any, ask: Any) -> None:
    settings = {**COMMON, "is_prefix_cache_on": True}
    p = start(Role.PREFILL, push="layers", **settings)
    first, second = (start(Role.DECODE, worker_id=name, **settings) for name in ("d0", "d1"))
    expected = await (await attach(p, first)).remote(ask("r", TEXT, max_tokens=8))
    router = await attach(p, second)
    router.name = "router-1"
    assert await router.remote(ask("s", TEXT, max_tokens=8)) == expected
    assert router.all("first_token", "s")[0].cached_tokens == 64
    groups = num_groups(p)
    chunks = second.program._receiver.stats.chunks
    assert chunks == 2 * groups, "what is cached, and the last block, each in its groups"


async def test_a_receiver_of_another_shape_gets_whole_blocks(start: Any, attach: Any, ask: Any) -> None:
    p = start(Role.PREFILL, push="layers", **COMMON)
    d = start(Role.DECODE, **{**COMMON, "block_size": 32})
    same = start(Role.DECODE, worker_id="same", **COMMON)
    expected = await (await attach(p, same)).remote(ask("r", TEXT, max_tokens=16))
    router = await attach(p, d)
    assert await router.remote(ask("s", TEXT, max_tokens=16)) == expected
