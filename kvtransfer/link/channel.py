"""A non-blocking stream socket, plain or with TLS, that one thread serves and other threads may wake, and the writer of
its frames.

`poll` does all waiting. Only the owning thread may call the methods; `post` and `stop` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import ssl
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, cast, final

from kvtransfer.protocol.lease import Heartbeat
from kvtransfer.protocol.plan import MAX_VIEWS, advance
from pdserve.core.durations import clamped_s
from pdserve.tls.certificates import ReloadingCertificates

# --- socket with TLS ------------------------------------------------------------------------------------------
# For data connections between hosts, with the non-blocking calls that `Channel` makes.
#
# One TLS record has at most RECORD_BYTES, and OpenSSL reads and writes one at a time.

RECORD_BYTES: Final = 16 * 1024
READ_BYTES: Final = 2**20  # maximum in one call, because the caller must check deadlines between calls
#: The maximum bytes of a connection that OpenSSL may hold outside the kernel's buffer.
MAX_HELD_BYTES: Final = 2 * RECORD_BYTES


@final
class TlsSocket(ssl.SSLSocket):
    """Raises BlockingIOError where a plain socket would. A write that raised it must be repeated with the same bytes,
    followed by more or not."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            return 0

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> tuple[int, list[Any], int, Any]:  # type: ignore[override]
        """Fills the buffers in order, with what has arrived and at most about READ_BYTES."""
        total = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view and total < READ_BYTES:
                try:
                    received = self.recv_into(view)
                except BlockingIOError:
                    if total == 0:
                        raise
                    return total, [], 0, None
                if received == 0:  # the next call finds the end again
                    return total, [], 0, None
                total += received
                view = view[received:]
        return total, [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]
        """Writes records until the kernel's buffer is full. Small buffers share a record."""
        total = 0
        for record in _records(buffers):
            try:
                sent = self.send(record)
            except BlockingIOError:
                if total == 0:
                    raise
                return total
            total += sent
            if sent < len(record):
                return total
        return total


def secured(sock: socket.socket, tls: ReloadingCertificates, host: str) -> TlsSocket:
    """The sender's handshake, blocking, within the socket's timeout. Raises OSError with the reason."""
    context = tls.current().client
    context.sslsocket_class = TlsSocket
    return cast(TlsSocket, context.wrap_socket(sock, server_hostname=tls.peer_name or host.strip("[]")))


def accepted(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """The receiver's side, before the handshake."""
    context.sslsocket_class = TlsSocket
    return cast(TlsSocket, context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


def _records(buffers: Iterable[Any]) -> Iterable[memoryview]:
    """The same bytes in pieces of at most RECORD_BYTES. A piece of one buffer is not copied."""
    small = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        if small:
            taken = view[: RECORD_BYTES - len(small)]
            small += taken
            view = view[len(taken) :]
            if len(small) == RECORD_BYTES:
                yield memoryview(bytes(small))
                small = bytearray()
        while len(view) >= RECORD_BYTES:
            yield view[:RECORD_BYTES]
            view = view[RECORD_BYTES:]
        if view:
            small += view
    if small:
        yield memoryview(bytes(small))


# --- channel --------------------------------------------------------------------------------------------------

MAX_OUTBOX: Final = 16_384  # small frames that may wait to be sent; more means that the peer has stopped reading
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))


class Gone(Exception):
    """The connection has ended; the text says why."""


class Silent(Gone):
    """The peer has sent nothing for too long."""


class Waker:
    """A file descriptor that becomes readable when any thread calls `set`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._is_closed:
                self._is_set = True
                os.write(self._write, b"x")

    def clear(self) -> None:
        with self._lock:
            if self._is_set:
                self._is_set = False
                os.read(self._read, 1)

    def wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll(_milliseconds(timeout_s))
        self.clear()

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._read)
                os.close(self._write)


def tune(sock: socket.socket) -> None:
    """Sends small frames without delay, and detects a vanished host in about ten seconds."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE if sys.platform == "linux" else ():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _milliseconds(timeout_s: float | None) -> int | None:
    """Rounded up, so that a wait does not end just before its deadline."""
    return None if timeout_s is None else math.ceil(clamped_s(timeout_s) * 1000)


