"""What the code that speaks to CUDA, NCCL and CuPy does with their answers, over stand-ins for the three.

That it asks them the right questions only a GPU can show: tests/gpu.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer import cuda, cuda_handles, nccl_lane
from kvtransfer.cuda import CudaBlocks, CudaCopying, CudaDevice, Watcher
from kvtransfer.nccl_lane import NcclLanes
from kvtransfer.paths.cuda_ipc import CudaIpc
from kvtransfer.paths.nccl import Nccl
from pdserve.core.errors import TransferFailed
from tests.unit.kvtransfer.harness import WAIT_S, HostPool

KEPT = ("tensor", "int32", "int64", "uint8", "Tensor", "empty", "device", "as_tensor")


class Event:
    """Answers as it is told, the last answer for ever."""

    def __init__(self, *answers: bool | RuntimeError) -> None:
        self.answers = list(answers) or [True]

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


class Stream(SimpleNamespace):
    cuda_stream, ptr = 77, 77

    def synchronize(self) -> None: ...


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the next events of the device are; torch's CUDA is a stand-in."""
    made: list[Event] = []
    fake = SimpleNamespace(
        Event=lambda: made.pop(0) if made else Event(),
        Stream=lambda device: Stream(),
        ExternalStream=lambda ptr, device: Stream(),
        get_device_properties=lambda device: SimpleNamespace(uuid="gpu"),
        device=lambda device: nullcontext(),
        is_available=lambda: False,
    )
    plain = SimpleNamespace(**{name: getattr(torch, name) for name in KEPT}, cuda=fake)
    monkeypatch.setattr(cuda, "torch", plain)
    monkeypatch.setattr(nccl_lane, "torch", plain)
    return made


# Copies.


def test_a_copy_is_done_when_its_event_has_passed_and_its_digest_is_of_the_sums() -> None:
    sums = torch.tensor([1, 2**40], dtype=torch.int64)
    copying = CudaCopying(Event(False, True), sums, 100.0)
    assert [copying.is_done, copying.is_done] == [False, True]
    assert copying.digest() == hashlib.blake2b(struct.pack("<qq", 1, 2**40), digest_size=8).digest()


def test_a_copy_on_a_device_that_failed_or_never_ends_fails_the_transfer() -> None:
    with pytest.raises(TransferFailed, match="the device failed: an illegal access"):
        _ = CudaCopying(Event(RuntimeError("an illegal access")), None, 100.0).is_done
    with pytest.raises(TransferFailed, match="work on the device has not ended in 0 s"):
        _ = CudaCopying(Event(False), None, 0.0).is_done


@pytest.mark.parametrize("answers", [[False, False, True], [False, RuntimeError("lost")]], ids=["it ends", "it fails"])
def test_who_waits_for_a_copy_is_woken_however_it_ends(answers: list[bool | RuntimeError]) -> None:
    woken = threading.Event()
    Watcher().add(CudaCopying(Event(*answers), None, 100.0), woken.set)
    assert woken.wait(WAIT_S)


def test_draining_waits_for_the_device_says_that_it_does_and_ends_with_it(
    events: list[Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "COPY_S", 0.0)
    device = CudaDevice(torch.zeros((4, 16), dtype=torch.uint8))
    slow = Event(False, False, False, True)
    events.append(slow)
    device.drain()
    assert slow.answers == [True]
    assert "the device does not drain" in caplog.text
    events.append(Event(False, RuntimeError("lost")))
    device.drain()
    assert "the device failed" in caplog.text


def test_staging_has_blocks_of_the_pools_size(events: list[Event]) -> None:
    staging = CudaDevice(torch.zeros((4, 16), dtype=torch.uint8)).staging(3)
    assert (staging.num_blocks, staging.block_bytes) == (3, 16)


# Pools of other processes.


def cupy_of(**runtime: Any) -> SimpleNamespace:
    class CUDARuntimeError(Exception): ...

    def refused(*_: Any) -> Any:
        raise CUDARuntimeError("cudaErrorInvalidValue")

    plain = {"ipcGetMemHandle": refused, "ipcOpenMemHandle": refused, "CUDARuntimeError": CUDARuntimeError}
    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(**plain | runtime),
            Device=lambda index: nullcontext(),
            Stream=lambda non_blocking: Stream(),
            UnownedMemory=lambda base, size, owner, device: (base, size),
            MemoryPointer=lambda memory, offset: (memory, offset),
        ),
        uint8="uint8",
        ndarray=lambda shape, dtype, pointer: (shape, dtype, pointer),
    )


