"""Device memory is used only on the stream for which it was allocated, or is memory that torch's allocator never
reuses. A stream accesses memory that another stream wrote only after an event, or after the host has seen that event
complete.

torch's allocator gives freed memory to the next allocation of the same stream at once, while kernels queued on that
stream still use it. That is right for later work on that stream, and wrong on any other that does not wait for it. The
stand-in remembers the stream of each allocation, and rejects use on another one.

It also keeps a vector clock for each stream and for each host thread, as race detectors do: queued work comes after
what its thread has seen, and a wait after what the event's stream had queued. Two uses of the same bytes, of which one
is a write, are a race if neither clock orders them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvtransfer.devices import cuda, nccl_connection
from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.devices.cuda import CudaBlocks, CudaDevice
from kvtransfer.devices.cuda_driver import Driver
from kvtransfer.devices.nccl_connection import NcclConnection
from kvtransfer.transports.common.on_device import OnDevice
from kvtransfer.transports.tcp_staged import TcpStagedReceive, TcpStagedSend
from pdserve.engine.gpu.kernels.extent import StridedExtent
from tests.unit.kvtransfer.fake_driver import FakeLibrary

pytestmark = pytest.mark.gpu_checks

AT_ONCE: Any = SimpleNamespace(call=lambda function: function())  # An issuer: its thread has the caller's clock.
KEPT = ("int32", "int64", "uint8", "Tensor", "device")

Clock = Counter[str]  # For each stream, how much of its work comes before.


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._clock: Clock = Counter()

    def record(self, stream: Any) -> None:
        self._clock = Counter(self._streams.clock(stream.name))

    def query(self) -> bool:
        """A thread that sees the event complete queues its next work after it."""
        if self._streams.is_held:
            return False
        self._streams.merge(host(), self._clock)
        return True

    def let_wait(self, stream: str) -> None:
        self._streams.merge(stream, self._clock)


def host() -> str:
    return f"host {threading.get_ident()}"


class Streams:
    """torch's allocator and streams, by name."""

    def __init__(self) -> None:
        self.current = "engine"
        self.is_held = False  # No event completes in the meantime.
        self._for: list[tuple[int, int, str]] = []  # begin, end, stream
        self._clocks: dict[str, Clock] = {}
        self._uses: list[tuple[int, int, str, int, bool]] = []  # begin, end, stream, its time, whether it writes
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self.num_uses = 0

    def clock(self, name: str) -> Clock:
        return self._clocks.setdefault(name, Counter())

    def merge(self, name: str, clock: Clock) -> None:
        with self._lock:
            self._clocks[name] = self.clock(name) | clock

    def stream(self, name: str) -> Any:
        def wait_event(event: Event) -> None:
            event.let_wait(name)

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

    def use(self, pointer: int, stream: str, num_bytes: int = 1, *, writes: bool = False) -> None:
        """Queues work on the stream that touches these bytes."""
        self.num_uses += 1
        self.merge(stream, self.clock(host()))
        clock = self.clock(stream)
        for begin, end, owner in self._for:
            if begin <= pointer < end and owner != stream:
                assert clock[owner], f"allocated for {owner}, used on {stream} without a wait"
        clock[stream] += 1
        end = pointer + num_bytes
        for begin, until, other, time, wrote in self._uses:
            if begin < end and pointer < until and (writes or wrote):
                what = f"{'written' if wrote else 'read'} on {other}, {'written' if writes else 'read'} on {stream}"
                assert clock[other] >= time, f"{what} without a wait"
        self._uses.append((pointer, end, stream, clock[stream], writes))


