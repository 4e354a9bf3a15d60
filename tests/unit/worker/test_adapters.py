"""LoRA adapters on workers: rows, loading while serving, names, and the end of an adapter. The toy engine's tokens and
KV depend on the adapter."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.core import protocol as pr
from pdserve.core.adapters import MAX_UNLOADED
from pdserve.core.errors import InvalidRequest, ModelError
from pdserve.core.types import Role
from pdserve.engine.toy import EOT, answer
from pdserve.v1 import worker_pb2
from pdserve.wire.protocol import ADAPTERS, encode_request
from pdserve.worker import adapters as worker_adapters
from pdserve.worker.adapters import MAX_LOADS, permitted_folder
from tests.support.adapters import write_adapter

PROMPT = list(range(40, 50))
ROLES = (Role.PREFILL, Role.DECODE)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b", "c")):
        write_adapter(tmp_path / name, seed=seed)
    return tmp_path


def spoken(router: Any, role: Role) -> pr.Adapters:
    """The worker's last report."""
    seen = router.all("adapters", role=role)
    return ADAPTERS.decode(seen[-1] if seen else router.hellos[role].adapters)


def served(router: Any, role: Role) -> dict[str, str]:
    return {one.name: one.fingerprint for one in spoken(router, role).named if one.fingerprint}


async def tell(router: Any, role: Role, command: pr.AdapterCommand) -> None:
    request = encode_request(command)
    name = request.WhichOneof("message")
    assert name is not None
    await router.send(role, **{name: getattr(request, name)})


async def load(router: Any, role: Role, name: str, folder: Path, version: int) -> worker_pb2.AdapterLoaded:
    await tell(router, role, pr.LoadAdapter(name=name, folder=str(folder), version=version))
    return (
        await router.wait_for(
            lambda: [
                one for one in router.all("adapter_loaded", role=role) if (one.name, one.version) == (name, version)
            ]
        )
    )[0]


async def serve(router: Any, role: Role, name: str, folder: Path, version: int) -> str:
    """Loads the adapter and names it. Returns its fingerprint."""
    loaded = await load(router, role, name, folder, version)
    assert not loaded.error
    named = pr.NamedAdapter(name=name, fingerprint=loaded.fingerprint, version=version, folder=str(folder))
    await tell(router, role, named)
    await router.wait_for(lambda: served(router, role).get(name) == loaded.fingerprint)
    return str(loaded.fingerprint)


async def unload(router: Any, role: Role, name: str, version: int) -> None:
    await tell(router, role, pr.NamedAdapter(name=name, version=version))
    await router.wait_for(lambda: name not in served(router, role))


def of(sequence: worker_pb2.Sequence, adapter: str) -> worker_pb2.Sequence:
    sequence.adapter = adapter
    sequence.cache_salt = adapter.encode()
    return sequence


async def test_each_adapter_has_its_own_tokens_and_kv(start: Any, attach: Any, ask: Any, folders: Path) -> None:
    lora = tuple(f"{name}={folders / name}" for name in ("a", "b"))
    workers = [start(role, lora=lora) for role in ROLES]
    router = await attach(*workers)
    names = served(router, Role.DECODE)
    assert set(names) == {"a", "b"}
    assert names == served(router, Role.PREFILL)
    for turn in range(2):  # the second finds the prefix of the first
        for name, adapter in {"base": "", **names}.items():
            expected = answer(PROMPT, 8, adapter=adapter, prefilled=len(PROMPT))
            assert await router.remote(of(ask(f"{name}-r{turn}", PROMPT), adapter)) == expected
            local = await router.local(of(ask(f"{name}-l{turn}", PROMPT), adapter))
            assert local == answer(PROMPT, 8, adapter=adapter, prefilled=8), "two blocks are the prefill worker's"
    assert router.all("first_token", "a-r1")[0].cached_tokens == 8


async def test_a_transfer_under_another_adapters_salt_is_rejected(
    start: Any, attach: Any, ask: Any, folders: Path
) -> None:
    """The salt is part of the content hashes that stamp each block. So if a router mixed two adapters up, the receiver
    would reject the blocks."""
    workers = [start(role, lora=(f"a={folders / 'a'}", f"b={folders / 'b'}")) for role in ROLES]
    router = await attach(*workers)
    names = served(router, Role.DECODE)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=of(ask("r", PROMPT), names["a"])))
    granted = await router.next("granted", "r")
    wrong = of(ask("r", PROMPT), names["b"])
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=wrong, grant=granted.grant))
    ended = await router.next("transfer_ended", "r", Role.DECODE)
    assert not ended.is_committed
    cached = await workers[1].on_engine(lambda program: program.blocks.num_evictable)
    assert cached == 0, "no block was accepted"


