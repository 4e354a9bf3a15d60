"""Shared by all servers: why a port cannot be used, and errors of event loops. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any

from pdserve.core.errors import ConfigError, port_in_use


def bind_error(name: str, host: str, port: int) -> ConfigError | None:
    """None if `port` of `host` is available; otherwise an error about the setting `name`, or about the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is available
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return port_in_use(name, host, port)
            if error.errno in (errno.EACCES, errno.EPERM):
                return ConfigError(name, port, "a port that this user may listen on, such as one from 1024")
            return ConfigError("host", host, f"an address of this machine ({error.strerror})")
    return None


def ignore_poller_races(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles errors of an event loop. grpc.aio shares one poller among all loops of a process, and a loop that loses
    the race reads nothing: not an error."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