class Copies(TorchFunctionMode):
    """Records the memory that `Tensor.copy_` reads and writes on the current stream."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            target, source = arguments[:2]
            self._streams.use(source.data_ptr(), self._streams.current, source.nbytes)
            self._streams.use(target.data_ptr(), self._streams.current, target.nbytes, writes=True)
        return function(*arguments, **(options or {}))


class HostTensor:
    """A tensor that is made on the host, pinned, and copied to the device."""

    def __init__(self, streams: Streams, tensor: torch.Tensor) -> None:
        self._streams, self._tensor = streams, tensor

    def pin_memory(self) -> HostTensor:
        return self

    def to(self, device: Any, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return self._streams.allocate(self._tensor.clone())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()
    numbers = iter(range(100))

    def empty(size: Any, *, pin_memory: bool = False, device: Any = None, dtype: Any = None) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype)
        return tensor if pin_memory else streams.allocate(tensor)

    def relay(source: Any, source_B: Any, target: Any = None, target_B: Any = None) -> torch.Tensor:
        for one, blocks_B, writes in ((source, source_B, False), (target, target_B, True)):
            if one is not None:
                streams.use(blocks_B.data_ptr(), streams.current, blocks_B.nbytes)
                for block in blocks_B.tolist():
                    pointer = one.data_ptr() + block * one.stride(0)
                    streams.use(pointer, streams.current, one.shape[1], writes=writes)
        return streams.allocate(torch.zeros(len(source_B), dtype=torch.int64))

    fake_cuda = SimpleNamespace(
        Event=lambda: Event(streams),
        Stream=lambda device: streams.stream(f"copy {next(numbers)}"),
        ExternalStream=lambda pointer, device: streams.stream("connection"),
        default_stream=lambda device: streams.stream("engine"),
        current_stream=lambda device: streams.stream(streams.current),
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
    monkeypatch.setattr(cuda, "torch", fake)
    monkeypatch.setattr(nccl_connection, "torch", fake)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setitem(sys.modules, "pdserve.engine.gpu.kernels.kv", SimpleNamespace(relay=relay))
    cupy_cuda = SimpleNamespace(Device=lambda index: nullcontext(), Stream=lambda non_blocking: SimpleNamespace(ptr=1))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy_cuda))
    with Copies(streams):
        yield streams


@pytest.fixture
def device(streams: Streams) -> CudaDevice:
    return CudaDevice(torch.zeros((8, 64), dtype=torch.uint8))


def communicator(streams: Streams) -> Any:
    def sends(pointer: int, num_bytes: int, dtype: int, peer: int, stream: str) -> None:
        streams.use(pointer, stream, num_bytes)

    def receives(pointer: int, num_bytes: int, dtype: int, peer: int, stream: str) -> None:
        streams.use(pointer, stream, num_bytes, writes=True)

    return SimpleNamespace(send=sends, recv=receives, check_async_error=lambda: None, abort=lambda: None)


def nobody() -> None: ...


def test_stand_in_detects_wrong_stream(streams: Streams) -> None:
    mine = streams.allocate(torch.zeros(16))
    streams.use(mine.data_ptr(), "engine")
    with pytest.raises(AssertionError, match="allocated for engine, used on copy without a wait"):
        streams.use(mine.data_ptr() + 8, "copy")
    event = Event(streams)
    event.record(streams.stream("engine"))
    streams.stream("copy").wait_event(event)
    streams.use(mine.data_ptr(), "copy")


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_stand_in_detects_races(streams: Streams, first: bool, second: bool) -> None:
    """Neither a wait for an older event nor another thread's knowledge orders two streams."""
    event = Event(streams)
    event.record(streams.stream("a"))
    streams.use(1000, "a", 64, writes=first)
    streams.stream("b").wait_event(event)
    event.record(streams.stream("a"))
    seeing = threading.Thread(target=event.query)
    seeing.start()
    seeing.join()
    with pytest.raises(AssertionError, match=r"on a, .* on b without a wait"):
        streams.use(1063, "b", 8, writes=second)
    streams.use(1064, "b", 8, writes=True)
    assert event.query()
    streams.use(1000, "b", 64, writes=second)


def test_two_reads_are_no_race(streams: Streams) -> None:
    streams.use(1000, "a", 64)
    streams.use(1000, "b", 64)


def test_staging_is_separate_from_the_engine(streams: Streams, device: CudaDevice) -> None:
    """As in nccl: pack, send; receive, unpack."""
    connection = NcclConnection(AT_ONCE, device, communicator(streams), 1)
    pool, packed, received, scratch = device.pool(), device.staging(2), device.staging(2), device.staging(1)
    connection.warm(0, scratch)
    assert device.copy(pool, [3, 1], packed, [0, 1], nobody, None).is_done
    assert connection.send(packed, 128, nobody).is_done
    assert connection.receive(received, 64, nobody).is_done
    assert device.copy(received, [0], pool, [7], nobody, None).is_done
    connection.close()


def test_unpacking_before_the_message_is_a_race(streams: Streams, device: CudaDevice) -> None:
    """Shows why the host waits for the message's event."""
    connection = NcclConnection(AT_ONCE, device, communicator(streams), 1)
    received = device.staging(1)
    connection.receive(received, 64, nobody)
    with pytest.raises(AssertionError, match="written on connection, read on copy 0 without a wait"):
        device.copy(received, [0], device.pool(), [7], nobody, None)
    connection.close()