class Channel:
    def __init__(
        self, sock: socket.socket, waker: Waker | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sock.setblocking(False)
        tune(sock)
        self.socket = sock
        self.waker = waker or Waker()
        self._clock = clock  # for the heartbeat
        self.is_readable = False  # result of the last wait
        self.meanwhile: Callable[[], None] = lambda: None  # called whenever `fill` has waited
        self._owner = 0
        self._outbox: deque[bytes] = deque()
        self._unsent = b""
        self._stopped = ""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self.waker, select.POLLIN)
        self._events = select.POLLIN
        self._wakes_at = 1
        self._heartbeat: Heartbeat | None = None
        self._beat = b""
        self._num_pending = 0  # bytes that had arrived but were too few to end the last wait

    def post(self, data: bytes) -> None:
        """Queues a small frame from any thread."""
        self._outbox.append(data)
        if threading.get_ident() != self._owner:  # the owner flushes before it waits
            self.waker.set()

    def watch(self, heartbeat: Heartbeat, beat: bytes) -> None:
        """From now on, waits send the frame `beat` whenever a heartbeat is due, and raise Silent if the peer is
        silent."""
        self._heartbeat, self._beat = heartbeat, beat

    @property
    def unacknowledged_bytes(self) -> int:
        """Written bytes that the peer's host has not acknowledged; 0 if unknown."""
        if sys.platform != "linux" or self.socket.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        answer = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def stop(self, reason: str) -> None:
        """Makes the owner's next wait raise Gone, from any thread."""
        self._stopped = reason
        self.waker.set()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent or self._outbox)

    def flush(self) -> None:
        """Sends queued small frames until the socket is full."""
        while self.has_unsent:
            if not self._unsent:
                self._unsent = b"".join(self._outbox.popleft() for _ in range(min(len(self._outbox), 64)))
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                if len(self._outbox) > MAX_OUTBOX:
                    raise Gone("the peer does not read its answers") from None
                return
            except OSError as error:
                raise Gone(f"connection lost: {error}") from error
            self._unsent = self._unsent[sent:]

    def wait(self, timeout_s: float | None = None, *, is_writing: bool = False) -> bool:
        """Waits for bytes to read, for room to write (if requested or if frames are queued), or for a wake. False: the
        time is up."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            return self._wait(timeout_s, is_writing)
        ends_s = math.inf if timeout_s is None else self._clock() + timeout_s
        while True:
            now_s = self._clock()
            is_over = not self._wait(min(heartbeat.left_s(now_s), max(0.0, ends_s - now_s)), is_writing)
            now_s = self._clock()
            if self.is_readable:
                heartbeat.heard(now_s)
            self._live(heartbeat, now_s)
            if not is_over or now_s >= ends_s:
                return not is_over

    def _live(self, heartbeat: Heartbeat, now_s: float) -> None:
        if heartbeat.is_silent(now_s) and not self._has_more_pending(heartbeat, now_s):
            raise Silent(f"the peer sent nothing for {heartbeat.silence_s:g} s")
        if heartbeat.is_due(now_s) and not self.has_unsent:
            self._outbox.append(self._beat)
            self.flush()

    def _has_more_pending(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """Whether bytes are arriving, but too few to end the wait (`wake_at`)."""
        pending = int.from_bytes(fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4)), sys.byteorder)
        before, self._num_pending = self._num_pending, pending
        if pending in (0, before):
            return False
        heartbeat.heard(now_s)
        return True

    def _wait(self, timeout_s: float | None, is_writing: bool) -> bool:
        self.flush()
        if self._has_decrypted:
            timeout_s = 0.0
        events = select.POLLIN | (select.POLLOUT if is_writing or self.has_unsent else 0)
        if events != self._events:
            self._poll.modify(self.socket, events)
            self._events = events
        ready = self._poll.poll(_milliseconds(timeout_s))
        self.waker.clear()
        self._owner = threading.get_ident()
        self.is_readable = self._has_decrypted or any(
            fd != self.waker.fileno() and event != select.POLLOUT for fd, event in ready
        )
        if self._stopped:
            raise Gone(self._stopped)
        self.flush()
        return bool(ready) or self.is_readable

    @property
    def _has_decrypted(self) -> bool:
        """Whether TLS holds received bytes outside the kernel's buffer, where `poll` does not see them."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def wake_at(self, num_bytes: int) -> None:
        """Later waits end only when at least `num_bytes` have arrived, or at the end of the stream. At least as many
        bytes must be on their way."""
        if isinstance(self.socket, ssl.SSLSocket):  # some of the bytes may have left the kernel's buffer already
            num_bytes = max(1, num_bytes - MAX_HELD_BYTES)
        if num_bytes != self._wakes_at:
            self._wakes_at = num_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def receive(self, views: list[memoryview]) -> int:
        """Reads the available bytes into the views; 0 if there are none. Raises Gone at the end of the stream."""
        try:
            if len(views) == 1 and not isinstance(self.socket, ssl.SSLSocket):
                received = self.socket.recv_into(views[0])
            else:
                received = self.socket.recvmsg_into(views[:MAX_VIEWS])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Gone(f"connection lost: {error}") from error
        if received == 0:
            raise Gone("connection closed by the peer")
        if self._heartbeat is not None:
            now_s = self._clock()
            self._heartbeat.heard(now_s)
            self._live(self._heartbeat, now_s)  # a side that only reads must send heartbeats, too
        return received

    def send(self, views: list[memoryview]) -> int:
        """Writes what the socket accepts; 0 if it is full."""
        try:
            return self.socket.sendmsg(views[:MAX_VIEWS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Gone(f"connection lost: {error}") from error

    def fill(self, view: memoryview, wake_bytes: int = 1) -> None:
        """Reads exactly len(view) bytes, without a time limit. Each wait is for `wake_bytes`, or for the rest."""
        while view:
            received = self.receive([view])
            if received == 0:
                self.wake_at(min(len(view), wake_bytes))
                self.wait()
                self.meanwhile()
            view = view[received:]
        self.wake_at(1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
        self.waker.close()


# --- writer of frames -----------------------------------------------------------------------------------------
# Small frames come first, then at most one long frame.


class WriteProgress(Enum):
    IDLE = "idle"  # nothing to write
    BLOCKED = "blocked"  # the socket is full
    BUSY = "busy"  # more can be written immediately


@final
class Writer:
    def __init__(self) -> None:
        self._small: deque[bytes] = deque()
        self._long: list[memoryview] = []  # the long frame; it waits for the frame that is being written
        self._current: list[memoryview] = []
        self._on_written: Callable[[], None] | None = None  # of the long frame, until it is written

    @property
    def is_idle(self) -> bool:
        return not self._small and not self._current and not self._long

    @property
    def is_streaming(self) -> bool:
        """Whether the long frame's memory is still being read."""
        return self._on_written is not None

    def write(self, frame: bytes) -> None:
        self._small.append(frame)

    def stream(self, frame: Sequence[memoryview], on_written: Callable[[], None]) -> None:
        """Writes a long frame directly from memory, which must not change until `on_written` is called."""
        assert self._on_written is None, "a long frame is being written already"
        self._long, self._on_written = list(frame), on_written

    def detach(self) -> None:
        """Writes the rest of the long frame from a copy, so that its memory is free immediately."""
        if self._long:
            self._long = [memoryview(b"".join(self._long))]
        else:
            self._current = [memoryview(b"".join(self._current))]
        self._finish()

    def clear(self) -> None:
        """Stops writing, without any callback."""
        self._small.clear()
        self._long, self._current, self._on_written = [], [], None

    def advance(self, channel: Channel) -> WriteProgress:
        """Makes one system call."""
        if not self._current:
            if self._small:
                self._current = [memoryview(b"".join(self._small))]
                self._small.clear()
            elif self._long:
                self._current, self._long = self._long, []
            else:
                return WriteProgress.IDLE
        is_long = self._on_written is not None and not self._long
        sent = channel.send(self._current)
        if sent == 0:
            return WriteProgress.BLOCKED
        advance(self._current, sent)
        if is_long and not self._current:
            self._finish()
        return WriteProgress.BUSY

    def _finish(self) -> None:
        on_written, self._on_written = self._on_written, None
        assert on_written is not None
        on_written()
