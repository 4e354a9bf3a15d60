"""NCCL communicators of two ranks, through CuPy. The only module that imports CuPy's NCCL.

- One thread issues all sends and receives of a device, in the order of the requests (`Issuer`). NCCL forbids calls from
  two threads on one communicator, and advises against several threads for the communicators of one device.
- A pair's first message is the exception: the thread that makes the pair sends it, because the message connects the
  pair and blocks until the other rank joins.
- CuPy raises KeyError for statuses that it does not know (in progress, timeout). They are treated like other statuses.
- A separate thread aborts a call that does not end. If the abort does not return, that thread stays, and the
  connection's staging is not used again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, final

import torch

from kvtransfer.devices.cuda import CudaBlocks, CudaCopying, CudaDevice
from kvtransfer.devices.issuer import Issuer, answer_of, on_its_own_thread, status_of
from kvtransfer.protocol.device import MESSAGE_S, Blocks, Wake
from pdserve.core.errors import TransferFailed

log = logging.getLogger(__name__)

JOIN_S: Final = 60.0
LEAVE_S: Final = 1.0  # wait for a call in progress, which takes microseconds unless it is stuck
ABORT_S: Final = 10.0
_WARM_BYTES: Final = 4


def signed(unique_id: bytes) -> tuple[int, ...]:
    """An id in the form that CuPy before 14 expects: a tuple of C chars, which are signed on x86."""
    return tuple(byte - 256 if byte > 127 else byte for byte in unique_id)


def communicator(nccl: Any, unique_id: bytes, rank: int) -> Any:
    """A communicator of two ranks. Blocks until the other rank joins."""
    try:
        return nccl.NcclCommunicator(2, unique_id, rank)
    except TypeError:  # CuPy before 14; nothing has been done yet
        return nccl.NcclCommunicator(2, signed(unique_id), rank)


@final
class NcclConnector:
    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:  # CuPy without NCCL has the module, but not its functions
            raise TransferFailed("CuPy finds no NCCL library")
        self._nccl = nccl
        self.version = str(nccl.get_version())

    def new_id(self) -> bytes:
        return bytes(number % 256 for number in self._nccl.get_unique_id())

    def join(self, device: CudaDevice, unique_id: bytes, rank: int) -> NcclConnection:
        """Makes and connects the pair on a separate thread. Raises TransferFailed."""
        issuer = issuer_of(device)
        made: list[NcclConnection] = []
        is_given_up = threading.Event()

        def make() -> NcclConnection:
            import cupy

            with cupy.cuda.Device(device.device.index):
                connection = NcclConnection(issuer, device, communicator(self._nccl, unique_id, rank), 1 - rank)
                made.append(connection)
                scratch = device.staging(1)
                try:
                    if is_given_up.is_set():
                        raise TransferFailed("the other NCCL rank came too late")
                    connection.warm(rank, scratch)
                except BaseException:
                    connection.close()
                    scratch.close()
                    raise
                scratch.close()
                return connection

        # Not on the issuing thread: the first message blocks until the other rank joins, and a rank that waits for a
        # missing peer cannot be interrupted. If several workers made their pairs in different orders, they would
        # deadlock.
        try:
            connection: NcclConnection = answer_of(make, on_its_own_thread, JOIN_S)
        except TransferFailed:
            is_given_up.set()
            for late in made:  # its first message is stuck, and only an abort ends it
                late.close()
            raise
        return connection


@final
class NcclConnection:
    def __init__(self, issuer: Issuer, device: CudaDevice, communicator: Any, peer: int) -> None:
        import cupy

        self._issuer, self._device, self._communicator, self._peer = issuer, device, communicator, peer
        self._calling = threading.Lock()  # held during each call of the communicator
        self._closing = threading.Lock()
        self._is_closed = False
        self._open_reason = ""  # why it may still access memory although it was closed
        # A receive whose sender is gone blocks all later work of its stream, so each pair has its own stream. CuPy
        # makes it, because torch hands out the same 32 streams in turn. It exists as long as the connection.
        with cupy.cuda.Device(device.device.index):
            self._owned = cupy.cuda.Stream(non_blocking=True)
        self._stream = torch.cuda.ExternalStream(self._owned.ptr, device=device.device)

    def warm(self, rank: int, scratch: Blocks) -> None:
        """Sends or receives the first message, on the calling thread.

        NCCL then connects all channels to the peer, whatever the size of the message. This may take as long as making
        the communicator.
        """
        has_ended = threading.Event()
        copying = self._queue("recv" if rank else "send", scratch, _WARM_BYTES, has_ended.set, JOIN_S)
        if not has_ended.wait(JOIN_S) or not copying.is_done:
            raise TransferFailed("the other NCCL rank has not answered")

    def send(self, source: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("send", source, num_bytes, wake)

    def receive(self, target: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        return self._issue("recv", target, num_bytes, wake)

    def close(self) -> None:
        with self._closing:  # a second caller waits until the first has closed it
            if not self._is_closed:
                self._is_closed = True
                self._open_reason = self._end()
                if self._open_reason:  # it may still write, so these objects and the staging are kept
                    _abandoned.append((self._communicator, self._owned))
            if self._open_reason:
                raise TransferFailed(self._open_reason)

    def _end(self) -> str:
        """Aborts the communicator. Returns why memory may still be accessed; empty if it is not."""
        ended = threading.Event()

        def abort() -> None:
            has_left = self._calling.acquire(timeout=LEAVE_S)  # if not, the call is stuck, and the abort must end it
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
            return f"the abort of an NCCL communicator did not return within {ABORT_S:g} s"
        if not self._calling.acquire(timeout=ABORT_S):
            return "an NCCL call did not return although its communicator was aborted"
        if not self._device.has_drained(self._stream, ABORT_S):
            return f"an NCCL kernel did not end within {ABORT_S:g} s although its communicator was aborted"
        return ""

    def _issue(self, name: str, blocks: Blocks, num_bytes: int, wake: Wake) -> CudaCopying:
        if self._is_closed:
            raise TransferFailed("the NCCL pair is closed")
        copying: CudaCopying = self._issuer.call(lambda: self._queue(name, blocks, num_bytes, wake))
        return copying

    def _queue(self, name: str, blocks: Blocks, num_bytes: int, wake: Wake, limit_s: float = MESSAGE_S) -> CudaCopying:
        import cupy

        assert isinstance(blocks, CudaBlocks)
        pointer = blocks.tensor.data_ptr()
        # Checked again, because the pair may have been closed while the call waited, which frees the communicator.
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


_UINT8: Final = 1  # ncclUint8: KV is sent as plain bytes
_issuers: dict[int, Issuer] = {}
_abandoned: list[Any] = []
_lock = threading.Lock()


def issuer_of(device: CudaDevice) -> Issuer:
    with _lock:
        found = _issuers.get(device.device.index)
        if found is None:
            found = _issuers[device.device.index] = Issuer()
        return found
