"""Common parts of the gRPC servers and channels between a cluster's own processes: options, listening, rejections."""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core.errors import PdserveError, Unauthenticated, UnknownMethod
from pdserve.listening import PortInUse, bind_error
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.wire.peers import FOLLOW, OnRejected, ProofInterceptor
from pdserve.wire.port_options import port_options
from pdserve.wire.requests import RequestCheck
from pdserve.wire.tls_credentials import peer_port

Options = tuple[tuple[str, int], ...]

# Detects a peer whose host vanished, also on long streams.
KEEPALIVE: Final[Options] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_PINGS_ALLOWED: Final = ("grpc.http2.min_ping_interval_without_data_ms", 5_000)  # of an idle peer: KEEPALIVE
_CODES: Final[dict[type[PdserveError], grpc.StatusCode]] = {
    UnknownMethod: grpc.StatusCode.UNIMPLEMENTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}


def message_options(max_bytes: int) -> Options:
    return (("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes))


def channel_options(max_message_bytes: int) -> Options:
    # A shared subchannel would remember failures of an earlier process at that address.
    return (*message_options(max_message_bytes), *KEEPALIVE, ("grpc.use_local_subchannel_pool", 1))


def server_options(*, max_message_bytes: int, max_connections: int, idle_s: float) -> Options:
    """Without a maximum age of connections, which would end long streams."""
    return (
        *message_options(max_message_bytes),
        *port_options(max_connections=max_connections, idle_s=idle_s, shares_port=False),
        *KEEPALIVE,
        _PINGS_ALLOWED,
    )


def make_peer_server(
    options: Options, on_rejected: OnRejected, *, shares_port: bool = False
) -> tuple[Any, ProofInterceptor]:
    """A grpc.aio server that rejects every call until its ProofInterceptor serves. `shares_port` as in port_options."""
    options = tuple({**dict(options), "grpc.so_reuseport": int(shares_port)}.items())
    proofs = ProofInterceptor(abort, on_rejected)
    # A leader's grant may name each block of a long prompt.
    check = RequestCheck(abort, on_rejected, uncounted=(FOLLOW,))
    return grpc.aio.server(interceptors=(check, proofs), options=options), proofs


def listen(server: Any, host: str, port: int, name: str, tls: ReloadingCertificates | None = None) -> int:
    """The port of `server`; 0 selects a free one. Plain text without `tls`. Raises ConfigError about the setting
    `name`."""
    try:
        found = peer_port(server, f"{host}:{port}", tls)
    except RuntimeError:
        found = 0
    if found == 0:
        raise bind_error(name, host.strip("[]"), port) or PortInUse(name, host, port)
    return found


async def abort(context: Any, error: PdserveError) -> None:
    """Without the details of pdserve.wire.status, because google.rpc is not installed on every worker's machine."""
    await context.abort(_CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT), error.message)
