"""Sockets of paths: abstract Unix names for two ends on one host, this user only; and reading handshakes."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time

from kvtransfer.frames import BadFrame
from kvtransfer.paths.path import ReceiveLink


def listen() -> socket.socket:
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind("\0pdserve-kv-" + secrets.token_hex(16))
    return door


def address(door: socket.socket) -> str:
    return bytes(door.getsockname())[1:].decode()


def dial(name: str, timeout_s: float) -> socket.socket:
    """A blocking socket with that timeout. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect("\0" + name)
    except BaseException:
        sock.close()
        raise
    return sock


def is_own_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """From a blocking socket. Raises OSError at its end."""
    data = b""
    while len(data) < num_bytes:
        received = sock.recv(num_bytes - len(data))
        if not received:
            raise OSError("the other side closed the connection")
        data += received
    return data


def receive_patiently(link: ReceiveLink, num_bytes: int, patience_s: float) -> bytes:
    """From a connection's socket, which does not block. Raises BadFrame where the bytes do not come."""
    data = bytearray(num_bytes)
    view, ends_s = memoryview(data), time.monotonic() + patience_s
    while view:
        received = link.channel.receive([view])
        left_s = ends_s - time.monotonic()
        if received == 0 and (left_s <= 0 or not link.channel.wait(left_s)):
            raise BadFrame(f"{num_bytes} bytes of the handshake did not come in {patience_s:.0f} s")
        view = view[received:]
    return bytes(data)
