"""Finds ports that can be kept, because a restarted worker must listen where routers look for it."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.listening import bind_error

_LOWEST: Final = 20_000
_TRIES: Final = 2_000
_claims: Final[dict[int, socket.socket]] = {}  # until this process ends


def free_ports(count: int, host: str = "127.0.0.1", *, avoid: Collection[int] = ()) -> tuple[int, ...]:
    """`count` different ports without a listener that no other launcher has claimed; none of `avoid`.

    They are below the kernel's ephemeral range: between a worker's death and its restart an outgoing connection could
    take a port in that range, and a client that reconnects could even connect to itself.
    """
    found: list[int] = []
    candidates = random.sample(range(_LOWEST, _ephemeral_start()), _TRIES)
    while candidates and len(found) < count:
        port = candidates.pop()
        if port not in avoid and is_free(host, port) and claim(port):
            found.append(port)
    if len(found) < count:
        raise ConfigError("port", f"{len(found)} free ports on {host}", f"{count} of them")
    return tuple(found)


def claim(port: int) -> bool:
    """False if another process has claimed it: seconds may pass between the choice and the use of a port, and another
    launcher must not choose it in that time. The claim ends with the process. Always true on systems without abstract
    sockets."""
    if port in _claims or not sys.platform.startswith("linux"):
        return True
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(f"\0pdserve.port.{port}")
    except OSError:
        mark.close()
        return False
    _claims[port] = mark
    return True


def is_free(host: str, port: int) -> bool:
    return bind_error("port", host, port) is None


def check_free(name: str, host: str, port: int) -> None:
    """Raises ConfigError about the setting `name` if `port` of `host` is not available."""
    error = bind_error(name, host, port)
    if error is not None:
        raise error


def _ephemeral_start() -> int:
    try:
        start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        start = 32_768
    return start if start >= _LOWEST + 2 * _TRIES else 32_768
