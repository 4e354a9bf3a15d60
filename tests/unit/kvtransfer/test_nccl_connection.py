"""NCCL connections with blocked, hung or freed communicators. CuPy and devices are fakes; issuing threads are real."""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.devices import nccl_connection
from kvtransfer.devices.cuda import CudaBlocks
from kvtransfer.devices.issuer import Issuer, events
from kvtransfer.devices.nccl_connection import NcclConnection, NcclConnector
from kvtransfer.transports.nccl import Nccl
from pdserve.core.errors import TransferFailed
from tests.support.fake_device import DevicePool, FakeDevice
from tests.unit.kvtransfer.fake_driver import ID_BYTES
from tests.unit.kvtransfer.fake_driver import Communicator as CupyCommunicator
from tests.unit.kvtransfer.harness import WAIT_S, wait_for

GPU_CHECKS = pytest.mark.gpu_checks


class Communicator(CupyCommunicator):
    def __init__(self, abort: Callable[[], Any] = lambda: None) -> None:
        super().__init__(2, bytes(ID_BYTES), 0)
        self._abort = abort

    def abort(self) -> None:
        self._abort()
        self.is_freed = True


def a_device(index: int = 0) -> Any:
    def watched(wake: Callable[[], None], *_: Any) -> Any:
        wake()
        return SimpleNamespace(is_done=True)

    return SimpleNamespace(
        device=torch.device("cuda", index),
        watched=watched,
        staging=lambda num_blocks: CudaBlocks(torch.zeros((num_blocks, 16), dtype=torch.uint8)),
        has_drained=lambda stream, limit_s: True,
    )


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake CuPy without NCCL, and issuing threads of this test only."""
    cuda = SimpleNamespace(Device=lambda index: nullcontext(), Stream=lambda non_blocking: SimpleNamespace(ptr=77))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: SimpleNamespace(cuda_stream=ptr))
    monkeypatch.setattr(nccl_connection, "_issuers", {})
    monkeypatch.setattr(nccl_connection, "_abandoned", [])
    return cuda


@pytest.fixture
def make_connection(cupy: SimpleNamespace) -> Callable[..., NcclConnection]:
    return lambda communicator, issuer=None: NcclConnection(issuer or Issuer(), a_device(), communicator, 1)


@pytest.fixture
def blocks() -> CudaBlocks:
    return CudaBlocks(torch.zeros((4, 16), dtype=torch.uint8))


def nobody() -> None: ...


def test_nccl_calls_get_address_type_peer_and_stream(
    make_connection: Callable[..., NcclConnection], blocks: CudaBlocks
) -> None:
    communicator = Communicator()
    connection = make_connection(communicator)
    connection.send(blocks, 32, nobody)
    connection.receive(blocks, 16, nobody)
    address = blocks.tensor.data_ptr()
    assert communicator.calls == [("send", address, 32, 1, 1, 77), ("recv", address, 16, 1, 1, 77)]
    connection.close()
    with pytest.raises(TransferFailed, match="closed"):
        connection.send(blocks, 16, nobody)


# The end of a connection.


@pytest.mark.parametrize("what", ["abort", "kernel"])
def test_close_reports_possible_writes(
    cupy: SimpleNamespace, blocks: CudaBlocks, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging is then not closed, so it is never reused."""
    if what == "abort":
        monkeypatch.setattr(nccl_connection, "ABORT_S", 0.05)
        monkeypatch.setattr(nccl_connection, "LEAVE_S", 0.05)
    released = threading.Event()
    device = a_device()
    device.has_drained = lambda stream, limit_s: what != "kernel"
    communicator = Communicator(released.wait if what == "abort" else lambda: None)
    connection = NcclConnection(Issuer(), device, communicator, 1)
    connection.receive(blocks, 8, nobody)
    for _ in range(2):
        with pytest.raises(TransferFailed, match=what):
            connection.close()
    assert [kept for kept, _ in nccl_connection._abandoned] == [communicator]
    released.set()


@GPU_CHECKS
def test_queued_call_skips_closed_pair(make_connection: Callable[..., NcclConnection], blocks: CudaBlocks) -> None:
    issuer, communicator, is_busy = Issuer(), Communicator(), threading.Event()
    connection = make_connection(communicator, issuer)
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(issuer.call, is_busy.wait)
        late = pool.submit(connection.send, blocks, 16, nobody)
        wait_for(lambda: issuer._calls.qsize() == 1, "the call behind the busy one")
        connection.close()
        is_busy.set()
        assert busy.result(WAIT_S)
        with pytest.raises(TransferFailed, match="the NCCL pair is"):
            late.result(WAIT_S)
    assert communicator.is_freed
    assert communicator.calls == []


