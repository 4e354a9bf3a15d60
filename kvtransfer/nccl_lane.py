"""Communicators of two ranks through CuPy. The only module that imports CuPy's NCCL.

All sends and receives of a device come from one thread, in the order in which they were asked for: NCCL allows no two
threads on one communicator, and issuing to several from several threads can deadlock. A pair is made on a thread of
its own. CuPy's binding raises KeyError on statuses
that it does not know (in progress, timeout), which here is a status like others. What does not end is aborted by a
thread that may be left behind; an abort that does not return leaves its staging to nobody until the process ends.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, final

import torch

from kvtransfer.cuda import CudaBlocks, CudaCopying, CudaDevice
from kvtransfer.device import LANE_S, Blocks, Wake
from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

JOIN_S: Final = 60.0
CALL_S: Final = 10.0
ABORT_S: Final = 10.0
_WARM_BYTES: Final = 4


@final
class Issuer:
    """The one thread that calls NCCL for a device."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="nccl-issuer", daemon=True).start()

    def call(self, function: Callable[[], Any], timeout_s: float = CALL_S) -> Any:
        """What `function` returns on the issuing thread. Raises TransferFailed where it raises or takes too long."""
        return answer_of(function, self._calls.put, timeout_s)

    def _run(self) -> None:
        while True:
            self._calls.get()()


def answer_of(function: Callable[[], Any], begin: Callable[[Callable[[], None]], object], timeout_s: float) -> Any:
    """What `function` returns on the thread that `begin` gives it to. Raises TransferFailed."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((function(), None))
        except BaseException as error:  # handed to whoever asked
            done.put((None, error))

    begin(run)
    try:
        value, error = done.get(timeout=timeout_s)
    except queue.Empty:
        raise TransferFailed(f"NCCL has not answered in {timeout_s:.0f} s") from None
    if error is not None:
        raise TransferFailed(f"NCCL failed: {status_of(error)}") from error
    return value


def on_its_own_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="nccl-join", daemon=True).start()


def status_of(error: BaseException) -> str:
    """CuPy maps statuses to names and raises KeyError with the number where it has none."""
    return f"status {error.args[0]}" if isinstance(error, KeyError) and error.args else str(error)


def signed(lane_id: bytes) -> tuple[int, ...]:
    """An id as CuPy before 14 takes it: a tuple of C chars, which are signed on x86."""
    return tuple(byte - 256 if byte > 127 else byte for byte in lane_id)


def communicator(nccl: Any, lane_id: bytes, rank: int) -> Any:
    """Of two ranks. Blocks until the other one has come."""
    try:
        return nccl.NcclCommunicator(2, lane_id, rank)
    except TypeError:  # CuPy before 14, which has done nothing yet
        return nccl.NcclCommunicator(2, signed(lane_id), rank)


@final
class NcclLanes:
    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:  # the module is there all the same, without its functions
            raise TransferFailed("CuPy finds no NCCL library")
        self._nccl = nccl
        self.version = str(nccl.get_version())

    def new_id(self) -> bytes:
        return bytes(number % 256 for number in self._nccl.get_unique_id())

    def join(self, device: CudaDevice, lane_id: bytes, rank: int) -> NcclLane:
        issuer = issuer_of(device)

        def make() -> Any:
            import cupy

            with cupy.cuda.Device(device.device.index):
                return communicator(self._nccl, lane_id, rank)

        # Not on the issuing thread: nobody can call back a rank that waits for one that does not come, and the
        # other pairs of the device shall not wait with it. It launches nothing that others could be mixed up with.
        lane = NcclLane(issuer, device, answer_of(make, on_its_own_thread, JOIN_S), 1 - rank)
        try:
            lane.warm(rank)
        except BaseException:
            lane.close()
            raise
        return lane


@final
class NcclLane:
    def __init__(self, issuer: Issuer, device: CudaDevice, communicator: Any, peer: int) -> None:
        import cupy

        self._issuer, self._device, self._communicator, self._peer = issuer, device, communicator, peer
        self._is_closed = False
        self._memory: dict[int, torch.Tensor] = {}  # that the library was told of, by its address
        # Its own: a receive whose sender is gone holds up what comes behind it, which must not be other pairs. torch
        # deals 32 streams out again and again, so CuPy makes it, and it is there as long as the lane is.
        with cupy.cuda.Device(device.device.index):
            self._owned = cupy.cuda.Stream(non_blocking=True)
        self._stream = torch.cuda.ExternalStream(self._owned.ptr, device=device.device)

    def warm(self, rank: int) -> None:
        """The first message makes the connection, and may take as long as the communicator did."""
        scratch = self._device.staging(1)
        told = threading.Event()
        copying = self._issue("recv" if rank else "send", scratch, 0, _WARM_BYTES, told.set, JOIN_S)
        if not told.wait(JOIN_S) or not copying.is_done:
            raise TransferFailed("the other NCCL rank has not answered")

    def send(self, source: Blocks, block: int, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("send", source, block, num_bytes, wake)

    def receive(self, target: Blocks, block: int, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("recv", target, block, num_bytes, wake)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        ended = threading.Event()

        def abort() -> None:
            try:
                self._communicator.abort()
            except Exception as error:
                log.warning("an NCCL communicator failed when it was aborted", extra={"error": status_of(error)})
            ended.set()

        threading.Thread(target=abort, name="nccl-abort", daemon=True).start()
        if not ended.wait(ABORT_S):
            # It may still write: without a holder the memory would go to the engine.
            _abandoned.append((self._memory, self._communicator, self._owned))
            raise TransferFailed(f"an NCCL communicator's abort has not returned in {ABORT_S:.0f} s")

    def _issue(
        self, name: str, blocks: Blocks, block: int, num_bytes: int, wake: Wake, limit_s: float = LANE_S
    ) -> CudaCopying:
        if self._is_closed:
            raise TransferFailed("the NCCL pair is closed")
        assert isinstance(blocks, CudaBlocks)
        base = blocks.tensor.data_ptr()
        self._memory[base] = blocks.tensor
        pointer = base + block * blocks.block_bytes

        def issue() -> CudaCopying:
            import cupy

            device, communicator = self._device, self._communicator
            communicator.check_async_error()
            with cupy.cuda.Device(device.device.index):
                getattr(communicator, name)(pointer, num_bytes, _UINT8, self._peer, self._stream.cuda_stream)
            return device.watched(None, wake, self._stream, limit_s)

        copying: CudaCopying = self._issuer.call(issue)
        return copying


_UINT8: Final = 1  # ncclUint8: KV travels as bytes, whatever they mean
_issuers: dict[int, Issuer] = {}
_abandoned: list[Any] = []
_lock = threading.Lock()


def issuer_of(device: CudaDevice) -> Issuer:
    with _lock:
        return _issuers.setdefault(device.device.index, Issuer())
