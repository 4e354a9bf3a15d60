"""Sockets between two processes of one host, and the handshake messages before the first frame."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from typing import Final

from kvtransfer.frames import BadFrame
from kvtransfer.transports.interface import ReceiveLink

TAKEN: Final = b"PDOK"  # the receiver has accepted the offer


class UnixListener:
    """The listening socket of transports between processes of one host."""

    is_same_host = True

    def listen(self, host: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0pdserve-kv-" + secrets.token_hex(16))
        return listener

    def address(self, listener: socket.socket) -> str:
        return bytes(listener.getsockname())[1:].decode()

    def dial(self, address: str, endpoint: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + address)
            if not self.admits(sock):  # abstract names have no owner, and anyone can take that of an ended receiver
                raise PermissionError("the receiver's socket belongs to another user")
        except BaseException:
            sock.close()
            raise
        return sock

    def admits(self, sock: socket.socket) -> bool:
        """Accepts only this user's processes."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        return bool(user == os.geteuid())


def await_taken(sock: socket.socket, what: str) -> None:
    """The sender's side, blocking: waits until the receiver sends TAKEN. Raises OSError if it does anything else."""
    answer = b""
    while len(answer) < len(TAKEN):
        received = sock.recv(len(TAKEN) - len(answer))
        if not received:
            break
        answer += received
    if answer != TAKEN:
        raise OSError(f"the receiver did not take the {what}")


def receive_within(link: ReceiveLink, num_bytes: int, timeout_s: float) -> bytes:
    """Reads from a connection's non-blocking socket. Raises BadFrame if the bytes do not come."""
    data = bytearray(num_bytes)
    view, ends_s = memoryview(data), time.monotonic() + timeout_s
    while view:
        received = link.channel.receive([view])
        left_s = ends_s - time.monotonic()
        if received == 0 and (left_s <= 0 or not link.channel.wait(left_s)):
            raise BadFrame(f"{num_bytes} bytes of the handshake did not come in {timeout_s:.0f} s")
        view = view[received:]
    return bytes(data)
