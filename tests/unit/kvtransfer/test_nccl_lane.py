"""A lane over a communicator that misbehaves; CuPy and the device are stand-ins."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer import nccl_lane
from kvtransfer.cuda import CudaBlocks
from kvtransfer.nccl_lane import Issuer, NcclLane
from pdserve.core.errors import TransferFailed


class Communicator:
    """What CuPy's has of methods; what it was asked to do."""

    def __init__(self, abort: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.abort = abort

    def check_async_error(self) -> None: ...

    def send(self, *arguments: int) -> None:
        self.calls.append(("send", *arguments))

    def recv(self, *arguments: int) -> None:
        self.calls.append(("recv", *arguments))


@pytest.fixture
def make_lane(monkeypatch: pytest.MonkeyPatch) -> Callable[[Communicator], NcclLane]:
    cuda = SimpleNamespace(Device=lambda index: nullcontext(), Stream=lambda non_blocking: SimpleNamespace(ptr=77))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: SimpleNamespace(cuda_stream=ptr))
    device: Any = SimpleNamespace(device=torch.device("cuda", 0), watched=lambda *_: "copying")
    return lambda communicator: NcclLane(Issuer(), device, communicator, 1)


def test_bytes_go_out_by_address_type_peer_and_stream(make_lane: Callable[[Communicator], NcclLane]) -> None:
    communicator = Communicator()
    lane = make_lane(communicator)
    blocks = CudaBlocks(torch.zeros((4, 16), dtype=torch.uint8))
    lane.send(blocks, 2, 32, lambda: None)
    lane.receive(blocks, 0, 16, lambda: None)
    address = blocks.tensor.data_ptr()
    assert communicator.calls == [("send", address + 32, 32, 1, 1, 77), ("recv", address, 16, 1, 1, 77)]
    for _ in range(20):  # objects come and go, and may have each other's ids
        other = CudaBlocks(torch.zeros((1, 16), dtype=torch.uint8))
        lane.send(other, 0, 16, lambda: None)
        assert communicator.calls[-1][1] == other.tensor.data_ptr()
        del other
    lane.close()
    with pytest.raises(TransferFailed, match="closed"):
        lane.send(blocks, 0, 16, lambda: None)


@pytest.mark.parametrize("does_return", [True, False])
def test_memory_is_kept_where_an_abort_does_not_return(
    make_lane: Callable[[Communicator], NcclLane], does_return: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not does_return:
        monkeypatch.setattr(nccl_lane, "ABORT_S", 0.05)
    released = threading.Event()
    lane = make_lane(Communicator((lambda: None) if does_return else released.wait))  # type: ignore[arg-type]
    tensor = torch.zeros((2, 8), dtype=torch.uint8)
    held, blocks = weakref.ref(tensor), CudaBlocks(tensor)
    lane.receive(blocks, 0, 8, lambda: None)
    if does_return:
        lane.close()
    else:
        with pytest.raises(TransferFailed, match="abort"):
            lane.close()
    blocks.close()
    del lane, blocks, tensor
    gc.collect()
    assert (held() is None) == does_return
    released.set()
    nccl_lane._abandoned.clear()