def test_a_fence_orders_copies_behind_the_engine(streams: Streams, device: CudaDevice) -> None:
    activation = CudaBlocks(streams.allocate(torch.zeros((2, 64), dtype=torch.uint8)))
    streams.use(activation.tensor.data_ptr(), "engine", 128, writes=True)
    with pytest.raises(AssertionError, match="allocated for engine, used on copy 0 without a wait"):
        device.copy(activation, [0], None, (), nobody, None)
    assert device.copy(activation, [0], None, (), nobody, device.fence()).is_done


def test_each_copy_waits_for_its_own_fence(streams: Streams, device: CudaDevice) -> None:
    """On every stream, because a wait on another stream orders nothing."""
    pool = device.pool()
    streams.is_held = True
    for block in range(len(device.streams)):
        streams.use(pool.tensor[block].data_ptr(), "engine", 64, writes=True)
        device.copy(pool, [block], None, (), nobody, device.fence())
    streams.use(pool.tensor[6].data_ptr(), "engine", 64, writes=True)
    with pytest.raises(AssertionError, match=r"written on engine, read on copy \d without a wait"):
        device.copy(pool, [6], None, (), nobody, None)
    streams.is_held = False


def test_copies_take_the_least_loaded_stream(streams: Streams, device: CudaDevice) -> None:
    streams.is_held = True
    pool = device.pool()
    numbers = [device.copy(pool, blocks, None, (), nobody, None).stream for blocks in ([0, 1, 2], [3], [4], [5], [6])]
    assert numbers == [0, 1, 2, 3, 1]
    assert device.loads.outstanding_bytes == (192, 128, 64, 64)
    streams.is_held = False
    device.drain()


def test_work_on_the_same_stream_needs_no_event(streams: Streams, device: CudaDevice) -> None:
    """Without `behind` it is a race."""
    streams.is_held = True
    pool, staging, host_bytes = device.pool(), device.staging(2), device.pinned(128)
    gathering = device.copy(pool, [5, 6], staging, [0, 1], nobody, None)
    device.move(staging, host_bytes, 128, nobody, is_to_host=True, behind=gathering)
    with pytest.raises(AssertionError, match="written on copy 0, read on copy 1 without a wait"):
        device.move(staging, device.pinned(128), 128, nobody, is_to_host=True)
    streams.is_held = False


def test_staging_moves_to_pinned_memory_and_back(streams: Streams, device: CudaDevice) -> None:
    staging, host = device.staging(3), device.pinned(200)
    staging.tensor.copy_(torch.arange(192, dtype=torch.uint8).view(3, 64))
    first = Event(streams)
    first.record(streams.stream("engine"))
    assert first.query()
    assert device.move(staging, host, 100, nobody, is_to_host=True).is_done
    assert bytes(host.view[:100]) == bytes(range(100))
    host.view[:100] = bytes(100)
    assert device.move(staging, host, 100, nobody, is_to_host=False).is_done
    assert bytes(staging.tensor.numpy()) == bytes(100) + bytes(range(100, 192))
    host.close()
    with pytest.raises(AssertionError, match="closed"):
        device.move(staging, host, 100, nobody, is_to_host=True)


def test_blocks_move_to_pinned_memory_and_back(streams: Streams, device: CudaDevice) -> None:
    """As in the host tier: gathered behind the engine, which waits for that, moved out, in again, and summed."""
    pool, staging, host = device.pool(), device.staging(3), device.pinned(256)
    pool.tensor.copy_(torch.arange(512).to(torch.uint8).view(8, 64))
    seen = bytes(pool.tensor[1:3].numpy())
    staging.tensor.copy_(pool.tensor[:3])  # the stand-in for the gathering moves no bytes
    streams.is_held = True
    gathering = device.gather(pool, [1, 2], staging, [1, 2], device.fence())
    with pytest.raises(AssertionError, match="read on copy 4, written on engine without a wait"):
        pool.tensor[1].copy_(torch.zeros(64, dtype=torch.uint8))
    device.hold_engine(gathering)
    saving = device.move_blocks(staging, [1, 2], host, [0, 3], nobody, is_to_host=True, behind=gathering)
    pool.tensor[1:3].copy_(torch.zeros((2, 64), dtype=torch.uint8))
    with pytest.raises(AssertionError, match=r"written on copy \d, read on copy \d without a wait"):
        device.move_blocks(pool, [5], host, [3], nobody, is_to_host=False)
    streams.is_held = False
    assert saving.is_done  # the host has seen it
    assert bytes(host.view[:64]) + bytes(host.view[192:]) == seen
    fence = device.fence()
    moving = device.move_blocks(pool, [2, 1], host, [3, 0], nobody, is_to_host=False, after=fence)
    summing = device.copy(pool, [2, 1], None, (), nobody, None, behind=moving)
    assert summing.is_done
    assert list(summing.sums()) == [0, 0]
    assert bytes(pool.tensor[1:3].numpy()) == seen