def test_a_pool_is_named_by_its_allocation_and_its_place_in_it(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle is of the whole allocation, in which the pool need not come first."""
    raw = torch.zeros((4, 16), dtype=torch.uint8)
    device, base = CudaDevice(raw), raw.data_ptr() - 512
    closed: list[int] = []
    cupy = cupy_of(
        ipcGetMemHandle=lambda pointer: b"handle" if pointer == base else b"",
        ipcOpenMemHandle=lambda handle: 9000 if handle == b"handle" else 0,
        ipcCloseMemHandle=closed.append,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "base_of", lambda pointer: base)
    exported = device.export()
    opened: list[Any] = []

    def as_tensor(array: Any, device: Any) -> torch.Tensor:
        opened.append(array)
        return torch.zeros(array[0], dtype=torch.uint8)

    monkeypatch.setattr(cuda_handles.torch, "as_tensor", as_tensor)
    blocks = device.open(exported)
    assert opened == [((4, 16), "uint8", ((9000, 512 + 64), 512))]
    assert (blocks.num_blocks, blocks.block_bytes) == (4, 16)
    blocks.close()
    blocks.close()
    assert closed == [9000], "once"


def test_memory_that_cannot_be_shared_or_opened_fails_the_transfer(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice(torch.zeros((4, 16), dtype=torch.uint8))
    monkeypatch.setitem(sys.modules, "cupy", cupy_of())
    monkeypatch.setattr(cuda, "base_of", lambda pointer: pointer)
    with pytest.raises(TransferFailed, match="the pool's memory cannot be shared: cudaErrorInvalidValue"):
        device.export()
    with pytest.raises(TransferFailed, match="the sender's pool cannot be opened: cudaErrorInvalidValue"):
        device.open(bytes(40) + b"handle")
    with pytest.raises(TransferFailed, match="7 bytes are no pool on a device"):
        device.open(b"garbage")


@pytest.mark.parametrize("status", [0, 1])
def test_the_driver_says_where_an_allocation_begins_or_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def range_of(base: Any, size: Any, pointer: ctypes.c_uint64) -> int:
        base._obj.value = pointer.value - 64
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuMemGetAddressRange_v2=range_of))
    if status:
        with pytest.raises(TransferFailed, match=r"the driver knows no allocation of the pool \(status 1\)"):
            cuda.base_of(1000)
    else:
        assert cuda.base_of(1000) == 936


def test_a_pool_in_host_memory_is_refused_by_the_paths_between_devices() -> None:
    for transport in (CudaIpc(), Nccl()):
        with pytest.raises(TransferFailed, match="does not lie on a CUDA device"):
            transport.fence(HostPool(1))


def test_a_pool_has_one_device_for_all_its_connections(events: list[Event]) -> None:
    raw = SimpleNamespace(device=SimpleNamespace(type="cuda"), data_ptr=lambda: 4711, shape=(4, 16))
    try:
        assert cuda.device_of(SimpleNamespace(raw=raw)) is cuda.device_of(SimpleNamespace(raw=raw))  # type: ignore[arg-type]
    finally:
        del cuda._devices[4711]


def test_a_system_without_the_packages_or_a_device_says_which_it_lacks(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda.why_no_cuda() == "torch sees no CUDA device"
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert cuda.why_no_cuda("cupy") == "the package torch is not installed"


# Communicators.


class Communicator:
    def __init__(self, size: int, lane_id: tuple[int, ...], rank: int) -> None:
        self.made_of, self.calls = (size, lane_id, rank), list[str]()

    def check_async_error(self) -> None: ...

    def send(self, *_: int) -> None:
        self.calls.append("send")

    def recv(self, *_: int) -> None:
        self.calls.append("recv")

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NcclLanes]:
    """lanes(available=True): CuPy's binding is a stand-in; the communicators that it makes stand in `made`."""

    def make(available: bool = True) -> NcclLanes:
        made: list[Communicator] = []

        def communicator(*arguments: Any) -> Communicator:
            made.append(Communicator(*arguments))
            return made[-1]

        nccl = SimpleNamespace(
            available=available,
            get_version=lambda: 23004,
            get_unique_id=lambda: (-1, 5, 127),
            NcclCommunicator=communicator,
            made=made,
        )
        cupy = cupy_of()
        cupy.cuda.nccl = nccl
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        return Nccl()._lanes()  # type: ignore[return-value]

    return make


def device_that(copying: Any) -> Any:
    """Its messages end as `copying` does, at once."""

    def watched(sums: Any, wake: Callable[[], None], *_: Any) -> Any:
        wake()
        return copying

    staging = CudaBlocks(torch.zeros((1, 16), dtype=torch.uint8))
    return SimpleNamespace(device=torch.device("cuda", 0), watched=watched, staging=lambda blocks: staging)


def test_a_cupy_without_the_library_is_named(lanes: Callable[..., NcclLanes]) -> None:
    with pytest.raises(TransferFailed, match="CuPy finds no NCCL library"):
        lanes(available=False)


@pytest.mark.parametrize(("rank", "word"), [(0, "send"), (1, "recv")])
def test_a_pair_is_made_of_both_ranks_and_warmed_by_a_message(
    events: list[Event], lanes: Callable[..., NcclLanes], rank: int, word: str
) -> None:
    library = lanes()
    assert library.version == "23004"
    lane_id = library.new_id()
    lane = library.join(device_that(SimpleNamespace(is_done=True)), lane_id, rank)
    [made] = library._nccl.made
    assert made.made_of == (2, bytes([255, 5, 127]), rank)
    assert made.calls == [word]
    lane.close()
    lane.close()
    assert made.calls == [word, "abort"], "once"


def test_a_pair_whose_first_message_does_not_come_is_ended(
    events: list[Event], lanes: Callable[..., NcclLanes]
) -> None:
    library = lanes()
    with pytest.raises(TransferFailed, match="the other NCCL rank has not answered"):
        library.join(device_that(SimpleNamespace(is_done=False)), library.new_id(), 1)
    assert library._nccl.made[0].calls == ["recv", "abort"]


def test_a_pair_whose_abort_fails_has_ended_all_the_same(
    events: list[Event], lanes: Callable[..., NcclLanes], caplog: pytest.LogCaptureFixture
) -> None:
    library = lanes()
    lane = library.join(device_that(SimpleNamespace(is_done=True)), library.new_id(), 1)

    def fails() -> None:
        raise KeyError(7)

    library._nccl.made[0].abort = fails
    lane.close()
    assert "failed when it was aborted" in caplog.text
