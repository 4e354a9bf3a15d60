"""Explains why a port cannot be used for listening. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import socket

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
