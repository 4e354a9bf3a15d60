"""Device memory is used on the stream that it was allocated for, or is memory that torch's allocator never hands out.

torch's allocator gives freed memory to the next allocation of the same stream at once, while kernels that were queued
on that stream still use it: right for later work on that stream, and wrong on any other that does not wait for it. The
stand-in remembers which stream each allocation is for, and fails a use on another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer import cuda, nccl_lane
from kvtransfer.cuda import CudaBlocks, CudaDevice
from kvtransfer.cuda_driver import Driver
from kvtransfer.issuer import Issuer
from kvtransfer.nccl_lane import NcclLane
from kvtransfer.paths.on_device import OnDevice
from tests.unit.kvtransfer.fake_driver import FakeLibrary

pytestmark = pytest.mark.gpu_checks

LANE = 77
KEPT = ("int32", "int64", "uint8", "Tensor", "device")


class Event:
    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True


class Streams:
    """torch's allocator and streams, by name. A wait for an event lets a stream use what its recorder allocated."""

    def __init__(self) -> None:
        self.current = "engine"
        self._for: list[tuple[int, int, str]] = []  # begin, end, stream
        self._waits: set[tuple[str, str]] = set()
        self._kept: list[torch.Tensor] = []
        self.num_uses = 0

    def stream(self, name: str) -> Any:
        def wait_event(event: Event) -> None:
            self._waits.add((name, event.stream.name))

        return SimpleNamespace(name=name, cuda_stream=name, wait_event=wait_event, wait_stream=None)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = tensor.data_ptr()
        self._for.append((begin, begin + tensor.nbytes, self.current))
        self._kept.append(tensor)
        return tensor

    def use(self, pointer: int, stream: str) -> None:
        self.num_uses += 1
        for begin, end, owner in self._for:
            if begin <= pointer < end and owner != stream:
                assert (stream, owner) in self._waits, f"allocated for {owner}, used on {stream} without a wait"


class HostTensor:
    """Made on the host, pinned, and sent to the device."""

    def __init__(self, streams: Streams, tensor: torch.Tensor) -> None:
        self._streams, self._tensor = streams, tensor

    def pin_memory(self) -> HostTensor:
        return self

    def to(self, device: Any, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return self._streams.allocate(self._tensor.clone())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()

    def empty(size: Any, *, pin_memory: bool = False, device: Any = None, dtype: Any = None) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        return tensor if pin_memory else streams.allocate(tensor)

    def relay(source: Any, source_B: Any, target: Any = None, target_B: Any = None) -> torch.Tensor:
        for one in (source, source_B, target, target_B):
            if one is not None:
                streams.use(one.data_ptr(), streams.current)
        return streams.allocate(torch.zeros(len(source_B), dtype=torch.int64))

    fake_cuda = SimpleNamespace(
        Event=Event,
        Stream=lambda device: streams.stream("copy"),
        ExternalStream=lambda pointer, device: streams.stream("lane"),
        default_stream=lambda device: streams.stream("engine"),
        stream=streams.on,
        device=lambda device: nullcontext(),
        get_device_properties=lambda device: SimpleNamespace(uuid="gpu"),
    )
    kept = {name: getattr(torch, name) for name in KEPT}
    fake = SimpleNamespace(
        **kept, cuda=fake_cuda, empty=empty, tensor=lambda rows, dtype: HostTensor(streams, torch.tensor(rows))
    )
    driver = Driver(FakeLibrary())
    monkeypatch.setattr(cuda, "torch", fake)
    monkeypatch.setattr(nccl_lane, "torch", fake)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setitem(sys.modules, "pdserve.engine.gpu.relay", SimpleNamespace(relay=relay))
    cupy_cuda = SimpleNamespace(Device=lambda index: nullcontext(), Stream=lambda non_blocking: SimpleNamespace(ptr=1))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy_cuda))
    return streams


@pytest.fixture
def device(streams: Streams) -> CudaDevice:
    return CudaDevice(torch.zeros((8, 64), dtype=torch.uint8))


def communicator(streams: Streams) -> Any:
    def moves(pointer: int, num_bytes: int, dtype: int, peer: int, stream: str) -> None:
        streams.use(pointer, stream)
        streams.use(pointer + num_bytes - 1, stream)

    return SimpleNamespace(send=moves, recv=moves, check_async_error=lambda: None, abort=lambda: None)


def nobody() -> None: ...


def test_stand_in_detects_wrong_stream(streams: Streams) -> None:
    mine = streams.allocate(torch.zeros(16))
    streams.use(mine.data_ptr(), "engine")
    with pytest.raises(AssertionError, match="allocated for engine, used on copy without a wait"):
        streams.use(mine.data_ptr() + 8, "copy")
    event = Event()
    event.record(streams.stream("engine"))
    streams.stream("copy").wait_event(event)
    streams.use(mine.data_ptr(), "copy")


def test_staging_is_apart_from_the_engine(streams: Streams, device: CudaDevice) -> None:
    """As nccl does it: pack, send; receive, unpack."""
    lane = NcclLane(Issuer(), device, communicator(streams), 1)
    pool, staging, scratch = device.pool(), device.staging(6), device.staging(1)
    lane.warm(0, scratch)
    assert device.copy(pool, [3, 1], staging, [2, 3], nobody, None).is_done
    lane.send(staging, 2, 128, nobody)
    lane.receive(staging, 4, 64, nobody)
    assert device.copy(staging, [4], pool, [7], nobody, None).is_done
    lane.close()
    assert streams.num_uses == 14, "six of messages, four of each copy"


def test_a_fence_orders_copies_behind_the_engine(streams: Streams, device: CudaDevice) -> None:
    activation = CudaBlocks(streams.allocate(torch.zeros((2, 64), dtype=torch.uint8)))
    with pytest.raises(AssertionError, match="allocated for engine, used on copy without a wait"):
        device.copy(activation, [0], None, (), nobody, None)
    assert device.copy(activation, [0], None, (), nobody, device.fence()).is_done


def test_staging_moves_to_pinned_memory_and_back(streams: Streams, device: CudaDevice) -> None:
    staging, host = device.staging(3), device.pinned(200)
    staging.tensor.copy_(torch.arange(192, dtype=torch.uint8).view(3, 64))
    assert device.move(staging, 1, host, 50, 100, nobody, is_to_host=True).is_done
    assert bytes(host.view[50:150]) == bytes(range(64, 164))
    host.view[50:150] = bytes(100)
    assert device.move(staging, 1, host, 50, 100, nobody, is_to_host=False).is_done
    assert bytes(staging.tensor.numpy()) == bytes(range(64)) + bytes(100) + bytes(range(164, 192))
    host.close()
    with pytest.raises(AssertionError, match="closed"):
        device.move(staging, 1, host, 50, 100, nobody, is_to_host=True)


def test_prepare_uses_own_memory(streams: Streams, device: CudaDevice) -> None:
    OnDevice(lambda pool: device).prepare(None)  # type: ignore[arg-type]
    assert streams.num_uses == 6, "the sums of a block, and a copy"
