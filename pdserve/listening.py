"""Shared by all servers: why a port cannot be used, errors of event loops, and file descriptors.

The launcher keeps each port of its processes bound, without listening, so that no other user can bind it while a
process is being restarted (pdserve/launch/ports.py). A server binds beside the launcher with SO_REUSEPORT, which the
kernel allows only to sockets of one user that all set it. A server without a launcher does not set it: a second server
on its port is then an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from dataclasses import replace
from typing import Any, Final

from pdserve.config import GATEWAY_CONNECTIONS, GatewayConfig, RouterConfig, WorkerConfig, gateway_of
from pdserve.core.errors import ConfigError

log = logging.getLogger(__name__)

HELD_ENV: Final = "PDSERVE_HELD_PORTS"  # set by the launcher for its processes: the ports that it keeps bound


class PortInUse(ConfigError):
    def __init__(self, field: str, host: str, port: int) -> None:
        super().__init__(field, f"{port} (port in use)", f"a free port of {host}; 0 picks one")


def is_held(port: int) -> bool:
    """Whether this process's launcher keeps `port` bound."""
    return str(port) in os.environ.get(HELD_ENV, "").split(",")


def share_port(listener: socket.socket, port: int) -> None:
    """Before the bind: lets `listener` bind beside the launcher, if that keeps `port`."""
    if is_held(port):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def bind_error(name: str, host: str, port: int) -> ConfigError | None:
    """None if `port` of `host` is available; otherwise an error about the setting `name`, or about the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is available
        share_port(probe, port)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return PortInUse(name, host, port)
            if error.errno in (errno.EACCES, errno.EPERM):
                return ConfigError(name, port, "a port that this user may listen on, such as one from 1024")
            return ConfigError("host", host, f"an address of this machine ({error.strerror})")
    return None


def ignore_poller_races(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handles errors of an event loop. grpc.aio shares one poller among all loops of a process, and a loop that loses
    the race reads nothing: not an error."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


# --- file descriptors -----------------------------------------------------------------------------------------
# How many a process may need, and whether its limit allows them.

try:
    import resource
except ImportError:  # a system without such a limit
    resource = None  # type: ignore[assignment]

OF_A_PROCESS: Final = 128  # libraries, event loops, logs, model files, metrics, Redis, traces
OF_A_CHILD: Final = 8  # of a launcher for each of its processes: pipes, ports, log file
WORKER_CONNECTIONS: Final = 512 + 256  # to a worker's gRPC port and to its KV port
# Connections of a gateway beyond its limit: those which end after their last answer, and those which have made room for
# the ones that are accepted in a turn of its event loop, and are closed in the next turn.
MAX_LINGERING: Final = 128
MAX_ACCEPTED: Final = 128
LEAST_CONNECTIONS: Final = 512  # that the default of a gateway's connections needs


def needed_by(config: WorkerConfig | RouterConfig | GatewayConfig) -> int:
    if isinstance(config, WorkerConfig):
        return OF_A_PROCESS + WORKER_CONNECTIONS
    if isinstance(config, GatewayConfig):
        most = config.max_connections
        return (
            OF_A_PROCESS + MAX_LINGERING + MAX_ACCEPTED + (LEAST_CONNECTIONS if most == GATEWAY_CONNECTIONS else most)
        )
    gateway = gateway_of(config)
    http = 0 if gateway is None else needed_by(gateway)
    return OF_A_PROCESS + config.max_connections + len(config.workers) + http


def with_allowed_connections(config: GatewayConfig, num_reserved: int = 0) -> GatewayConfig:
    """The default number of connections, also if it was set, lowered to what the hard limit of open files leaves
    beside `num_reserved`. Another number is kept: allow_descriptors() then says what it needs."""
    if resource is None or config.max_connections != GATEWAY_CONNECTIONS:
        return config
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = hard - num_reserved - (needed_by(config) - LEAST_CONNECTIONS)
    if hard == resource.RLIM_INFINITY or room >= GATEWAY_CONNECTIONS:
        return config
    lowered = max(room, LEAST_CONNECTIONS)
    log.warning(
        "the limit of open files lowers the number of HTTP connections; raise it with `ulimit -n`",
        extra={"open_files": hard, "connections": lowered},
    )
    return replace(config, max_connections=lowered)


def allow_descriptors(needed: int, process: str) -> None:
    """Raises the soft limit of this process to its hard limit. Raises ConfigError if `needed` are not allowed then."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS reports a hard limit that it does not accept
            pass
    if soft != resource.RLIM_INFINITY and soft < needed:
        expected = f"at least {needed} open files for {process}: raise it with `ulimit -n {needed}`"
        raise ConfigError("ulimit -n", soft, expected)
