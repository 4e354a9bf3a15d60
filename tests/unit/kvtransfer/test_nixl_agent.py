"""NIXL agents: registered memory, staging, and a library that fails or does not answer. The library is a fake."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvtransfer.protocol.frames import Frame, Kind, tag_of
from kvtransfer.protocol.transport import ReceiveOutcome
from kvtransfer.transports import nixl
from kvtransfer.transports.common.registry import NAMES
from kvtransfer.transports.tcp import TCP
from kvtransfer.transports.tcp_staged import TCP_STAGED
from pdserve.core.errors import ConfigError, TransferFailed
from tests.support.transfer_ends import kinds
from tests.unit.kvtransfer.fake_nixl import World
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Heard, HostPool, Pair, wait_for
from tests.unit.kvtransfer.test_nixl_path import begin_slow

MakePair = Callable[..., Pair]


@pytest.fixture
def pair(make_pair: MakePair, nixl_world: World) -> Pair:
    """Two connected agents."""
    pair = make_pair("nixl")
    assert pair.move(pair.grant((1, 2)), (1, 2))[0].outcome is ReceiveOutcome.VERIFIED
    return pair


def test_a_pool_is_registered_once_and_stays_mapped() -> None:
    world = World()
    agent = nixl.Agent(world.make)
    pool = HostPool(4, seed=1)
    export, first = agent.export(pool), pool.block(0)
    assert agent.export(pool) == export
    assert len(world.agents[0].regions) == 1
    gone = weakref.ref(pool)
    del pool
    wait_for(lambda: gone() is None, "the pool's end")
    assert ctypes.string_at(export.address, BLOCK_BYTES) == first


def test_staging_is_reused_and_stays_registered() -> None:
    world = World()
    exporter, importer = nixl.Agent(world.make), nixl.Agent(world.make)
    pool = HostPool(4)
    _, metadata = exporter.export(pool)
    first, second = importer.reader(metadata, 8192), importer.reader(metadata, 8192)
    assert first.address != second.address
    first.close()
    assert world.agents[1].remotes, "the other reader is still there"
    second.close()
    third = importer.reader(metadata, 8192)
    assert third.address in (first.address, second.address)
    assert len(world.agents[1].regions) == 2
    third.close()
    wait_for(lambda: not world.agents[1].remotes, "the remote agent to be forgotten")


def test_the_number_of_readers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_READERS", 1)
    world = World()
    exporter, importer = nixl.Agent(world.make), nixl.Agent(world.make)
    pool = HostPool(4)
    _, metadata = exporter.export(pool)
    importer.reader(metadata, 4096)
    with pytest.raises(TransferFailed, match="1 connections are reading"):
        importer.reader(metadata, 4096)


def test_a_library_that_cannot_start_fails_its_caller() -> None:
    def broken(name: str) -> None:
        raise RuntimeError("no plugins")

    with pytest.raises(TransferFailed, match="NIXL failed: no plugins"):
        nixl.Agent(broken)


def test_a_silent_library_fails_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "CALL_S", 0.05)
    answers = threading.Event()

    def stuck(name: str) -> None:
        assert answers.wait(WAIT_S)

    with pytest.raises(TransferFailed, match=r"NIXL has not answered in 0\.05 s"):
        nixl.Agent(stuck)
    answers.set()


def test_a_failed_cleanup_does_not_stop_the_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    exporter, importer = nixl.Agent(world.make), nixl.Agent(world.make)
    pool = HostPool(4)
    _, metadata = exporter.export(pool)

    def fails(name: bytes) -> None:
        raise RuntimeError("NIXL_ERR_INVALID_PARAM")

    with monkeypatch.context() as patch:
        patch.setattr(world.agents[1], "remove_remote_agent", fails)
        importer.reader(metadata, 4096).close()
        wait_for(lambda: "NIXL failed" in caplog.text, "the failure")
    importer.reader(metadata, 4096).close()
    wait_for(lambda: not world.agents[1].remotes, "the remote agent to be forgotten")


@pytest.mark.parametrize("backends", [["UCX"], ["POSIX"]])
def test_the_library_uses_ucx_and_prints_nothing(monkeypatch: pytest.MonkeyPatch, backends: list[str]) -> None:
    asked: list[tuple[str, dict[str, object]]] = []

    def agent(name: str, config: dict[str, object]) -> SimpleNamespace:
        asked.append((name, config))
        return SimpleNamespace(backends=dict.fromkeys(backends))

    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda **config: config)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    log = logging.getLogger("nixl")
    log.addHandler(logging.StreamHandler(sys.stdout))
    if backends == ["UCX"]:
        nixl.make_library("a")
    else:
        with pytest.raises(TransferFailed, match="this build of NIXL has no UCX"):
            nixl.make_library("a")
    assert asked == [("a", {"backends": ["UCX"], "enable_prog_thread": False})]
    assert log.handlers == []


def test_a_slot_that_is_still_read_into_is_not_announced_again(pair: Pair, nixl_world: World) -> None:
    received, _, _ = begin_slow(pair, nixl_world)
    [outbound] = pair.sender.plain._pairs.values()
    assert outbound._connection is not None
    tag = tag_of(pair.receiver.open_keys[0])
    frame = Frame(Kind.CHUNK, tag, 0, 1, 1, 4, b"c" * 8)  # Slot 0 belonged to the first transfer.
    outbound._connection.socket.sendall(frame.encode())  # Nothing else is being written.
    assert received.wait().error == "sender p0: protocol error: 1 blocks in slot 1, which is still read into"
    nixl_world.gate.set()


def test_without_an_agent_another_transport_is_used(
    make_pair: MakePair, nixl_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair("nixl")
    with monkeypatch.context() as patch:
        patch.setattr(nixl.Agent, "export", failing)
        sent = Heard()
        pair.sender.start(pair.grant((1,)), sent)
        assert sent.wait().error.endswith("NIXL failed: no memory to register")
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


def failing(*_: object) -> None:
    raise TransferFailed("NIXL failed: no memory to register")


def test_auto_prefers_the_others_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, nixl_world: World
) -> None:
    assert NAMES.index("nixl") > NAMES.index("tcp")
    order = kinds("auto")
    assert order.index(TCP) < order.index(nixl.NIXL) < order.index(TCP_STAGED)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert nixl.NIXL not in kinds("auto")
    with pytest.raises(ConfigError, match="the package nixl is not installed"):
        kinds("nixl")
