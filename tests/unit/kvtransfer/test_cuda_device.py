"""The CUDA device: copies, staging, drains and shared pools. torch's CUDA and the driver are fakes."""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import re
import struct
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.devices import cuda, cuda_driver
from kvtransfer.devices.cuda import CudaBlocks, CudaCopying, CudaDevice, Watcher, moved, poll_s
from kvtransfer.devices.cuda_driver import HANDLE_BYTES, Driver
from kvtransfer.transports.cuda_ipc import CudaIpc
from kvtransfer.transports.nccl import Nccl
from kvtransfer.transports.tcp_staged import HostBlocks, copy_and_sum, word_sum
from pdserve.core.errors import TransferFailed
from pdserve.engine.gpu.kernels.extent import StridedExtent
from tests.support.fake_device import FakeBlocks
from tests.unit.kvtransfer.fake_driver import Event, FakeLibrary, Stream
from tests.unit.kvtransfer.harness import WAIT_S, HostPool

GPU_CHECKS = pytest.mark.gpu_checks


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """The fake CUDA driver of every device in the test."""
    library = FakeLibrary()
    driver = Driver(library)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    return library


def test_a_copy_is_done_when_its_event_has_passed() -> None:
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
def test_waiters_are_woken_however_a_copy_ends(answers: list[bool | RuntimeError]) -> None:
    woken = threading.Event()
    Watcher().add(CudaCopying(Event(*answers), None, 100.0), woken.set)
    assert woken.wait(WAIT_S)


