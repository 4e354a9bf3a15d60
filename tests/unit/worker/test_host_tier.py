"""KV blocks that have left the pool are loaded again, in real workers: tokens, bytes, and what routers are told."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.kv.tier_reads import Tier
from pdserve.core.types import Role
from pdserve.engine.memory.host import HostCopies, host_copies
from pdserve.engine.toy import ToyPool, answer
from tests.support.tooled_model import BUNDLED
from tests.unit.worker.conftest import config

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes: 8 blocks and a token
NUM_BLOCKS = 16


def others(count: int) -> list[list[int]]:
    return [[number + 1, *PROMPT[1:]] for number in range(count)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a copy is sooner than the toy's step depends on the machine."""
    monkeypatch.setattr(HostCopies, "measure_s", lambda self: 0.0)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_loaded_blocks_have_the_bytes_that_were_sent(start: Any, attach: Any, ask: Any, role: Role) -> None:
    """A prompt's cells on the decode worker come from the prefill worker, and the tokens show it."""
    tier = {"kv_blocks": NUM_BLOCKS, "kv_host_bytes": 2**20}
    p = start(Role.PREFILL, **(tier if role is Role.PREFILL else {}))
    d = start(Role.DECODE, **(tier if role is Role.DECODE else {}))
    tiered = p if role is Role.PREFILL else d
    router = await attach(p, d)
    expected = answer(PROMPT, 8, prefilled=len(PROMPT))
    assert await router.remote(ask("first", PROMPT)) == expected
    for number, other in enumerate(others(4)):
        assert await router.remote(ask(f"other-{number}", other)) == answer(other, 8, prefilled=len(other))
    tier_of = tiered.program.blocks.tier
    assert (tier_of.num_loaded, tier_of.num_saved > 0) == (0, True)
    assert await router.remote(ask("again", PROMPT)) == expected
    assert tier_of.num_loaded == 8
    if role is Role.DECODE:
        [committed] = router.all("transfer_ended", "again", Role.DECODE)
        assert committed.saved_bytes == 8 * d.program.engine.spec.block_bytes
        local = await router.local(ask("local", PROMPT))
        assert local == answer(PROMPT, 8, prefilled=8 * 4)


async def test_many_prompts_stay_exact_while_their_blocks_move(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, model="toy", kv_blocks=NUM_BLOCKS, kv_host_bytes=40 * 32)  # bytes of a block
    router = await attach(d, wants_kv_events=True)
    [speed] = (await router.next("load")).tiers
    assert (speed.tier, speed.is_at_once, speed.fixed_s, speed.queue_s) == (Tier.HOST, True, 0.0, 0.0)
    assert speed.most_given > 0
    for number in range(60):
        prompt = [number * number % 7 + 1, *PROMPT[: 8 + number * 5 % 20]]
        assert await router.local(ask(f"r{number}", prompt)) == answer(prompt, 8)
        await d.on_engine(lambda program: program.check())
    tier = d.program.blocks.tier
    assert tier.num_loaded > 0
    assert len(tier) == tier.num_slots
    stored = dict(await d.on_engine(lambda program: program.kv.snapshot().tiered()))
    assert set(stored.values()) == {Tier.POOL, Tier.HOST}

    def told() -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for events in router.all("kv_events"):
            found = {} if events.is_snapshot else found
            found.update(zip(events.stored, events.tiers or bytes(len(events.stored)), strict=True))
            for one in events.removed:
                del found[one]
        return found

    await router.wait_for(lambda: told() == stored)


async def test_a_real_engine_continues_from_loaded_blocks(start: Any, attach: Any, ask: Any) -> None:
    small = {"model": str(BUNDLED), "kv_blocks": NUM_BLOCKS, "deterministic": "on"}
    d = start(Role.DECODE, **small, kv_host_bytes=2**24)
    router = await attach(d)
    first = await router.local(ask("first", PROMPT))
    for number, other in enumerate(others(3)):
        await router.local(ask(f"other-{number}", other))
    assert await router.local(ask("again", PROMPT)) == first
    assert d.program.blocks.tier.num_loaded == 8


@pytest.mark.parametrize("runs", [1, 3])
def test_a_copy_has_all_runs_of_a_block(runs: int) -> None:
    pool = ToyPool(5, 48)
    pool.runs_per_block = runs  # type: ignore[misc]
    pool.buffer[:] = bytes(range(240))
    copies = HostCopies(pool, 2 * 48)
    before = bytes(pool.buffer)
    copies.save(3, 1)
    size = 48 // runs
    of_block = [slice((run * 5 + 3) * size, (run * 5 + 4) * size) for run in range(runs)]
    for part in of_block:
        pool.buffer[part] = bytes(size)
    copies.load(1, 3)
    assert bytes(pool.buffer) == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_host_bytes": 8}, "one block of this model"),
        ({"kv_host_bytes": 2**45}, "bytes are free"),
        ({"kv_host_bytes": 2**20, "is_prefix_cache_on": False}, "is_prefix_cache_on"),
    ],
)
def test_a_tier_that_cannot_be_is_an_error(start: Any, changes: dict[str, Any], expected: str) -> None:
    engine = start(Role.DECODE).program.engine
    assert host_copies(engine, config(Role.DECODE)) is None
    with pytest.raises(ConfigError, match=expected):
        host_copies(engine, config(Role.DECODE, **changes))


def test_a_tier_that_is_slower_than_the_engine_is_off(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "measure_s", lambda self: 3600.0)
    d = start(Role.DECODE, toy_step_s=0.001, kv_host_bytes=2**12)
    assert d.program.blocks.tier is None