def test_an_engine_with_a_stream_of_its_own_waits(streams: Streams, device: CudaDevice) -> None:
    """As vLLM's; and received blocks wait as well."""
    pool, staging, received = device.pool(), device.staging(2), device.staging(1)
    streams.is_held = True
    with streams.on(streams.stream("vllm")):
        gathering = device.gather(pool, [1, 2], staging, [0, 1], device.fence())
        device.hold_engine(gathering)
        pool.tensor[1].copy_(torch.zeros(64, dtype=torch.uint8))
    device.copy(received, [0], pool, [2], nobody, device.fence())
    streams.is_held = False


def test_prepare_uses_own_memory(streams: Streams, device: CudaDevice) -> None:
    streams.is_held = True
    limits = CopyLimits(num_streams=2)
    several = CudaDevice(torch.zeros((8, 64), dtype=torch.uint8), limits)
    for one in (device, several):
        transport = OnDevice(lambda pool, one=one: one)  # type: ignore[misc]
        threading.Timer(0.1, release, (streams,)).start()  # It waits for the device.
        transport.prepare(None, [StridedExtent(0, 16), StridedExtent(16, 16)], limits)  # type: ignore[arg-type]


def release(streams: Streams) -> None:
    streams.is_held = False


# The two steps of tcp_staged, in the product's own code.


def staged_sender(device: CudaDevice) -> Callable[[int], None]:
    """post(block): gathers it and copies it to the host."""
    path = TcpStagedSend(device, 64)
    path.attach(SimpleNamespace(extent_of=lambda job: StridedExtent(0, 64), wake=nobody))  # type: ignore[arg-type]

    def post(block: int) -> None:
        chunk = SimpleNamespace(sources=(block,), count=1)
        path.post(SimpleNamespace(chunk=chunk, after=device.fence()))  # type: ignore[arg-type]

    return post


def staged_receiver(device: CudaDevice) -> Callable[[int], None]:
    """receive(block): copies a chunk to the device and scatters it."""
    layout = SimpleNamespace(extent=lambda part: StridedExtent(0, 64))
    channel = SimpleNamespace(waker=SimpleNamespace(set=nobody), fill=lambda view, least: None)
    link = SimpleNamespace(block_bytes=64, source=layout, target=layout, channel=channel, enter=lambda claim: True)
    path = TcpStagedReceive(link, device)  # type: ignore[arg-type]

    def receive(block: int) -> None:
        claim = SimpleNamespace(blocks=(block,), transfer=SimpleNamespace(after=device.fence()))
        path.receive(SimpleNamespace(length=64, count=1, part=None), claim)  # type: ignore[arg-type]

    return receive


@pytest.mark.parametrize("side", [staged_sender, staged_receiver])
def test_chunks_in_flight_do_not_race(streams: Streams, device: CudaDevice, side: Any) -> None:
    streams.is_held = True
    step = side(device)
    for block in range(6):
        streams.use(device.pool().tensor[block].data_ptr(), "engine", 64, writes=True)
        step(block)
    assert all(device.loads.outstanding_bytes), "on all streams"
    streams.is_held = False


@pytest.mark.parametrize("side", [staged_sender, staged_receiver])
@pytest.mark.parametrize("mutant", ["another stream", "no fence"])
def test_a_missing_wait_is_a_race(
    streams: Streams, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, side: Any, mutant: str
) -> None:
    """Mutants of the product's code: a step that does not follow its first one, and a copy without its fence."""
    if mutant == "another stream":
        monkeypatch.setattr(cuda, "_stream_of", lambda copying: (copying.stream + 1) % len(device.streams))
    else:
        monkeypatch.setattr(CudaDevice, "fence", lambda device: None)
    streams.is_held = True
    step = side(device)
    streams.use(device.pool().tensor[3].data_ptr(), "engine", 64, writes=True)
    with pytest.raises(AssertionError, match="without a wait"):
        step(3)
    streams.is_held = False