@GPU_CHECKS
def test_call_that_survives_the_abort_is_reported(
    make_connection: Callable[..., NcclConnection], blocks: CudaBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_connection, "LEAVE_S", 0.05)
    communicator, entered, is_let_go = Communicator(), threading.Event(), threading.Event()

    def stuck(*_: int) -> None:
        entered.set()
        is_let_go.wait(WAIT_S)

    communicator.send = stuck  # type: ignore[method-assign]
    connection = make_connection(communicator)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(connection.send, blocks, 16, nobody)
        assert entered.wait(WAIT_S)
        monkeypatch.setattr(nccl_connection, "ABORT_S", 0.2)
        with pytest.raises(TransferFailed, match=r"an NCCL call did not return|did not return within"):
            connection.close()
        is_let_go.set()
        sending.result(WAIT_S)


@GPU_CHECKS
def test_abort_ends_a_stuck_call(
    make_connection: Callable[..., NcclConnection], blocks: CudaBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_connection, "LEAVE_S", 0.2)
    is_aborted = threading.Event()
    communicator = Communicator(is_aborted.set)
    entered = threading.Event()

    def stuck(*_: int) -> None:
        entered.set()
        assert is_aborted.wait(WAIT_S)
        raise KeyError(7)

    communicator.send = stuck  # type: ignore[method-assign]
    connection = make_connection(communicator)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(connection.send, blocks, 16, nobody)
        assert entered.wait(WAIT_S)
        connection.close()
        with pytest.raises(TransferFailed, match="status 7"):
            sending.result(WAIT_S)


# The issuing thread.


@GPU_CHECKS
def test_stuck_issuer_is_replaced() -> None:
    issuer, is_let_go, before = Issuer(), threading.Event(), events()["stuck_nccl_calls"]
    while not issuer.num_replaced:  # A call that has not begun by then is dropped, and does not count as stuck.
        with pytest.raises(TransferFailed, match="has not answered"):
            issuer.call(is_let_go.wait, timeout_s=0.05)
    assert issuer.num_replaced == 1
    assert events()["stuck_nccl_calls"] == before + 1
    names = {issuer.call(lambda: threading.current_thread().ident) for _ in range(5)}
    assert len(names) == 1
    is_let_go.set()
    assert {issuer.call(lambda: threading.current_thread().ident) for _ in range(5)} == names, "one thread issues"


@GPU_CHECKS
def test_abandoned_call_never_runs() -> None:
    """Its memory may have been reused by then."""
    issuer, is_let_go, begun = Issuer(), threading.Event(), queue.SimpleQueue[str]()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(issuer.call, is_let_go.wait)
        wait_for(lambda: issuer._running is not None, "the first call to begin")
        with pytest.raises(TransferFailed, match="has not answered"):
            issuer.call(lambda: begun.put("given up"), timeout_s=0.05)
        assert issuer.num_replaced == 0, "the thread is another caller's, who still waits"
        is_let_go.set()
        assert first.result(WAIT_S)
    issuer.call(lambda: begun.put("later"))
    assert begun.get(timeout=WAIT_S) == "later"
    assert begun.empty()


# How pairs are made.


