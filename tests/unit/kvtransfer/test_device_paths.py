"""cuda_ipc and nccl when their libraries are slow, differ or fail, over stand-ins that behave like the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.devices.cuda import why_no_cuda
from kvtransfer.link.endpoint import make_sender
from kvtransfer.link.outbound import Outbound
from kvtransfer.protocol.frames import Frame, Kind, pack
from kvtransfer.protocol.lease import Lease
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome, Text
from kvtransfer.transports.common.registry import TRANSPORTS
from kvtransfer.transports.cuda_ipc import CUDA_IPC, CudaIpc
from kvtransfer.transports.nccl import NCCL, Nccl
from kvtransfer.transports.tcp_staged import TCP_STAGED, TcpStaged
from pdserve.core.errors import ConfigError
from pdserve.core.kv.kv_shape import Grant
from tests.support.fake_device import DevicePool, FakeCopying, FakeDevice, Trouble
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.support.fake_nccl import FakeConnection, FakeConnector
from tests.support.transfer_ends import endpoint_config, kinds
from tests.unit.kvtransfer.harness import BLOCK_BYTES, WAIT_S, Clock, Heard, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import RawSender, expected, numbers

MakePair = Callable[..., Pair]
PATHS = pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)


class HeldDevice(FakeDevice):
    """A device whose copies wait until a test releases them."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, Trouble(delay_s=0.0))
        self.gate = threading.Event()
        self.gate.set()

    def copy(self, *arguments: Any, **options: Any) -> FakeCopying:
        gate = self.gate

        def hold() -> bytes:
            gate.wait(WAIT_S)
            return b""

        for stream in self.streams:
            stream.queue(hold, lambda: None)
        return super().copy(*arguments, **options)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]) -> Callable[[Any], HeldDevice]:
    """held(pool): the device of that pool."""

    def device_of(pool: Any) -> HeldDevice:
        made = devices.setdefault(id(pool), HeldDevice(pool))
        assert isinstance(made, HeldDevice)
        return made

    monkeypatch.setitem(TRANSPORTS, CUDA_IPC, CudaIpc(device_of))
    monkeypatch.setitem(TRANSPORTS, NCCL, Nccl(device_of, FakeConnector()))
    monkeypatch.setitem(TRANSPORTS, TCP_STAGED, TcpStaged(device_of))
    return device_of


@PATHS
def test_an_abort_drains_only_when_the_copy_into_the_pool_has_ended(
    make_pair: MakePair, held: Callable[[Any], HeldDevice], transport: str
) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1, 2)), (1, 2))
    device = held(pair.target)
    device.gate.clear()
    before = device.num_copies
    grant = pair.grant(tuple(range(10, 20)))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(i, i) for i in range(10)], True)
    wait_for(lambda: device.num_copies > before, "a copy into the target pool")
    pair.receiver.abort(grant.key)
    assert not received.all or received.outcomes == ["quarantined"]
    device.gate.set()
    wait_for(lambda: "drained" in received.outcomes, "the drained abort")
    after = pair.target.block(10)
    assert sent.wait().outcome is SendOutcome.FAILED
    pair.move(pair.grant((30,)), (5,))
    assert pair.target.block(10) == after, "nothing is written after it was drained"


@PATHS
def test_a_source_block_that_is_reused_while_it_is_read_fails_the_transfer(
    make_pair: MakePair, held: Callable[[Any], HeldDevice], transport: str
) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1, 2)), (1, 2))
    device = held(pair.source)
    device.gate.clear()
    before = device.num_copies
    grant = pair.grant((10, 11))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 3), (1, 4)], True)
    wait_for(lambda: device.num_copies > before, "the source being read")
    pair.source_stamps.begin([4])
    device.gate.set()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert pair.sender.stats.stale_source == 1


@PATHS
def test_an_aborted_sender_does_not_wait_for_a_slow_device(
    make_pair: MakePair, held: Callable[[Any], HeldDevice], transport: str
) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1,)), (1,))
    device = held(pair.source)
    device.gate.clear()
    before = device.num_copies
    grant = pair.grant((10,))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 3)], True)
    wait_for(lambda: device.num_copies > before, "the source being read")
    pair.sender.abort(grant.key)
    device.gate.set()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    again, _ = pair.move(pair.grant((10,)), (3,))
    assert again.outcome is ReceiveOutcome.VERIFIED


def read_at_source(pair: Pair, held: Callable[[Any], HeldDevice]) -> tuple[HeldDevice, Grant, Heard, Heard, Outbound]:
    """A transfer whose source block the device reads until the gate is opened, and the thread of its connection."""
    pair.move(pair.grant((1,)), (1,))
    device = held(pair.source)
    device.gate.clear()
    before = device.num_copies
    grant = pair.grant((10,))
    received, sent = pair.begin(grant)
    pair.sender.push(grant.key, [(0, 3)], True)
    wait_for(lambda: device.num_copies > before, "the source being read")
    outbound, _ = pair.sender.plain._transfers[grant.key]
    return device, grant, received, sent, outbound