async def test_a_sequence_without_its_adapter_is_refused(start: Any, attach: Any, ask: Any) -> None:
    router = await attach(start(Role.DECODE))
    sequence = of(ask("r", PROMPT), "f" * 32)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    refused = await router.next("refused", "r")
    assert refused.reason == worker_pb2.REFUSAL_REASON_NO_ADAPTER
    long = of(ask("long", PROMPT), "f" * 65)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=long, is_local=True))
    assert (await router.next("failed", "long")).kind == worker_pb2.FAILURE_KIND_INVALID


async def test_an_adapter_is_loaded_while_others_run(start: Any, attach: Any, ask: Any, folders: Path) -> None:
    worker = start(Role.DECODE, lora_folders=(str(folders),), toy_step_s=0.002, max_context_tokens=256)
    router = await attach(worker)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=150), is_local=True))
    await router.wait_for(lambda: router.text("r"))
    fingerprint = await serve(router, Role.DECODE, "a", folders / "a", 1)
    assert await router.local(of(ask("s", PROMPT), fingerprint)) == answer(PROMPT, 8, adapter=fingerprint)
    assert await router.finished("r") == answer(PROMPT, 150)


@pytest.mark.parametrize("scheduling", ["off", "on"])
async def test_an_unloaded_adapter_ends_with_its_last_sequence(
    start: Any, attach: Any, ask: Any, folders: Path, scheduling: str
) -> None:
    worker = start(
        Role.DECODE, lora=(f"a={folders / 'a'}",), toy_step_s=0.002, speculation="off", async_scheduling=scheduling
    )
    router = await attach(worker)
    fingerprint = served(router, Role.DECODE)["a"]
    for name, adapter in (("base", ""), ("r", fingerprint)):
        sequence = of(ask(name, PROMPT, max_tokens=60), adapter)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
        await router.wait_for(lambda name=name: router.text(name))
    await unload(router, Role.DECODE, "a", 1)
    assert spoken(router, Role.DECODE).loaded == (fingerprint,)
    assert await router.finished("r") == answer(PROMPT, 60, adapter=fingerprint)
    await router.wait_for(lambda: spoken(router, Role.DECODE).loaded == ())
    assert await router.finished("base") == answer(PROMPT, 60)
    sequence = of(ask("late", PROMPT), fingerprint)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    assert (await router.next("refused", "late")).reason == worker_pb2.REFUSAL_REASON_NO_ADAPTER


