"""TLS for the data connections between hosts: a stream socket with the non-blocking calls that `Channel` makes.

One TLS record has at most RECORD_BYTES, and OpenSSL reads and writes one at a time.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Any, Final, cast, final

from pdserve.tls.certificates import ReloadingCertificates

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