def test_a_late_read_of_a_source_closes_the_connection(
    make_pair: MakePair, held: Callable[[Any], HeldDevice], clock: Clock
) -> None:
    pair = make_pair("cuda_ipc", lease=Lease(beat_s=0.05, silence_s=100.0), clock=clock)
    device, grant, received, sent, old = read_at_source(pair, held)
    pair.sender.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.FAILED
    clock.added_s += 1.0
    wait_for(lambda: old.is_over, "the connection's end to begin")
    assert sent.all == [], "the device reads it still"
    device.gate.set()
    assert sent.wait().error == "aborted by the sender"
    again, _ = pair.move(pair.grant((11,)), (3,))
    assert again.outcome is ReceiveOutcome.VERIFIED


def test_a_finished_copy_frees_blocks_before_its_frame(make_pair: MakePair, held: Callable[[Any], HeldDevice]) -> None:
    pair = make_pair("cuda_ipc")
    device = held(pair.target)
    raw = RawSender(pair)
    try:
        device.gate.clear()
        before = device.num_copies
        grant, tag, received = expected(pair, (10,))
        raw.announce(tag)
        chunk = Frame(Kind.CHUNK, tag, 0, 1, 0, 4, bytes(8), True).encode() + pack([0], tag.generation, 1)
        raw.send(chunk + numbers(range(5, 6)))
        wait_for(lambda: device.num_copies > before, "the copy into the target pool")
        raw.send(chunk[:-1])
        pair.receiver.abort(grant.key)
        device.gate.set()
        received.wait()
        wait_for(lambda: received.outcomes[-1] == "drained", "the end of the write")
    finally:
        raw.close()


def test_close_waits_for_connections_that_are_ending(make_pair: MakePair, held: Callable[[Any], HeldDevice]) -> None:
    """A new connection had replaced one whose device still read the pool."""
    pair = make_pair("cuda_ipc")
    device, _, _, sent, old = read_at_source(pair, held)
    old.stop()
    wait_for(lambda: old.is_over, "the connection's end to begin")
    pair.sender.start(pair.grant((11,)), Heard())
    threading.Timer(0.1, device.gate.set).start()
    pair.sender.close()
    assert sent.outcomes == ["failed"]
    assert pair.sender.open_keys == []


def test_a_stalled_sender_ends_only_its_own_pair(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receive waits in staging until the connection ends. Meanwhile another pair's transfers complete."""
    lost, well = make_pair("nccl"), make_pair("nccl")
    lost.move(lost.grant((1,)), (1,))
    monkeypatch.setattr(FakeConnection, "send", lambda *_: FakeCopying())
    before = lost.target.block(10)
    grant = lost.grant((10,))
    received, _ = lost.begin(grant)
    lost.sender.push(grant.key, [(0, 3)], True)
    wait_for(lambda: lost.receiver.stats.chunks >= 2, "the announced chunk")
    monkeypatch.undo()
    lost.sender.close()
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert lost.target.block(10) == before, "a late sender touches staging, never a page"
    assert well.receiver.is_healthy


def test_different_nccl_versions_are_rejected(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice]
) -> None:
    class Newer(Nccl):
        def _connector(self) -> Any:
            return FakeConnector("2.31")

    pair = make_pair("nccl")
    plain = TRANSPORTS[NCCL]
    monkeypatch.setattr(plain, "receiver", Newer(lambda pool: devices[id(pool)]).receiver)
    received, sent = pair.begin(pair.grant((1,)))
    assert sent.wait().outcome is SendOutcome.FAILED
    wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the refused handshake")
    pair.receiver.close()
    assert received.wait().outcome is ReceiveOutcome.FAILED


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_the_handshake_rejects_another_block_size(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice], transport: str
) -> None:
    pair = make_pair(transport)
    plain = TRANSPORTS[CUDA_IPC if transport == "cuda_ipc" else NCCL]
    told = SimpleNamespace(num_blocks=64, block_bytes=2 * BLOCK_BYTES)
    source = FakeDevice(pair.source)  # type: ignore[arg-type]
    devices[id(told)] = source
    send = plain.sender
    monkeypatch.setattr(plain, "sender", lambda sock, pool: send(sock, told))  # type: ignore[arg-type]
    received, sent = pair.begin(pair.grant((1,)))
    assert sent.wait().outcome is SendOutcome.FAILED
    wait_for(lambda: pair.receiver.stats.protocol_errors == 1, "the refused handshake")
    pair.receiver.abort(pair.receiver.open_keys[0])
    assert received.wait().outcome is ReceiveOutcome.DRAINED


