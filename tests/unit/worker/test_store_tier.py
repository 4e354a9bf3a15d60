"""Workers that share a store of KV blocks: one reads what another has computed, and no fault of the store costs more
than a miss."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.types import Role
from pdserve.engine.memory import slow_tier, staging
from pdserve.engine.memory import store as store_module
from pdserve.engine.memory.block_files import BlockFiles
from pdserve.engine.memory.object_stores.files import FolderStore
from pdserve.engine.memory.object_stores.interface import ROOT
from pdserve.engine.memory.sealed_objects import Seal
from pdserve.engine.memory.slow_tier import ReadSpeed
from pdserve.engine.memory.store import StoreTier
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.worker import tiers as tiers_module
from pdserve.worker.program import RoleProgram
from pdserve.worker.role_change import change_role
from tests.unit.worker.conftest import Running

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes: 8 blocks and a token
NUM_BLOCKS = 16
PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a prompt may wait, and what the store is expected to do, do not depend on the machine."""
    whole = RoleProgram.fetches_with
    monkeypatch.setattr(RoleProgram, "fetches_with", lambda self, _: whole(self, lambda tokens, cached: PATIENT_S))
    real = store_module.measure

    def measure(*arguments: Any) -> tuple[ReadSpeed, float]:
        real(*arguments)
        return ReadSpeed(1e12), PATIENT_S / 10

    monkeypatch.setattr(store_module, "measure", measure)


