"""KV blocks that outlive their worker: they are read from files, and tokens are exact whatever becomes of those."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.kv.tier_reads import Tier
from pdserve.core.types import Role
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.disk import DiskTier, contents_of
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from pdserve.worker.program import RoleProgram
from pdserve.worker.role_change import change_role
from tests.unit.worker.conftest import Running

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes: 8 blocks and a token
NUM_BLOCKS = 16
SLOW: dict[str, Any] = {"kv_blocks": NUM_BLOCKS, "toy_step_s": 0.005}  # so that reading is sooner than computing


def others(count: int) -> list[list[int]]:
    return [[number + 1, *PROMPT[1:]] for number in range(count)]


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {**SLOW, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 2**20}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a prompt may wait, and what the disk is expected to do, do not depend on the machine."""
    whole = RoleProgram.fetches_with
    monkeypatch.setattr(RoleProgram, "fetches_with", lambda self, _: whole(self, lambda tokens, cached: 60.0))
    monkeypatch.setattr(BlockFiles, "read_bytes_s", lambda self: 1e12)


def tier_of(worker: Running) -> DiskTier:
    tier = worker.program.disk
    assert tier is not None, "there is no disk tier"
    return tier


async def fill(worker: Running, router: Any, ask: Any, run: Callable[..., Any]) -> None:
    """Computes PROMPT and others, until the blocks of the first are on disk."""
    expected = answer(PROMPT, 8, prefilled=len(PROMPT) if run == router.remote else 0)
    assert await run(ask("first", PROMPT)) == expected
    for number, other in enumerate(others(4)):
        await run(ask(f"other-{number}", other))

    def is_there(program: RoleProgram) -> bool:
        return all(one in tier_of(worker).files for one in hashes_of(worker, PROMPT)) and tier_of(worker).flush(0.01)

    await worker.until(is_there, "blocks on disk")


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("host_bytes", [0, 10 * 32])
async def test_blocks_come_back(
    start: Any, attach: Any, ask: Any, disk: dict[str, Any], role: Role, host_bytes: int
) -> None:
    """Cells on the decode worker come from the prefill worker, and the tokens show it."""
    settings = {**disk, "kv_host_bytes": host_bytes}
    p = start(Role.PREFILL, **(settings if role is Role.PREFILL else {}))
    d = start(Role.DECODE, **({**settings, "model": "toy"} if role is Role.DECODE else {}))
    tiered = p if role is Role.PREFILL else d
    router = await attach(p, d) if role is Role.PREFILL else await attach(d)
    run = router.remote if role is Role.PREFILL else router.local
    await fill(tiered, router, ask, run)
    expected = answer(PROMPT, 8, prefilled=len(PROMPT) if role is Role.PREFILL else 0)
    assert await run(ask("again", PROMPT)) == expected
    assert num_read(tiered) >= 4


def num_read(worker: Running) -> int:
    """Verified blocks."""
    fetches = worker.program.fetches
    assert fetches is not None
    return fetches.num_filled["disk"]


@pytest.mark.parametrize("role", list(Role))
async def test_blocks_outlive_the_process(start: Any, attach: Any, ask: Any, disk: dict[str, Any], role: Role) -> None:
    """The next worker of the same name finds them, and tells routers."""
    p = start(Role.PREFILL, **(disk if role is Role.PREFILL else {}))
    d = start(Role.DECODE, **({**disk, "model": "toy"} if role is Role.DECODE else {}))
    tiered = p if role is Role.PREFILL else d
    first = await attach(p, d) if role is Role.PREFILL else await attach(d)
    await fill(tiered, first, ask, first.remote if role is Role.PREFILL else first.local)
    kept = set(tier_of(tiered).files.hashes())
    await first.close()
    tiered.host.stop()
    again = start(role, **disk, **({"model": "toy"} if role is Role.DECODE else {}))
    assert set(tier_of(again).files.hashes()) > kept  # what memory had was written at the end
    kept = set(tier_of(again).files.hashes())
    router = await attach(*([again, d] if role is Role.PREFILL else [again]), wants_kv_events=True)
    snapshot = await router.next("kv_events", role=role)
    assert snapshot.is_snapshot
    assert dict(zip(snapshot.stored, snapshot.tiers, strict=True)) == dict.fromkeys(kept, Tier.DISK)
    load = await router.next("load", role=role)
    [speed] = load.tiers
    assert (speed.tier, speed.is_at_once, speed.queue_s) == (Tier.DISK, False, 0.0)
    assert min(speed.fixed_s, speed.block_s) > 0.0
    run = router.remote if role is Role.PREFILL else router.local
    expected = answer(PROMPT, 8, prefilled=len(PROMPT) if role is Role.PREFILL else 0)
    assert await run(ask("again", PROMPT)) == expected
    assert num_read(again) == sum(1 for one in hashes_of(again, PROMPT) if one in kept)
    assert num_read(again) >= 4


def hashes_of(worker: Running, prompt: list[int]) -> list[bytes]:
    key = chain_key(b"", worker.program.limits.hash_seed)
    return block_hashes(prompt[:-1], 4, key)


