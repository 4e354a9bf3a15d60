"""TLS on gRPC: servers that present new certificates when their files change, and channels between the cluster's own
processes. A channel keeps the certificates that it was opened with."""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core.access.hosts import NO_HTTP_PROXY
from pdserve.tls.certificates import Certificates, ReloadingCertificates

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
