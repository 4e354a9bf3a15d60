"""A copy between devices waits for the engine's work up to its fence, and for nothing that is queued later."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.devices import cuda
from kvtransfer.devices.copy_limits import CopyLimits
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from tests.support.fake_device import FakeDevice
from tests.support.fake_ends import DEVICE_TRANSPORTS
from tests.unit.kvtransfer.harness import Pair, wait_for

MakePair = Callable[..., Pair]
PATHS = pytest.mark.parametrize("transport", DEVICE_TRANSPORTS)
A_WHILE_S = 0.05  # Long enough for a copy that did not wait to end.


@PATHS
def test_later_steps_are_not_waited_for(make_pair: MakePair, devices: dict[int, FakeDevice], transport: str) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1,)), (1,))
    grant = pair.grant((10, 11))
    received, sent = pair.begin(grant)
    target, source = devices[id(pair.target)], devices[id(pair.source)]
    steps = [target.begin_step(), target.begin_step()]
    pair.sender.push(grant.key, [(0, 3), (1, 4)], True)
    steps.append(source.begin_step())  # The prompt's next chunk.
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    assert not any(step.is_set() for step in steps)
    pair.assert_equal(grant, (3, 4))
    for step in steps:
        step.set()


@PATHS
def test_a_receive_waits_for_steps_before_the_grant(
    make_pair: MakePair, devices: dict[int, FakeDevice], transport: str
) -> None:
    """Such a step may still write to a block of an ended sequence."""
    pair = make_pair(transport)
    pair.move(pair.grant((1,)), (1,))
    device = devices[id(pair.target)]
    step = device.begin_step()
    grant = pair.grant((10,))
    received, _ = pair.begin(grant)
    before, num_copies = pair.target.block(10), device.num_copies
    pair.sender.push(grant.key, [(0, 3)], True)
    wait_for(lambda: device.num_copies > num_copies, "the copy to be asked for")
    time.sleep(A_WHILE_S)
    assert pair.target.block(10) == before
    assert received.all == []
    step.set()
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, (3,))


@PATHS
def test_a_source_is_read_after_its_step(make_pair: MakePair, devices: dict[int, FakeDevice], transport: str) -> None:
    pair = make_pair(transport)
    pair.move(pair.grant((1,)), (1,))
    device = devices[id(pair.source)]
    grant = pair.grant((10, 11))
    received, _ = pair.begin(grant)
    num_copies = device.num_copies
    pair.source.fill((3,), 1)
    pair.sender.push(grant.key, [(0, 3)], False)
    wait_for(lambda: pair.receiver.stats.chunks >= 2, "the first block")
    step = device.begin_step()  # Computes the second block.
    pair.sender.push(grant.key, [(1, 4)], True)
    wait_for(lambda: device.num_copies >= num_copies + 2, "the second block's copy to be asked for")
    time.sleep(A_WHILE_S)
    pair.source.fill((4,), 2)
    step.set()
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    pair.assert_equal(grant, (3, 4))
    assert pair.target.block(11) == b"\2" * pair.target.block_bytes


class Recorder:
    """The parts of torch.cuda that our device uses. Records the calls for each stream."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        recorder = self

        class Event:
            def record(self, stream: Any) -> None:
                recorder.calls.append(("record", stream.name))

            def query(self) -> bool:
                return True

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def __getattr__(self, word: str) -> Any:
                return lambda *arguments: recorder.calls.append((word, self.name, *arguments))

        self.Event, self.engine = Event, Stream("engine")
        self._numbers = iter(range(9))
        self.Stream = lambda device: Stream(f"transfers {next(self._numbers)}")
        self.default_stream = lambda device: self.engine
        self.device = self.stream = lambda _: nullcontext()
        self.get_device_properties = lambda device: SimpleNamespace(uuid="gpu")


def test_a_cuda_copy_uses_only_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    kept = {name: getattr(torch, name) for name in ("tensor", "int32", "int64", "uint8", "Tensor")}
    plain = SimpleNamespace(
        **kept, cuda=recorder, empty=lambda *size, dtype, pin_memory: torch.empty(*size, dtype=dtype)
    )
    monkeypatch.setattr(cuda, "torch", plain)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    sums = SimpleNamespace(relay=lambda source, numbers, *_: torch.zeros(len(numbers), dtype=torch.int64))
    monkeypatch.setitem(sys.modules, "pdserve.engine.gpu.kernels.kv", sums)
    device = cuda.CudaDevice(torch.zeros((4, 16), dtype=torch.uint8), CopyLimits(num_streams=2))
    monkeypatch.setattr(device.watcher, "add", lambda copying, wake: None)  # Both streams keep their loads.
    fence = device.fence()
    assert recorder.calls == [("record", "engine")]
    recorder.calls.clear()
    device.copy(device.pool(), [0, 1], device.pool(), [2, 3], lambda: None, fence)
    device.copy(device.pool(), [0, 1], None, (), lambda: None, None)
    device.drain()
    first, second = "transfers 0", "transfers 1"
    assert recorder.calls == [
        ("wait_event", first, fence),
        ("record", first),
        ("record", second),
        ("record", first),
        ("record", second),
        ("record", "transfers 2"),
    ], "one copy on each stream, and the three of draining"