@pytest.mark.parametrize("role", list(Role))
async def test_blocks_on_disk_are_given(start: Any, attach: Any, ask: Any, disk: dict[str, Any], role: Role) -> None:
    """Another worker pulls them: the source reads them first."""
    p = start(Role.PREFILL, model="toy", **(disk if role is Role.PREFILL else {}))
    d = start(Role.DECODE, model="toy", **(disk if role is Role.DECODE else {}))
    tiered = p if role is Role.PREFILL else d
    router = await attach(p, d) if role is Role.PREFILL else await attach(d)
    run = router.remote if role is Role.PREFILL else router.local
    assert await run(ask("first", PROMPT)) == answer(PROMPT, 8)
    for number, other in enumerate(others(4)):
        await run(ask(f"other-{number}", other))
    hashes = hashes_of(tiered, PROMPT)
    await tiered.until(lambda program: all(one in tier_of(tiered).files for one in hashes), "blocks on disk")
    assert await tiered.on_engine(lambda program: program.blocks.num_matched(hashes)) < len(hashes)
    puller = start(Role.DECODE, model="toy", worker_id="decode-1")
    sequence = ask("r", PROMPT)
    context = tiered.program.context
    sequence.source.CopyFrom(
        worker_pb2.PrefixSource(
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            endpoint=tiered.address,
            num_tokens=32,
        )
    )
    other_router = await attach(puller, name="router-1")
    assert await other_router.local(sequence) == answer(PROMPT, 8)
    assert [one.num_tokens for one in other_router.all("pull_ended", "r")] == [32]
    assert num_read(tiered) > 0
    await tiered.until(lambda program: program.is_idle, "nothing is given")


async def test_damaged_files_are_misses(start: Any, attach: Any, ask: Any, disk: dict[str, Any]) -> None:
    d = start(Role.DECODE, **disk, model="toy")
    router = await attach(d)
    await fill(d, router, ask, router.local)
    rng = random.Random(1)
    for path in (Path(disk["kv_disk_path"]) / "decode-0").glob("*.kv"):
        content = bytearray(path.read_bytes())
        for at in rng.sample(range(4096, len(content)), len(content) // 40):  # every block has some
            content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert num_read(d) == 0
    assert tier_of(d).events["damaged"] >= 4
    for number, other in enumerate(others(4)):
        assert await router.local(ask(f"again-{number}", other)) == answer(other, 8)


async def test_a_disk_that_hangs_is_a_miss_and_ends_the_worker(
    start: Any, attach: Any, ask: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    d = start(Role.DECODE, **{**disk, "kv_blocks": 28}, model="toy")  # half of which are enough for the prompt
    router = await attach(d)
    await fill(d, router, ask, router.local)
    is_reading, may_read = threading.Event(), threading.Event()
    whole = BlockFiles.read

    def hang(files: BlockFiles, *wanted: Any) -> list[bool]:
        is_reading.set()
        may_read.wait(60.0)
        return whole(files, *wanted)

    monkeypatch.setattr(BlockFiles, "read", hang)
    try:
        running = asyncio.create_task(router.local(ask("again", PROMPT)))
        assert await asyncio.to_thread(is_reading.wait, 60.0)

        def give_up(program: RoleProgram) -> None:
            now = program.context.now
            program.context = replace(program.context, now=lambda: now() + 1000.0)

        await d.on_engine(give_up)
        assert await running == answer(PROMPT, 8)
        assert len(d.program.fetches or ()) == 1
        assert not d.fatal

        def shorten(program: RoleProgram) -> None:  # but not for the watchdog, which a slow machine might alarm
            context = program.context
            program.context = replace(context, config=replace(context.config, stall_s=0.01))

        await d.on_engine(shorten)
        for _ in range(6000):
            if d.fatal:
                break
            await asyncio.sleep(0.01)
        assert d.fatal == ["died"]
    finally:
        may_read.set()


async def test_a_role_change_keeps_the_disk_tier(start: Any, attach: Any, ask: Any, disk: dict[str, Any]) -> None:
    d = start(Role.DECODE, **disk, model="toy")
    router = await attach(d)
    await fill(d, router, ask, router.local)
    tier, kept = tier_of(d), set(tier_of(d).files.hashes())
    await router.close()
    before = d.program.context.config
    assert await change_role(d.address, Role.PREFILL, before, before) == ""
    assert d.program.context.role is Role.PREFILL
    assert tier_of(d) is tier
    assert await d.on_engine(lambda program: set(program.kv.snapshot().stored)) >= kept


async def test_a_block_that_left_before_its_write_was_told_is_not_announced(start: Any, disk: dict[str, Any]) -> None:
    d = start(Role.DECODE, **disk)
    tier_of(d).changed([b"written, then dropped"], ())
    assert await d.on_engine(lambda program: program.kv.snapshot().stored) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_disk_bytes": 100}, "at least"),
        ({"is_prefix_cache_on": False}, "is_prefix_cache_on"),
        ({"kv_disk_path": "/dev/null/kv"}, "cannot be opened"),
    ],
)
def test_a_tier_that_cannot_be_is_an_error(
    start: Any, disk: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        start(Role.DECODE, **{**disk, **changes})


def test_changed_weights_have_other_blocks(start: Any, disk: dict[str, Any], tmp_path: Path) -> None:
    """The hash of the weights, which has samples only, may be the same."""
    spec = start(Role.DECODE, **disk).program.engine.spec
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old")
    before = contents_of(spec, weights.parent)
    assert contents_of(spec, weights.parent) == before
    weights.write_bytes(b"new")
    os.utime(weights, ns=(0, 1))
    assert contents_of(spec, weights.parent) != before


def test_two_workers_cannot_share_a_folder(start: Any, disk: dict[str, Any]) -> None:
    start(Role.DECODE, **disk)
    with pytest.raises(ConfigError, match="another process uses it"):
        start(Role.DECODE, **disk)
    start(Role.DECODE, **disk, worker_id="another")


def test_a_tier_that_is_slower_than_the_engine_is_off(
    start: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockFiles, "read_bytes_s", lambda self: 0.001)
    d = start(Role.DECODE, **disk)
    assert d.program.disk is None
    assert "disk" not in d.program.sources
