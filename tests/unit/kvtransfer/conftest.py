"""Fixtures of the transfer tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.devices import cuda, nccl_connection
from kvtransfer.faults.injector import FaultInjector
from kvtransfer.faults.plan import Fault
from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.protocol.frames import Tag
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.nixl import NIXL, Nixl
from pdserve.core.kv.kv_shape import Fingerprint
from pdserve.core.kv.stamps import BlockStamps
from tests.support.fake_device import DevicePool, FakeDevice
from tests.support.fake_ends import DEVICE_TRANSPORTS, stand_ins
from tests.support.tls_files import TestAuthority
from tests.support.transfer_ends import endpoint_config
from tests.support.transfer_proxy import Hook, Proxy
from tests.unit.kvtransfer.fake_driver import Event, Stream
from tests.unit.kvtransfer.fake_nixl import World
from tests.unit.kvtransfer.harness import BLOCK_BYTES, PATIENT, Clock, GrpcHost, HostPool, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.process import Process
from tests.unit.kvtransfer.raw import RawSender


@pytest.fixture
def devices() -> Iterator[dict[int, FakeDevice]]:
    """cuda_ipc and nccl over stand-ins; the devices by the identity of their pools."""
    with stand_ins() as made:
        yield made


NIXL_WORLD = World()
NIXL_STAND_IN = Nixl(NIXL_WORLD.make)  # One for all tests, as in a process, because its agents' threads never end.


@pytest.fixture
def nixl_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The nixl path over a stand-in for the library."""
    monkeypatch.setitem(TRANSPORTS, NIXL, NIXL_STAND_IN)
    yield NIXL_WORLD
    NIXL_WORLD.reset()


@pytest.fixture(scope="session")
def tls_authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def make_pair(
    devices: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch, tls_authority: TestAuthority
) -> Iterator[Callable[..., Pair]]:
    """make_pair(transport, num_blocks=64, block_bytes=4096, hook=None, fault_of=None).

    With a hook, a Proxy is placed between the ends. `fault_of` injects faults at both ends. `runs_per_block` of the
    sender's and the receiver's pool: 1, or the number of layers.
    """
    # Small, so that small pools need several chunks between devices.
    monkeypatch.setattr("kvtransfer.link.endpoint.DEVICE_CHUNK_BYTES", DEFAULT_CHUNK_BYTES)
    pairs: list[Pair] = []
    proxies: list[Proxy] = []

    def make(
        transport: str,
        num_blocks: int = 64,
        block_bytes: int = BLOCK_BYTES,
        hook: Hook | None = None,
        fault_of: Callable[[Tag], Fault | None] | None = None,
        lease: Lease = PATIENT,
        clock: Callable[[], float] = time.monotonic,
        facts: Fingerprint | None = None,
        runs_per_block: tuple[int, int] = (1, 1),
    ) -> Pair:
        name, _, is_encrypted = transport.partition("+")  # Such as tcp+tls.
        tls = tls_authority.tls("worker") if is_encrypted else None
        transport = name
        make_pool = DevicePool if transport in DEVICE_TRANSPORTS else HostPool
        source = make_pool(num_blocks, block_bytes, seed=7, runs_per_block=runs_per_block[0])
        target = make_pool(num_blocks, block_bytes, runs_per_block=runs_per_block[1])
        fault_injector = None if fault_of is None else FaultInjector(fault_of)
        common: dict[str, Any] = {
            "transport": transport,
            "fault_injector": fault_injector,
            "lease": lease,
            "clock": clock,
            "tls": tls,
        }
        stamps = BlockStamps(num_blocks), BlockStamps(num_blocks)
        facts = facts or fingerprint(block_bytes, max(runs_per_block))
        receiver = make_receiver(
            endpoint_config(target, facts, worker_id="d0", incarnation="d0-1", stamps=stamps[1], **common),
            host="127.0.0.1",
        )
        sender = make_sender(
            endpoint_config(source, facts, worker_id="p0", incarnation="p0-1", stamps=stamps[0], **common)
        )
        servicer: Any = receiver.servicer
        if hook is not None:
            servicer = Proxy(receiver, hook, block_bytes, runs_per_block[0])
            proxies.append(servicer)
        host = GrpcHost(servicer, tls=tls)
        pairs.append(Pair(transport, source, target, receiver, sender, host, *stamps, facts))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.sender.close()
        pair.receiver.close()
        pair.host.stop()
    for proxy in proxies:
        proxy.close()
    for pair in pairs:
        assert pair.receiver.open_keys == [], "the receiver leaked a grant"
        assert pair.sender.open_keys == [], "the sender leaked a transfer"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    """start_process(*argv): peer.py with these arguments."""
    started: list[Process] = []

    def start(*argv: str) -> Process:
        started.append(Process(*argv))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def prepared(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """prepared(name): the transport to use. nixl is the real library if it is installed."""

    def prepare(name: str) -> str:
        if name == "nixl" and (why_not := TRANSPORTS[NIXL].why_not()):
            pytest.skip(why_not)
        if name == "nixl-stand-in":
            request.getfixturevalue("nixl_world")
            return "nixl"
        return name

    return prepare


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest, prepared: Callable[[str], str]) -> str:
    return prepared(request.param)


@pytest.fixture
def pair(make_pair: Callable[..., Pair], transport: str) -> Pair:
    return make_pair(transport)


@pytest.fixture
def raw(pair: Pair) -> Iterator[RawSender]:
    sender = RawSender(pair)
    yield sender
    sender.close()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Checks that each test ends the threads that it started. Clusters of other tests may run in this process."""

    def found() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("kv-")}

    before = found()
    yield
    wait_for(lambda: found() <= before, "transfer threads to end")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The next events of the device. torch's CUDA is a fake."""
    made: list[Event] = []
    fake = SimpleNamespace(
        Event=lambda: made.pop(0) if made else Event(),
        Stream=lambda device: Stream(),
        ExternalStream=lambda ptr, device: Stream(),
        get_device_properties=lambda device: SimpleNamespace(uuid="gpu"),
        device=lambda device: nullcontext(),
        is_available=lambda: False,
    )
    kept = ("tensor", "int32", "int64", "uint8", "Tensor", "empty", "device", "as_tensor")
    plain = SimpleNamespace(**{name: getattr(torch, name) for name in kept}, cuda=fake)
    monkeypatch.setattr(cuda, "torch", plain)
    monkeypatch.setattr(nccl_connection, "torch", plain)
    return made