@pytest.fixture(params=["redis", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        (tmp_path / "kv").mkdir()
        yield f"file://{tmp_path}/kv"
        return
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "kv").mkdir()
    return f"file://{tmp_path}/kv"


def settings(url: str, name: str = "decode-0") -> dict[str, Any]:
    return {"kv_blocks": NUM_BLOCKS, "toy_step_s": 0.005, "kv_store": url, "worker_id": name, "model": "toy"}


def tier_of(worker: Running) -> StoreTier:
    tier = worker.program.store
    assert tier is not None, "there is no shared store"
    return tier


def num_read(worker: Running) -> int:
    """Verified blocks."""
    fetches = worker.program.fetches
    assert fetches is not None
    return fetches.num_filled["store"]


def hashes_of(worker: Running, prompt: Sequence[int]) -> list[bytes]:
    return block_hashes(prompt[:-1], 4, chain_key(b"", worker.program.limits.hash_seed))


async def fill(worker: Running, router: Any, ask: Any) -> None:
    """Computes PROMPT, and others until its blocks are in the store."""
    assert await router.local(ask("first", PROMPT)) == answer(PROMPT, 8)
    for number in range(4):
        await router.local(ask(f"other-{number}", [number + 1, *PROMPT[1:]]))
    tier = tier_of(worker)
    wanted = hashes_of(worker, PROMPT)
    await worker.until(lambda _: tier.flush(0.01) and tier.num_found(None, wanted, 0) == 8, "blocks in the store")  # type: ignore[arg-type]


async def test_a_worker_gets_what_another_has_computed(start: Any, attach: Any, ask: Any, url: str) -> None:
    first = start(Role.DECODE, **settings(url))
    router = await attach(first)
    await fill(first, router, ask)
    await router.close()
    second = start(Role.DECODE, **settings(url, "decode-1"))
    router = await attach(second)
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert num_read(second) == 8
    assert await second.on_engine(lambda program: program.kv.snapshot().stored) != ()
    assert await router.local(ask("unknown", [99, *PROMPT[1:]])) == answer([99, *PROMPT[1:]], 8)
    assert num_read(second) == 8


async def test_a_restart_keeps_what_memory_had(start: Any, attach: Any, ask: Any, url: str) -> None:
    """Nothing was evicted, and no block was used twice."""
    first = start(Role.DECODE, **settings(url))
    router = await attach(first)
    assert await router.local(ask("first", PROMPT)) == answer(PROMPT, 8)
    await router.close()
    first.host.stop()
    second = start(Role.DECODE, **settings(url))
    router = await attach(second)
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert num_read(second) == 8


async def test_each_tier_gets_all_at_the_end(
    start: Any, attach: Any, ask: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the store has them already, and the queue of the disk is short."""
    monkeypatch.setattr(staging, "QUEUE_BYTES", 64)
    monkeypatch.setattr(tiers_module, "SAVE_S", PATIENT_S)
    monkeypatch.setattr(BlockFiles, "read_bytes_s", lambda self: 1e12)
    worker = start(Role.DECODE, **settings(folder), kv_disk_path=str(tmp_path / "disk"), kv_disk_bytes=2**20)
    router = await attach(worker)
    await router.local(ask("first", PROMPT))
    store, disk = tier_of(worker), worker.program.disk
    assert disk is not None
    hashes = hashes_of(worker, PROMPT)

    def save(program: RoleProgram) -> None:
        with store._guard:
            for one in hashes:
                store._note(one, True)
        program.save()

    await worker.on_engine(save)
    assert disk.flush(PATIENT_S)
    assert all(one in disk.files for one in hashes)
    assert disk.events["dropped"] == 0


async def test_blocks_that_a_second_prompt_uses_are_written(start: Any, attach: Any, ask: Any, folder: str) -> None:
    """Before they leave memory."""
    worker = start(Role.DECODE, **settings(folder))
    router = await attach(worker)
    tier = tier_of(worker)
    await router.local(ask("first", PROMPT))
    assert tier.flush(PATIENT_S)
    assert tier.events["written"] == 0
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert tier.flush(PATIENT_S)
    assert tier.events["written"] == 8
    await router.local(ask("more", PROMPT))
    assert tier.flush(PATIENT_S)
    assert tier.events["written"] == 8


async def test_damaged_and_strange_objects_are_misses(
    start: Any, attach: Any, ask: Any, folder: str, tmp_path: Path
) -> None:
    """Flipped bits, torn files, and an object of one block under the name of another."""
    first = start(Role.DECODE, **settings(folder))
    router = await attach(first)
    await fill(first, router, ask)
    await router.close()
    first.host.stop()
    paths = sorted(path for path in (tmp_path / "kv" / ROOT).rglob("*") if path.is_file())
    assert len(paths) >= 8
    rng = random.Random(1)
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        damaged = bytearray(contents[number])
        match number % 3:
            case 0:
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            case 1:
                damaged = bytearray(contents[number - 1])
            case 2:
                del damaged[rng.randrange(len(damaged)) :]
        path.write_bytes(damaged)
    second = start(Role.DECODE, **settings(folder))
    router = await attach(second)
    assert await router.local(ask("again", PROMPT)) == answer(PROMPT, 8)
    assert num_read(second) == 0


async def test_another_secret_finds_nothing(start: Any, attach: Any, ask: Any, folder: str) -> None:
    first = start(Role.DECODE, **settings(folder))
    router = await attach(first)
    await fill(first, router, ask)
    seal, same = tier_of(first)._seal, hashes_of(first, PROMPT)[0]
    spec = first.program.engine.spec
    contents = store_module.contents_of(spec, Path("toy"))
    for other in (
        Seal("another secret of a cluster", contents, spec.block_bytes),
        Seal(first.program.context.config.cluster_secret, b"another model", spec.block_bytes),
    ):
        assert other.name(same) != seal.name(same)
        assert other.room != seal.room
        assert other.open(same, seal.close(same, bytes(spec.block_bytes))) is None


async def test_a_store_that_breaks_later_is_a_miss(
    start: Any, attach: Any, ask: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(Role.DECODE, **settings(folder))
    router = await attach(first)
    await fill(first, router, ask)
    await router.close()
    second = start(Role.DECODE, **settings(folder, "decode-1"))
    router = await attach(second)

    def fail(store: FolderStore, *_: Any) -> Any:
        raise OSError("the server is gone")

    monkeypatch.setattr(FolderStore, "get", fail)
    assert await router.local(ask("read", PROMPT)) == answer(PROMPT, 8)
    monkeypatch.setattr(FolderStore, "num_found", fail)
    monkeypatch.setattr(FolderStore, "are_there", fail)
    other = [77, *PROMPT[1:]]
    for number in range(4):
        assert await router.local(ask(f"look-{number}", other)) == answer(other, 8)
    assert num_read(second) == 0
    assert tier_of(second).events["failed_reads"] >= 2
    assert not second.fatal


async def test_a_store_that_is_full_at_the_start_is_on(
    start: Any, attach: Any, ask: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "_write", full)
        worker = start(Role.DECODE, **settings(folder))
    router = await attach(worker)
    await fill(worker, router, ask)


async def test_the_threads_end(
    new_threads: Callable[[], list[threading.Thread]], start: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Role.DECODE, **settings(folder))
    monkeypatch.setattr(slow_tier, "JOIN_S", PATIENT_S)
    began_s = time.monotonic()
    tier_of(worker).close()
    assert time.monotonic() - began_s < PATIENT_S / 2
    assert not [one for one in new_threads() if one.name.startswith("kv-store")]


async def test_a_role_change_keeps_the_store(
    start: Any, attach: Any, ask: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of the former program that hangs does not end as one of the next."""
    worker = start(Role.DECODE, **settings(folder))
    router = await attach(worker)
    await fill(worker, router, ask)
    tier = tier_of(worker)
    tier._speed = ReadSpeed(1e12, PATIENT_S / 10)  # so that the read is not late
    may_read, reads, real = threading.Event(), threading.Event(), FolderStore.get

    def get(store: FolderStore, names: Sequence[str]) -> list[bytes | None]:
        reads.set()
        assert may_read.wait(PATIENT_S)
        return real(store, names)

    monkeypatch.setattr(FolderStore, "get", get)
    reading = asyncio.create_task(router.local(ask("again", PROMPT)))
    await worker.until(lambda _: reads.is_set(), "a read that hangs")
    former = await worker.on_engine(lambda program: list(program.fetches._running))
    reading.cancel()
    await router.close()
    before = worker.program.context.config
    for role in (Role.PREFILL, Role.DECODE):
        await worker.until(lambda program: not program.blocks.num_referenced, "no block in use")
        assert await change_role(worker.address, role, before, before) == ""
        assert worker.program.store is tier
        assert await worker.on_engine(lambda program: tier.looked.args[0].__self__ is program.fetches)
    router = await attach(worker)
    again = asyncio.create_task(router.local(ask("again", PROMPT)))
    await worker.until(lambda program: len(program.fetches) == 1, "another fetch")
    assert former != await worker.on_engine(lambda program: list(program.fetches._running))
    may_read.set()
    assert await again == answer(PROMPT, 8)
    assert num_read(worker) == 8


def test_a_store_that_cannot_be_leaves_the_disk_to_the_next(start: Any, tmp_path: Path) -> None:
    disk = {"kv_disk_path": str(tmp_path / "disk"), "kv_disk_bytes": 2**20}
    with pytest.raises(ConfigError):
        start(Role.DECODE, **settings("/mnt/kv"), **disk)
    assert start(Role.DECODE, **settings(""), **disk).program.store is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_store": "/mnt/kv"}, "a URL: redis://HOST"),
        ({"kv_store": "file://host/mnt"}, "absolute path"),
        ({"kv_store": "file:///dev/null/kv"}, "a folder that this user can write to"),
        ({"kv_store": "nonsense://bucket"}, "a URL of fsspec"),
        ({"kv_store": "unix:///nowhere/redis.sock"}, "a store that answers"),
        ({"kv_store": "redis://:hush@localhost:port/0"}, "redis://HOST:PORT"),
        ({"kv_store_bytes": 10}, "one block of this model"),
        ({"is_prefix_cache_on": False}, "is_prefix_cache_on"),
    ],
)
def test_a_store_that_cannot_be_is_an_error(start: Any, folder: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        start(Role.DECODE, **{**settings(folder), **changes})
    assert "hush" not in str(caught.value)