def test_draining_waits_for_the_device(
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


def test_a_drain_reports_whether_it_finished(events: list[Event]) -> None:
    device = CudaDevice(torch.zeros((4, 16), dtype=torch.uint8))
    events += [Event(False, True), Event(False)]
    assert device.has_drained(Stream(), WAIT_S)
    assert not device.has_drained(Stream(), 0.0)


@GPU_CHECKS
@given(st.floats(0, 100))
def test_poll_interval_grows_with_wait(waited_s: float) -> None:
    assert 50e-6 <= poll_s(waited_s) <= 1e-3
    assert poll_s(waited_s) <= max(50e-6, 0.1 * waited_s)


@GPU_CHECKS
def test_number_of_polls_is_bounded() -> None:
    """Each poll takes the GIL from the engine. At intervals of 50 us, a wait of 3 s would need 60,000 polls."""

    def looks(wait_s: float) -> int:
        waited_s, number = 0.0, 0
        while waited_s < wait_s:
            waited_s, number = waited_s + poll_s(waited_s), number + 1
        return number

    assert looks(0.0005) <= 12
    assert looks(0.01) <= 45
    assert looks(3.0) <= 3_100


@GPU_CHECKS
def test_closed_staging_is_reused(events: list[Event], library: FakeLibrary) -> None:
    device = CudaDevice(torch.zeros((4, 16), dtype=torch.uint8))
    first, other = device.staging(3), device.staging(3)
    assert (first.num_blocks, first.block_bytes) == (3, 16)
    addresses = [one.tensor.data_ptr() for one in (first, other)]
    assert addresses == library.allocated
    first.close()
    first.close()
    again, larger = device.staging(3), device.staging(5)
    assert again.tensor.data_ptr() == addresses[0]
    assert larger.tensor.data_ptr() == library.allocated[2]
    assert device.staging(3).tensor.data_ptr() == library.allocated[3], "what is not closed is nobody else's"


@GPU_CHECKS
def test_parts_of_blocks_match_the_stand_in() -> None:
    """Other tests check the protocols over the stand-in."""
    raw = torch.arange(6 * 32, dtype=torch.uint8).view(6, 32)
    real, fake = CudaBlocks(raw), FakeBlocks(bytearray(raw.numpy().tobytes()), 6, 32)
    for ours, theirs in (
        (real.narrowed(StridedExtent(8, 12)), fake.narrowed(StridedExtent(8, 12))),
        (real.cut(2, 3, 24), fake.cut(2, 3, 24)),
        (real.cut(1, 2, 40), fake.cut(1, 2, 40)),
    ):
        assert (ours.num_blocks, ours.block_bytes) == (theirs.num_blocks, theirs.block_bytes)
        for block in range(ours.num_blocks):
            assert ours.tensor[block].numpy().tobytes() == bytes(theirs.view(block))
    real.narrowed(StridedExtent(4, 4)).tensor[5] = 255
    assert raw[5, 4:8].tolist() == [255] * 4, "the same memory"


HEADS = StridedExtent(4, 8, 3, 20)  # Runs at distances, like the heads of one rank in a block of another rank.
ROW = StridedExtent(8, 24)


@GPU_CHECKS
@pytest.mark.parametrize(("out_of", "into"), [(HEADS, ROW), (ROW, HEADS), (HEADS, HEADS), (HEADS, None), (ROW, None)])
def test_copied_heads_match_the_stand_in(out_of: StridedExtent, into: StridedExtent | None) -> None:
    generator = torch.Generator().manual_seed(3)
    pools = [torch.randint(0, 256, (6, 64), dtype=torch.uint8, generator=generator) for _ in range(2)]
    fakes = [HostBlocks(bytearray(pool.numpy().tobytes()), 6, 64) for pool in pools]
    sources, targets = [5, 0, 2], [1, 4, 3]

    def relay(raw: Any, raw_B: Any, other: Any, other_B: Any) -> Any:
        rows = raw[raw_B.long()].contiguous()
        if other is not None:
            other[other_B.long()] = rows
        return [word_sum(memoryview(row.numpy().tobytes())) for row in rows]

    source, target = (
        CudaBlocks(pool).narrowed(one or out_of).tensor for pool, one in zip(pools, (out_of, into), strict=True)
    )
    numbers = [torch.tensor(one, dtype=torch.int32) for one in (sources, targets)]
    sums = moved(source, numbers[0], None if into is None else target, numbers[1], relay)
    there = None if into is None else fakes[1].narrowed(into)
    assert sums == copy_and_sum(fakes[0].narrowed(out_of), sources, there, targets)  # type: ignore[arg-type]
    assert [pool.numpy().tobytes() for pool in pools] == [bytes(one.memory) for one in fakes]


@GPU_CHECKS
def test_staging_without_memory_fails(events: list[Event], library: FakeLibrary) -> None:
    library.statuses["cuMemAlloc_v2"] = 2
    with pytest.raises(TransferFailed, match=r"no 48 bytes of device memory \(CUDA status 2\)"):
        CudaDevice(torch.zeros((4, 16), dtype=torch.uint8)).staging(3)


@GPU_CHECKS
def test_opened_pool_is_not_copied(events: list[Event], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle is for the whole allocation, in which the pool need not be first. torch.as_tensor looks up the
    memory's device and copies memory of another device, and so does this stand-in."""
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: torch.tensor(data, device=device))
    raw = torch.arange(80, dtype=torch.uint8)[16:].view(4, 16)
    library.bases[raw.data_ptr()] = raw.data_ptr() - 16
    device = CudaDevice(raw)
    exported = device.export()
    library.exported.clear()  # as in another process
    blocks = device.open(exported)
    assert blocks.tensor.data_ptr() == raw.data_ptr()
    assert (blocks.num_blocks, blocks.block_bytes) == (4, 16)
    raw[2, 3] = 200
    assert blocks.tensor[2, 3] == 200, "no copy"
    assert torch.equal(blocks.tensor, raw)
    blocks.close()
    blocks.close()
    assert library.closed == [raw.data_ptr() - 16], "once"
    assert library.context == [], "no thread keeps the device's context"


@GPU_CHECKS
def test_copied_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(pointer: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(num_bytes)

    monkeypatch.setattr(torch._C, "_construct_storage_from_data_pointer", copied)
    with pytest.raises(TransferFailed, match="torch copied memory at 0x1000 instead of using it"):
        cuda_driver.tensor_at(0x1000, torch.device("cpu"), 2, 8)


HEADER_TYPES = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUcontext": ctypes.c_void_p,
    "CUdeviceptr": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "CUipcMemHandle": cuda_driver._Handle,
}


@GPU_CHECKS
def test_driver_calls_have_the_headers_types() -> None:
    """Triton's wheel contains the header. It maps some names to those of their second version."""
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    header = (Path(spec.origin).parent / "backends/nvidia/include/cuda.h").read_text()
    for name, arguments in cuda_driver._ARGUMENTS.items():
        plain = name.removesuffix("_v2")
        assert bool(re.search(rf"#define {plain} +{plain}_v2\b", header)) == (plain != name), name
        declared = re.search(rf"^CUresult CUDAAPI {plain}\(([^)]*)\);", header, re.MULTILINE)  # the newest is first
        assert declared is not None, name
        types = []
        for one in declared[1].split(","):
            kind, stars, _ = re.fullmatch(r"\s*(.+?)\s*(\**)(\w+)", one).groups()  # type: ignore[union-attr]
            types.append(ctypes.POINTER(HEADER_TYPES[kind]) if stars else HEADER_TYPES[kind])
        assert tuple(types) == arguments, name
    assert re.search(rf"#define CU_IPC_HANDLE_SIZE {HANDLE_BYTES}\b", header)
    assert re.search(rf"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS += 0x{cuda_driver._LAZY_PEER_ACCESS}\b", header)


def test_ipc_errors_fail_the_transfer(
    events: list[Event], library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    raw = torch.zeros((4, 16), dtype=torch.uint8)
    library.bases[raw.data_ptr()] = raw.data_ptr()
    device = CudaDevice(raw)
    exported = device.export()
    with pytest.raises(TransferFailed, match=r"the sender's pool cannot be opened \(CUDA status 201\)"):
        device.open(exported)  # the driver's answer within one process
    library.exported.clear()
    blocks = device.open(exported)
    library.statuses = {"cuIpcGetMemHandle": 1, "cuIpcOpenMemHandle_v2": 201, "cuIpcCloseMemHandle": 400}
    with pytest.raises(TransferFailed, match=r"cannot be shared; give up expandable_segments .*\(CUDA status 1\)"):
        device.export()
    with pytest.raises(TransferFailed, match=r"the sender's pool cannot be opened \(CUDA status 201\)"):
        device.open(exported)
    with pytest.raises(TransferFailed, match="the sender's pool cannot be opened: a handle of 3 bytes"):
        device.open(exported[:-HANDLE_BYTES] + b"odd")
    with pytest.raises(TransferFailed, match="7 bytes do not describe a pool on a device"):
        device.open(b"garbage")
    blocks.close()
    assert "another process's pool stays open" in caplog.text
    library.statuses = {"cuMemGetAddressRange_v2": 1}
    with pytest.raises(TransferFailed, match=r"the driver knows no allocation of the pool \(CUDA status 1\)"):
        device.export()


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"])
def test_device_errors_fail_the_transfer(events: list[Event], library: FakeLibrary, name: str) -> None:
    library.statuses[name] = 100
    with pytest.raises(TransferFailed, match=r"\(CUDA status 100\)"):
        CudaDevice(torch.zeros((4, 16), dtype=torch.uint8)).staging(1)


def test_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_driver.driver.cache_clear()
    with pytest.raises(TransferFailed, match=r"the CUDA driver cannot be loaded: libcuda\.so\.1"):
        cuda_driver.driver()


@GPU_CHECKS
def test_driver_calls_release_the_gil(library: FakeLibrary) -> None:
    """The driver's call here is a real function of the C library. It waits for a semaphore that another thread of this
    process posts, which would be impossible if the call kept the GIL."""
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    library.cuIpcCloseMemHandle = libc["sem_wait"]
    driver = Driver(library)
    poster = threading.Timer(0.05, lambda: libc.sem_post(semaphore))
    faulthandler.dump_traceback_later(WAIT_S, exit=True)  # No Python code would run any more.
    try:
        poster.start()
        driver.close(ctypes.addressof(semaphore))
    finally:
        faulthandler.cancel_dump_traceback_later()
    poster.join()


def test_device_transports_reject_a_host_pool() -> None:
    for transport in (CudaIpc(), Nccl()):
        with pytest.raises(TransferFailed, match="is not on a CUDA device"):
            transport.fence(HostPool(1))


def test_a_pool_has_one_device_for_all_its_connections(events: list[Event]) -> None:
    raw = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), data_ptr=lambda: 4711, shape=(4, 16))
    try:
        assert cuda.device_of(SimpleNamespace(raw=raw)) is cuda.device_of(SimpleNamespace(raw=raw))  # type: ignore[arg-type]
    finally:
        del cuda._devices[4711]


def test_missing_packages_and_devices_are_named(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.why_no_cuda() == "torch sees no CUDA device"
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert cuda.why_no_cuda("cupy") == "the package torch is not installed"