async def test_an_adapter_is_not_freed_under_a_step_in_flight(
    start: Any, attach: Any, ask: Any, folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With asynchronous scheduling, a launched step may have a row of a sequence that has ended."""
    settings = {"speculation": "off", "async_scheduling": "on", "toy_step_s": 0.002}
    worker = start(Role.DECODE, lora=(f"a={folders / 'a'}",), lora_folders=(str(folders),), **settings)
    router = await attach(worker)
    fingerprint = served(router, Role.DECODE)["a"]
    base = ask("base", PROMPT, max_tokens=240)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=base, is_local=True))
    await router.wait_for(lambda: router.text("base"))
    for number in range(1, 6):
        name, prompt = f"r{number}", [*PROMPT, number, 40, EOT]  # 40 characters, then the end of sequence
        sequence = of(ask(name, prompt, max_tokens=100), fingerprint)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
        await router.wait_for(lambda name=name: len(router.text(name)) > 2)
        await unload(router, Role.DECODE, "a", 2 * number)
        assert await router.finished(name) == answer(prompt, 100, adapter=fingerprint)
        await router.wait_for(lambda: spoken(router, Role.DECODE).loaded == ())
        assert await serve(router, Role.DECODE, "a", folders / "a", 2 * number + 1) == fingerprint
    assert await router.finished("base") == answer(PROMPT, 240)
    assert not [one for one in caplog.messages if "step failed" in one]


async def test_a_name_with_other_weights_keeps_the_former_ones_for_a_while(
    start: Any, attach: Any, ask: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Role.DECODE, lora=(f"a={folders / 'a'}",), lora_folders=(str(folders),))
    router = await attach(worker)
    former = served(router, Role.DECODE)["a"]
    fingerprint = await serve(router, Role.DECODE, "a", folders / "b", 1)
    assert fingerprint != former
    assert set(spoken(router, Role.DECODE).loaded) == {former, fingerprint}
    assert await router.local(of(ask("r", PROMPT), former)) == answer(PROMPT, 8, adapter=former)
    monkeypatch.setattr(worker_adapters, "KEEP_S", 0.0)
    last = await serve(router, Role.DECODE, "a", folders / "c", 2)
    await router.wait_for(lambda: set(spoken(router, Role.DECODE).loaded) == {former, last})


async def test_a_kept_adapter_is_freed_if_there_is_no_room(start: Any, attach: Any, folders: Path) -> None:
    worker = start(Role.DECODE, lora=(f"a={folders / 'a'}",), lora_folders=(str(folders),), max_lora_adapters=2)
    router = await attach(worker)
    await serve(router, Role.DECODE, "a", folders / "b", 1)
    await serve(router, Role.DECODE, "c", folders / "c", 2)
    write_adapter(folders / "d", seed=9)
    loaded = await load(router, Role.DECODE, "d", folders / "d", 3)
    assert "max_lora_adapters" in loaded.error
    assert set(served(router, Role.DECODE)) == {"a", "c"}


async def test_a_load_is_served_only_once_it_is_named(start: Any, attach: Any, folders: Path) -> None:
    router = await attach(start(Role.DECODE, lora_folders=(str(folders),)))
    loaded = await load(router, Role.DECODE, "a", folders / "a", 1)
    assert served(router, Role.DECODE) == {}
    assert spoken(router, Role.DECODE).loaded == (loaded.fingerprint,)
    await tell(router, Role.DECODE, pr.DropLoad(name="a", version=1))
    await router.wait_for(lambda: spoken(router, Role.DECODE).loaded == ())


async def test_a_lost_router_leaves_no_load_behind(start: Any, attach: Any, folders: Path) -> None:
    worker = start(Role.DECODE, lora_folders=(str(folders),))
    router, other = await attach(worker), await attach(worker, name="router-1")
    await load(router, Role.DECODE, "a", folders / "a", 1)
    await other.wait_for(lambda: spoken(other, Role.DECODE).loaded)
    await router.close()
    await other.wait_for(lambda: spoken(other, Role.DECODE).loaded == ())


async def test_the_larger_version_counts_in_any_order(start: Any, attach: Any, folders: Path) -> None:
    router = await attach(start(Role.DECODE, lora_folders=(str(folders),)))
    await unload(router, Role.DECODE, "a", 5)
    loaded = await load(router, Role.DECODE, "a", folders / "a", 4)
    await tell(router, Role.DECODE, pr.NamedAdapter(name="a", fingerprint=loaded.fingerprint, version=4))
    await router.wait_for(lambda: spoken(router, Role.DECODE).loaded == ())
    assert spoken(router, Role.DECODE).named == (pr.NamedAdapter(name="a", version=5),)
    assert await serve(router, Role.DECODE, "a", folders / "a", 6) == loaded.fingerprint


async def test_only_the_last_unloaded_names_are_remembered(start: Any, attach: Any) -> None:
    router = await attach(start(Role.DECODE))
    for number in range(MAX_UNLOADED + 3):
        await tell(router, Role.DECODE, pr.NamedAdapter(name=f"n{number}", version=number + 1))
    last = f"n{MAX_UNLOADED + 2}"
    await router.wait_for(lambda: last in [one.name for one in spoken(router, Role.DECODE).named])
    assert [one.name for one in spoken(router, Role.DECODE).named] == [f"n{number}" for number in range(3, 67)]


async def test_a_name_that_no_router_should_send_is_dropped(start: Any, attach: Any) -> None:
    router = await attach(start(Role.DECODE))
    for name in ("", "x" * 257, "a b"):
        await tell(router, Role.DECODE, pr.NamedAdapter(name=name, version=1))
    await tell(router, Role.DECODE, pr.NamedAdapter(name="long", version=1, folder="/" * 5000))
    await unload(router, Role.DECODE, "last", 1)
    await router.wait_for(lambda: spoken(router, Role.DECODE).named)
    assert [one.name for one in spoken(router, Role.DECODE).named] == ["last"]


async def test_loads_that_wait_are_bounded(
    start: Any, attach: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Role.DECODE, lora_folders=(str(folders),))
    router, begin = await attach(worker), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(name: str, folder: Path) -> Any:
        asyncio.run_coroutine_threadsafe(begin.wait(), loop).result(60.0)
        raise ModelError(name, "slow", "fast")

    monkeypatch.setattr(worker.program.adapters, "_read", slow)
    for number in range(MAX_LOADS + 3):
        await tell(router, Role.DECODE, pr.LoadAdapter(name=f"n{number}", folder=str(folders / "a"), version=1))
    await router.wait_for(lambda: len(router.all("adapter_loaded")) == 2)
    assert all("wait to be read" in one.error for one in router.all("adapter_loaded"))
    begin.set()
    await router.wait_for(lambda: len(router.all("adapter_loaded")) == MAX_LOADS + 3)


async def test_a_bad_adapter_changes_nothing(start: Any, attach: Any, ask: Any, folders: Path) -> None:
    router = await attach(start(Role.DECODE, lora_folders=(str(folders),)))
    (folders / "a" / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    bad: list[tuple[str, Path]] = [
        ("a", folders / "a"),
        ("a", folders / "absent"),
        ("a b", folders / "b"),
        ("", folders),
    ]
    for number, (name, folder) in enumerate(bad, 1):
        loaded = await load(router, Role.DECODE, name, folder, number)
        assert loaded.error
        assert not loaded.fingerprint
    assert spoken(router, Role.DECODE) == pr.Adapters()
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)


async def test_a_router_drops_only_its_own_load(start: Any, attach: Any, folders: Path) -> None:
    worker = start(Role.DECODE, lora_folders=(str(folders),))
    router, other = await attach(worker), await attach(worker, name="router-1")
    fingerprint = (await load(router, Role.DECODE, "a", folders / "a", 1)).fingerprint
    assert (await load(other, Role.DECODE, "a", folders / "a", 1)).fingerprint == fingerprint
    await tell(router, Role.DECODE, pr.DropLoad(name="a", version=1))
    await load(router, Role.DECODE, "b", folders / "b", 2)
    named = pr.NamedAdapter(name="a", fingerprint=fingerprint, version=1, folder=str(folders / "a"))
    await tell(other, Role.DECODE, named)
    await other.wait_for(lambda: served(other, Role.DECODE) == {"a": fingerprint})


async def test_a_load_that_waits_is_answered_although_another_router_drops_its_own(
    start: Any, attach: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(Role.DECODE, lora_folders=(str(folders),))
    router, other, begin = await attach(worker), await attach(worker, name="router-1"), asyncio.Event()
    loop, read = asyncio.get_running_loop(), worker.program.adapters._read
    versions = itertools.count(1)

    async def seen(one: Any) -> None:
        """The worker has handled what was sent before."""
        marker = pr.NamedAdapter(name="marker", version=next(versions))
        await tell(one, Role.DECODE, marker)
        await one.wait_for(lambda: marker in spoken(one, Role.DECODE).named)

    def slow(name: str, folder: Path) -> Any:
        asyncio.run_coroutine_threadsafe(begin.wait(), loop).result(60.0)
        return read(name, folder)

    monkeypatch.setattr(worker.program.adapters, "_read", slow)
    command = pr.LoadAdapter(name="a", folder=str(folders / "a"), version=1)
    for one in (router, other):
        await tell(one, Role.DECODE, command)
        await seen(one)
    await tell(router, Role.DECODE, pr.DropLoad(name="a", version=1))
    await seen(router)
    begin.set()
    await other.wait_for(lambda: other.all("adapter_loaded"))


async def test_the_names_of_one_adapter_are_bounded(start: Any, attach: Any, folders: Path) -> None:
    router = await attach(start(Role.DECODE, lora_folders=(str(folders),), max_lora_adapters=2))
    for version, name in enumerate(("n0", "n1", "n0"), 1):
        await serve(router, Role.DECODE, name, folders / "a", version)
    loaded = await load(router, Role.DECODE, "n2", folders / "a", 4)
    assert "max_lora_adapters" in loaded.error
    await unload(router, Role.DECODE, "n0", 5)
    await serve(router, Role.DECODE, "n2", folders / "a", 6)


# -- folders ---------------------------------------------------------------------------------------------------


def test_folders_below_the_permitted_ones_are_resolved(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(root / "a")
    assert permitted_folder(str(root / "a"), [str(root)]) == root / "a"
    assert permitted_folder(str(root / "link"), [str(root)]) == root / "a"
    assert permitted_folder(str(root), [str(root)]) == root
    assert permitted_folder(str(root / "a"), [], str(root / "a")) == root / "a"


@pytest.mark.parametrize(
    "make",
    [
        lambda root: str(root.parent / "other"),
        lambda root: str(root / ".." / "other"),
        lambda root: str(root / "a" / ".." / ".." / "other"),
        lambda root: str(root / "out"),
        lambda root: str(root / "loop"),
        lambda root: str(root / "file"),
        lambda root: str(root / "absent"),
        lambda root: str(root) + "-evil",
        lambda root: "a",
        lambda root: "",
        lambda root: "~",
        lambda root: str(root / "a") + "\0",
        lambda root: str(root / "a") + "\n",
        lambda root: str(root / ("x" * 5000)),
        lambda root: "/proc/self/root" + str(root.parent / "other"),
    ],
)
def test_other_folders_are_rejected(tmp_path: Path, make: Callable[[Path], str]) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    (root / "a").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "root-evil").mkdir()
    (root / "file").write_text("")
    (root / "out").symlink_to(other)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(InvalidRequest, match="lora_path"):
        permitted_folder(make(root), [str(root)])
    with pytest.raises(InvalidRequest, match="lora_folders is empty"):
        permitted_folder(str(root / "a"), [])
