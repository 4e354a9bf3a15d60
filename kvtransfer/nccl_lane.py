"""Communicators of two ranks through CuPy. The only module that imports CuPy's NCCL.

All sends and receives of a device come from one thread, in the order in which they were asked for: NCCL allows no two
threads on one communicator, and advises against issuing to several of one device from several threads. The exception
is a pair's first message: it connects the pair and waits for the other rank inside the call, so it comes from the
thread that makes the pair. CuPy's binding raises KeyError on statuses that it does not know (in progress, timeout),
which here is a status like others. What does not end is aborted by a thread that may be left behind; where an abort
does not return, the staging is not used again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, final

import torch

from kvtransfer.cuda import CudaBlocks, CudaCopying, CudaDevice
from kvtransfer.device import LANE_S, Blocks, Wake
from kvtransfer.issuer import Issuer, answer_of, on_its_own_thread, status_of
from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

JOIN_S: Final = 60.0
LEAVE_S: Final = 1.0  # for a call in progress, which takes microseconds unless it is stuck
ABORT_S: Final = 10.0
_WARM_BYTES: Final = 4


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
        """Makes the pair and its connection on a thread of its own. Raises TransferFailed."""
        issuer = issuer_of(device)
        made: list[NcclLane] = []
        is_given_up = threading.Event()

        def make() -> NcclLane:
            import cupy

            with cupy.cuda.Device(device.device.index):
                lane = NcclLane(issuer, device, communicator(self._nccl, lane_id, rank), 1 - rank)
                made.append(lane)
                scratch = device.staging(1)
                try:
                    if is_given_up.is_set():
                        raise TransferFailed("the other NCCL rank came too late")
                    lane.warm(rank, scratch)
                except BaseException:
                    lane.close()
                    scratch.close()
                    raise
                scratch.close()
                return lane

        # Not on the issuing thread: nobody can call back a rank that waits for one that does not come, and the first
        # message connects the pair, which waits for the other rank inside the call. Pairs of several workers that are
        # made in different orders would wait for each other in a circle.
        try:
            lane: NcclLane = answer_of(make, on_its_own_thread, JOIN_S)
        except TransferFailed:
            is_given_up.set()
            for late in made:  # stuck in its first message, which only an abort ends
                late.close()
            raise
        return lane


@final
class NcclLane:
    def __init__(self, issuer: Issuer, device: CudaDevice, communicator: Any, peer: int) -> None:
        import cupy

        self._issuer, self._device, self._communicator, self._peer = issuer, device, communicator, peer
        self._calling = threading.Lock()  # held during each call of the communicator
        self._closing = threading.Lock()
        self._is_closed = False
        self._why_open = ""  # why it may still touch memory although it was closed
        # Its own: a receive whose sender is gone holds up what comes behind it, which must not be other pairs. torch
        # deals 32 streams out again and again, so CuPy makes it, and it is there as long as the lane is.
        with cupy.cuda.Device(device.device.index):
            self._owned = cupy.cuda.Stream(non_blocking=True)
        self._stream = torch.cuda.ExternalStream(self._owned.ptr, device=device.device)

    def warm(self, rank: int, scratch: Blocks) -> None:
        """The first message, on the calling thread. It makes the connection, and may take as long as the communicator
        did; NCCL connects all channels of a peer then, whatever the size of the message."""
        told = threading.Event()
        copying = self._queue("recv" if rank else "send", scratch, _WARM_BYTES, told.set, JOIN_S)
        if not told.wait(JOIN_S) or not copying.is_done:
            raise TransferFailed("the other NCCL rank has not answered")

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("send", source, num_bytes, wake)

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("recv", target, num_bytes, wake)

    def close(self) -> None:
        with self._closing:  # a second caller returns when the first has ended it
            if not self._is_closed:
                self._is_closed = True
                self._why_open = self._end()
                if self._why_open:  # it may still write: staging is not closed, and these are kept
                    _abandoned.append((self._communicator, self._owned))
            if self._why_open:
                raise TransferFailed(self._why_open)

    def _end(self) -> str:
        """Aborts the communicator. Returns why memory may still be touched; empty where it is not."""
        ended = threading.Event()

        def abort() -> None:
            has_left = self._calling.acquire(timeout=LEAVE_S)  # else the call is stuck, and the abort is to end it
            try:
                self._communicator.abort()
            except Exception as error:
                log.warning("an NCCL communicator failed when it was aborted", extra={"error": status_of(error)})
            finally:
                if has_left:
                    self._calling.release()
            ended.set()

        threading.Thread(target=abort, name="nccl-abort", daemon=True).start()
        if not ended.wait(LEAVE_S + ABORT_S):
            return f"an NCCL communicator's abort has not returned in {ABORT_S:g} s"
        if not self._calling.acquire(timeout=ABORT_S):
            return "a call of NCCL has not returned although its communicator was aborted"
        if not self._device.has_drained(self._stream, ABORT_S):
            return f"an NCCL kernel has not ended in {ABORT_S:g} s although its communicator was aborted"
        return ""

    def _issue(self, name: str, blocks: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        if self._is_closed:
            raise TransferFailed("the NCCL pair is closed")
        copying: CudaCopying = self._issuer.call(lambda: self._queue(name, blocks, num_bytes, wake))
        return copying

    def _queue(self, name: str, blocks: Blocks, num_bytes: int, wake: Wake, limit_s: float = LANE_S) -> CudaCopying:
        import cupy

        assert isinstance(blocks, CudaBlocks)
        pointer = blocks.tensor.data_ptr()
        # Checked here, too: while the call waited its pair may have been closed, which frees the communicator.
        if not self._calling.acquire(blocking=False):
            raise TransferFailed("the NCCL pair is being closed")
        try:
            if self._is_closed:
                raise TransferFailed("the NCCL pair is closed")
            device, communicator = self._device, self._communicator
            communicator.check_async_error()
            with cupy.cuda.Device(device.device.index):
                getattr(communicator, name)(pointer, num_bytes, _UINT8, self._peer, self._stream.cuda_stream)
            return device.watched(wake, self._stream, limit_s)
        finally:
            self._calling.release()


_UINT8: Final = 1  # ncclUint8: KV travels as bytes, whatever they mean
_issuers: dict[int, Issuer] = {}
_abandoned: list[Any] = []
_lock = threading.Lock()


def issuer_of(device: CudaDevice) -> Issuer:
    with _lock:
        found = _issuers.get(device.device.index)
        if found is None:
            found = _issuers[device.device.index] = Issuer()
        return found