@GPU_CHECKS
@pytest.mark.parametrize("is_there", [True, False])
def test_cupy_is_imported_before_serving(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """The import takes seconds, and holds the GIL for most of them."""
    imported: list[str] = []

    class Recorded:
        def __init__(self) -> None:
            imported.append("cupy")
            if not is_there:
                raise TransferFailed("CuPy finds no NCCL library")

    monkeypatch.setattr(nccl_connection, "NcclConnector", Recorded)
    pool = DevicePool(2, 64)
    device = FakeDevice(pool)
    try:
        Nccl(lambda _: device).prepare(pool)
    finally:
        device.end()
    assert imported == ["cupy"]


class Meeting:
    """Communicators whose first message blocks in the call until the other rank has begun its own."""

    def __init__(self, order: list[tuple[str, str, int]]) -> None:
        self._turns = order  # Order in which the ends of pairs get their communicator.
        self._changed = threading.Condition()
        self._pairs: dict[bytes, threading.Barrier] = {}

    def add(self, pair: bytes) -> None:
        self._pairs[pair] = threading.Barrier(2)

    def make(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        prefill, decode = unique_id.decode().split()
        with self._changed:
            assert self._changed.wait_for(lambda: self._turns[0] == (prefill, decode, rank), WAIT_S)
            self._turns.pop(0)
            threading.Timer(0.01, self._next).start()  # After this end has called for its first message.
        communicator, barrier = Communicator(), self._pairs[unique_id]
        is_first = threading.Lock()

        def moves(*_: int) -> None:
            if is_first.acquire(blocking=False):
                barrier.wait(WAIT_S)

        communicator.send = communicator.recv = moves  # type: ignore[method-assign]
        return communicator

    def _next(self) -> None:
        with self._changed:
            self._changed.notify_all()


PAIRS = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
DEVICES = {"p0": 0, "p1": 1, "d0": 2, "d1": 3}
# Each worker's first end belongs to a pair whose other end is the second one there, which makes a cycle of all four.
CROSSED = [
    ("p0", "d0", 0), ("d0", "p1", 1), ("p1", "d1", 0), ("d1", "p0", 1),
    ("p0", "d1", 0), ("d0", "p0", 1), ("p1", "d0", 0), ("d1", "p1", 1),
]  # fmt: skip


def order_of(seed: int) -> list[tuple[str, str, int]]:
    ends = [(prefill, decode, rank) for prefill, decode in PAIRS for rank in (0, 1)]
    if seed:
        random.Random(seed).shuffle(ends)
        return ends
    return [(one, other, rank) if rank == 0 else (other, one, rank) for one, other, rank in CROSSED]


@GPU_CHECKS
# 0 and the last three would wait in a cycle on issuing threads.
@pytest.mark.parametrize("seed", [0, 1, 2, 10, 14, 29])
def test_crossing_pairs_connect(cupy: SimpleNamespace, blocks: CudaBlocks, seed: int) -> None:
    meeting = Meeting(order_of(seed))
    cupy.nccl = SimpleNamespace(available=True, get_version=lambda: 23004, NcclCommunicator=meeting.make)
    connector, devices = NcclConnector(), {name: a_device(index) for name, index in DEVICES.items()}
    ends = [(pair, rank) for pair in PAIRS for rank in (0, 1)]
    for pair in PAIRS:
        meeting.add(" ".join(pair).encode())
    with ThreadPoolExecutor(len(ends)) as pool:
        joining = [
            pool.submit(connector.join, devices[pair[rank]], " ".join(pair).encode(), rank) for pair, rank in ends
        ]
        made = [one.result(WAIT_S) for one in joining]
    order = list(range(len(made)))
    random.Random(seed).shuffle(order)
    for index in order:  # Every pair is connected, and no message waits for its other end.
        connection, rank = made[index], ends[index][1]
        assert (connection.receive if rank else connection.send)(blocks, 16, nobody).is_done
    for connection in made:
        connection.close()


@GPU_CHECKS
def test_stuck_first_message_is_aborted(cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it delays no other pair."""
    monkeypatch.setattr(nccl_connection, "JOIN_S", 0.1)
    monkeypatch.setattr(nccl_connection, "LEAVE_S", 0.1)
    made: list[Communicator] = []
    ended = threading.Event()

    def make(*_: Any) -> Communicator:
        is_aborted = threading.Event()

        def connects(*_: int) -> None:
            is_aborted.wait(WAIT_S)
            ended.set()
            raise KeyError(7)

        made.append(Communicator(is_aborted.set))
        made[-1].send = connects  # type: ignore[method-assign]
        return made[-1]

    cupy.nccl = SimpleNamespace(available=True, get_version=lambda: 23004, NcclCommunicator=make)
    device = a_device()
    while not ended.is_set():  # A pair that has not begun to connect by then is not aborted during its first message.
        with pytest.raises(TransferFailed, match="NCCL has not answered"):
            NcclConnector().join(device, b"alone", 0)
    wait_for(lambda: all(one.is_freed for one in made), "the end of the communicators")
    assert nccl_connection.issuer_of(device).call(lambda: 5) == 5


@GPU_CHECKS
def test_late_communicator_is_aborted(cupy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_connection, "JOIN_S", 0.05)
    comes, communicator = threading.Event(), Communicator()

    def make(*_: Any) -> Communicator:
        comes.wait(WAIT_S)
        return communicator

    cupy.nccl = SimpleNamespace(available=True, get_version=lambda: 23004, NcclCommunicator=make)
    with pytest.raises(TransferFailed, match="NCCL has not answered"):
        NcclConnector().join(a_device(), b"late", 0)
    comes.set()
    wait_for(lambda: communicator.is_freed, "the end of the late communicator")
    assert communicator.calls == []
