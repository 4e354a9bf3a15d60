"""Common parts of the gRPC servers and channels of a cluster: options, TLS, listening, rejections, health."""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core.access.hosts import NO_HTTP_PROXY
from pdserve.core.errors import PdserveError, Unauthenticated, UnknownMethod
from pdserve.listening import PortInUse, bind_error
from pdserve.tls.certificates import Certificates, ReloadingCertificates
from pdserve.wire.peers import FOLLOW, OnRejected, ProofInterceptor
from pdserve.wire.requests import RequestCheck

# --- options of a public port ---------------------------------------------------------------------------------
# They limit what a foreign client can keep open.
#
# connections   at most so many at a time; further ones are closed as they are accepted
# half-open     a connection that has not sent its HTTP/2 preface within HANDSHAKE_S is closed
# idle          a connection without a call is closed after a while; gRPC's clients open a new one with the next call
# age           a connection is closed at some age, 10 % less or more, so that connections spread over routers again.
#               Calls that run on it may finish within the grace; a client opens a new connection for the next call.
# streams       calls of one connection at a time; further ones wait in the client

HANDSHAKE_S: Final = 10.0
MAX_STREAMS: Final = 4096
_MOST_MS: Final = 2**31 - 1  # gRPC reads a C int; the largest value means never


def port_options(*, max_connections: int, idle_s: float, shares_port: bool) -> list[tuple[str, int]]:
    """`shares_port`: the launcher keeps the port bound, and starts one server beside it. Otherwise a port in use is an
    error, because a second server would get half of the calls."""
    return [
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", _ms(idle_s)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]


def age_options(*, age_s: float, grace_s: float) -> list[tuple[str, int]]:
    """`grace_s`: the maximum duration of a call, so that no call is interrupted."""
    return [
        ("grpc.max_connection_age_ms", _ms(age_s)),
        ("grpc.max_connection_age_grace_ms", _ms(grace_s)),
    ]


def _ms(seconds: float) -> int:
    return min(int(seconds * 1000), _MOST_MS)


# --- ports and channels with TLS ------------------------------------------------------------------------------
# Servers present new certificates when their files change. A channel keeps the certificates that it was opened with.

_NAME_OVERRIDE: Final = "grpc.ssl_target_name_override"


def caller_port(server: Any, address: str, tls: ReloadingCertificates | None) -> int:
    """Adds a port for callers, who need a certificate if there is a CA for them. The port; 0 or RuntimeError if it is
    not available. Plain text without `tls`, or if that has no certificate."""
    if tls is None or not tls.current().cert:
        return int(server.add_insecure_port(address))
    needs_certificate = bool(tls.current().caller_ca)
    return _secure_port(server, address, tls, needs_certificate=needs_certificate, is_for_peers=False)


def peer_port(server: Any, address: str, tls: ReloadingCertificates | None) -> int:
    """Adds a port for the cluster's own processes, which need a certificate. Like `caller_port`."""
    if tls is None:
        return int(server.add_insecure_port(address))
    return _secure_port(server, address, tls, needs_certificate=True, is_for_peers=True)


def peer_channel(target: str, tls: ReloadingCertificates | None, options: Any = ()) -> grpc.Channel:
    """A blocking channel to another process of the cluster."""
    if tls is None or not tls.files.ca:
        return grpc.insecure_channel(target, [*options, NO_HTTP_PROXY])
    return grpc.secure_channel(target, *_to_peer(tls, options))


def peer_channel_aio(target: str, tls: ReloadingCertificates | None, options: Any = ()) -> grpc.aio.Channel:
    if tls is None or not tls.files.ca:
        return grpc.aio.insecure_channel(target, [*options, NO_HTTP_PROXY])
    return grpc.aio.secure_channel(target, *_to_peer(tls, options))


def _to_peer(tls: ReloadingCertificates, options: Any) -> tuple[grpc.ChannelCredentials, list[tuple[str, Any]]]:
    found = tls.current()
    credentials = grpc.ssl_channel_credentials(found.ca, found.key or None, found.cert or None)
    name = [(_NAME_OVERRIDE, tls.peer_name)] if tls.peer_name else []
    return credentials, [*options, NO_HTTP_PROXY, *name]


def _secure_port(
    server: Any, address: str, tls: ReloadingCertificates, *, needs_certificate: bool, is_for_peers: bool
) -> int:
    used = tls.current()

    def configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
        roots = found.ca if is_for_peers else found.caller_ca
        return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], roots or None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks at each new connection, on its own threads; None: no change."""
        nonlocal used
        found = tls.current()
        if found is used:
            return None
        used = found
        return configuration(found)

    credentials = grpc.dynamic_ssl_server_credentials(configuration(used), changed, needs_certificate)
    return int(server.add_secure_port(address, credentials))


# --- servers and channels of the cluster's processes ----------------------------------------------------------

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


# --- health service -------------------------------------------------------------------------------------------
# gRPC's standard service with all its methods: the package's servicer lacks List. The package is not imported, because
# not every host has it.


def make_health_servicer() -> Any:
    """Raises ImportError without the package grpcio-health-checking."""
    from grpc_health.v1 import health, health_pb2

    class HealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # missing in its stubs
        def __init__(self) -> None:
            super().__init__()
            self._services = {health.OVERALL_HEALTH}

        async def set(self, service: str, status: Any) -> None:
            self._services.add(service)
            await super().set(service, status)

        async def List(self, request: Any, context: Any) -> Any:
            """The status of each service, as Check returns it."""
            check = health_pb2.HealthCheckRequest
            return health_pb2.HealthListResponse(
                statuses={name: await self.Check(check(service=name), context) for name in sorted(self._services)}
            )

    return HealthServicer()