@PATHS
@pytest.mark.parametrize("change", [{"block_size": 4}, {"dtype": "int8", "layout": "block-major-int8.v1"}])
def test_a_pool_of_another_shape_is_rejected(make_pair: MakePair, transport: str, change: dict[str, Any]) -> None:
    """Devices do not convert, so the decode worker computes the prompt itself, as after any failure."""
    pair = make_pair(transport)
    facts = fingerprint(BLOCK_BYTES)
    floats = replace(facts.shape, dtype="float32", layout="block-major.v1", head_dim=4)
    mine, theirs = floats, replace(floats, **change)
    sender = make_sender(
        endpoint_config(
            DevicePool(4, mine.block_bytes),
            replace(facts, shape=mine),
            worker_id="p1",
            incarnation="p1-1",
            transport=transport,
        )
    )
    sent = Heard()
    text = Text(num_tokens=4, own=(1,), theirs=(2,))
    sender.start(pair.grant((1,), fingerprint=replace(facts, shape=theirs)), sent, 5.0, text)
    end = sent.wait()
    sender.close()
    assert end.outcome is SendOutcome.FAILED
    assert end.error.startswith("kv_shape: got ")
    assert str(mine) in end.error
    assert str(theirs) in end.error
    assert "blocks on a GPU cannot be converted" in end.error
    assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED


@PATHS
@pytest.mark.gpu_checks
def test_layer_groups_arrive(make_pair: MakePair, devices: dict[int, FakeDevice], transport: str) -> None:
    """Several chunks for each group, and scattered blocks in different orders on both sides."""
    facts = fingerprint(BLOCK_BYTES)
    shape = replace(facts.shape, layout="block-major.v1", dtype="float32", num_layers=4, head_dim=64)
    facts = replace(facts, shape=shape)
    pair = make_pair(transport, block_bytes=shape.block_bytes, facts=facts)
    before = [pair.target.block(block) for block in range(64)]
    granted, sources = tuple(range(63, 3, -3)), tuple(range(5, 45, 2))
    grant = pair.grant(granted, fingerprint=facts)
    received, sent = Heard(), Heard()
    pair.receiver.expect(grant, received)
    pair.sender.start(grant, sent, groups=4)
    for group in range(4):
        blocks = list(enumerate(sources))
        pair.sender.push(grant.key, blocks, group == 3, range(group, group + 1))
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    assert received.all[-1].num_bytes == len(granted) * shape.block_bytes
    for block in range(64):
        expected = pair.source.block(sources[granted.index(block)]) if block in granted else before[block]
        assert pair.target.block(block) == expected, f"block {block}"


def test_missing_requirements_are_reported() -> None:
    lacking = why_no_cuda("cupy")
    if lacking:
        with pytest.raises(ConfigError, match=r"on a GPU|CUDA|not installed"):
            kinds("auto", is_on_host=False)
        with pytest.raises(ConfigError, match=r"cuda_ipc.*another on this system"):
            kinds("cuda_ipc", is_on_host=False)
        with pytest.raises(ConfigError, match=r"tcp.*another on this system"):
            kinds("tcp", is_on_host=False)
    assert why_no_cuda("a-package-that-nobody-has") == "the package a-package-that-nobody-has is not installed"
    with pytest.raises(ConfigError, match="on a GPU"):
        kinds("shm", is_on_host=False)


@PATHS
def test_kernels_are_prepared_before_the_first_connection(
    monkeypatch: pytest.MonkeyPatch, devices: dict[int, FakeDevice], make_pair: MakePair, transport: str
) -> None:
    """On a GPU, first copies import, compile and load for longer than a connection may be silent."""
    seen: list[tuple[FakeDevice, bool]] = []
    copy = FakeDevice.copy

    def noted(device: FakeDevice, source: Any, sources: Any, target: Any, *rest: Any, **options: Any) -> FakeCopying:
        seen.append((device, target is not None))
        return copy(device, source, sources, target, *rest, **options)

    monkeypatch.setattr(FakeDevice, "copy", noted)
    pair = make_pair(transport)
    made = [devices[id(pool)] for pool in (pair.target, pair.source)]
    assert seen == [(device, is_stored) for device in made for is_stored in (False, True)]
    assert not any(bytes(devices[id(pair.target)].pool().view(0)))  # Nothing is stored in a pool.


@PATHS
@pytest.mark.gpu_checks
def test_all_alignments_are_prepared(
    make_pair: MakePair, devices: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """A kernel is compiled for each alignment on its first use, and layer groups must not wait for that."""
    seen: set[tuple[int, int, bool, bool]] = set()
    copy = FakeDevice.copy

    def noted(device: FakeDevice, source: Any, sources: Any, target: Any, *rest: Any, **options: Any) -> FakeCopying:
        for one in (source, target):
            if one is not None:
                seen.add((one._first % 16, one.block_bytes % 64, one is target, one._stride == one.block_bytes))
        return copy(device, source, sources, target, *rest, **options)

    monkeypatch.setattr(FakeDevice, "copy", noted)
    facts = fingerprint(BLOCK_BYTES)
    odd = replace(facts.shape, layout="block-major.v1", dtype="bfloat16", num_layers=4, head_dim=6, block_size=2)
    facts = replace(facts, shape=odd)  # Layers of 48 bytes.
    pair = make_pair(transport, block_bytes=odd.block_bytes, facts=facts)
    prepared = set(seen)
    assert prepared
    for number, groups in enumerate((2, 4)):
        grant = pair.grant((10 + number, 20 + number), fingerprint=facts)
        received = Heard()
        pair.receiver.expect(grant, received)
        pair.sender.start(grant, Heard(), groups=groups)
        pair.sender.push(grant.key, [(0, 7), (1, 4)], True)
        assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert seen == prepared
