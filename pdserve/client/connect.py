"""How both clients connect: address, TLS, token, channel options and metadata, and the channels themselves.

The settings do no I/O; a transport opens channels.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, final

import grpc
import grpc.aio

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_bytes
from pdserve.build import FULL_VERSION
from pdserve.core.access.hosts import NO_HTTP_PROXY, check_endpoint, check_token, is_ip_address, is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.core.installation import VERSION_KEY
from pdserve.telemetry import trace_context
from pdserve.tls.certificates import Certificates, ReloadingCertificates

CONNECT_S: Final = 5.0
#: Calls go to the addresses in turn, also to those of one name; one that cannot be reached is left out until it can.
_ROUND_ROBIN: Final = '{"loadBalancingConfig":[{"round_robin":{}}]}'
#: Each connection watches the health of this service, which a router ends when it begins to drain. It is then left out.
_WATCHED: Final = "pdserve.v1.ClusterService"
_WATCHING: Final = _ROUND_ROBIN.replace("}]", '}],"healthCheckConfig":{"serviceName":"' + _WATCHED + '"}')
TIMEOUT_S: Final = 600.0
#: Of gRPC's names, which it checks itself. Without one, a missing port would mean that of HTTPS.
_SCHEME: Final = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")

TlsPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """An encrypted connection. `root_certs` is PEM; None: the roots that gRPC brings. A key and a chain enable mutual
    TLS."""

    root_certs: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str | None = None  # name in the server's certificate; None: the target's host

    def __post_init__(self) -> None:
        if (self.private_key is None) is not (self.certificate_chain is None):
            absent = "private_key" if self.private_key is None else "certificate_chain"
            raise ConfigError(absent, "nothing", "one: a certificate and its key are given together")

    @classmethod
    def from_files(
        cls,
        *,
        ca: TlsPath | None = None,
        cert: TlsPath | None = None,
        key: TlsPath | None = None,
        server_name: str = "",
    ) -> Tls:
        """From PEM files: the CA of the server's certificate, and a certificate with its key for mutual TLS.

        Raises ConfigError if a file cannot be read or is no such file.
        """
        return cls(
            root_certs=_content("tls_ca", ca),
            private_key=_content("tls_key", key),
            certificate_chain=_content("tls_cert", cert),
            server_name=server_name or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how to connect, checked."""

    address: str
    tls: Tls | None
    token: str | None
    connect_s: float
    is_insecure: bool = False  # the token may be sent in plain text

    @property
    def server(self) -> tuple[str, int | None]:
        """Host and port, or the path of a socket without a port."""
        if self.address.startswith("unix:"):
            return self.address.removeprefix("unix:"), None
        address = _without_scheme(_each(self.address)[0])
        host, separator, port = address.rpartition(":")
        return (host.strip("[]"), int(port)) if separator and port.isdecimal() else (address, None)

    @property
    def each(self) -> list[Target]:
        """One target for each router that the address lists, such as `ipv4:10.0.0.1:50051,10.0.0.2:50051`."""
        return [replace(self, address=one) for one in _each(self.address)]

    def with_token(self, token: str | None) -> Target:
        """Raises ConfigError if the token would be readable on the way, or if no header can carry it."""
        if not (token is None or self.tls is not None or self.is_insecure or is_loopback(self.address)):
            raise ConfigError(
                "token",
                "a token for " + self.address,
                "TLS beside it, or a loopback address: it would be readable (unless it is `insecure`)",
            )
        if token is not None:
            check_token("token", token)
        return replace(self, token=token)

    def credentials(self) -> grpc.ChannelCredentials | None:
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(self.tls.root_certs, self.tls.private_key, self.tls.certificate_chain)

    def channel_options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.primary_user_agent", "pdserve-python/0.1.0"),
            # Despite its name, this is the time limit of one connection attempt.
            ("grpc.min_reconnect_backoff_ms", int(self.connect_s * 1000)),
            ("grpc.initial_reconnect_backoff_ms", 100),  # shorter than the first retry, so that a retry reconnects
            ("grpc.max_reconnect_backoff_ms", 2000),
            # gRPC asks for the addresses of a name again when a connection has failed, by default every 30 s at most.
            ("grpc.dns_min_time_between_resolutions_ms", 1000),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.service_config", _WATCHING if may_have_several(self.address) else _ROUND_ROBIN),
            ("grpc.use_local_subchannel_pool", 1),  # clients share neither a connection nor its backoff
        ]
        if is_loopback(self.address):
            options.append(NO_HTTP_PROXY)
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def metadata(self, traceparent: str | None = None) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata of one call: this client's version, the token and, if the caller traces, its trace context."""
        token = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return trace_context.inject((*token, (VERSION_KEY, FULL_VERSION)), traceparent)


def target(
    address: str,
    *,
    tls: Tls | TlsPath | bool | None,
    token: str | None,
    connect_timeout_s: float,
    insecure: bool = False,
) -> Target:
    if not isinstance(address, str):
        raise TypeError(f"target must be str, not {type(address).__name__}")
    if not _SCHEME.match(address):
        check_endpoint("target", address, "localhost:50051")
    if isinstance(tls, str | os.PathLike):
        tls = Tls.from_files(ca=tls)
    if tls is not None and not isinstance(tls, Tls | bool):
        raise TypeError(f"tls must be pdserve.Tls, a path or bool, not {type(tls).__name__}")
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token must be str, not {type(token).__name__}")
    settings = Tls() if tls is True else (tls or None)
    found = Target(address=address, tls=settings, token=None, connect_s=connect_timeout_s, is_insecure=insecure)
    return found.with_token(token)


def is_loopback(address: str) -> bool:
    """True if the target, or each address of a list, is on this host. A name other than localhost may resolve to any
    host."""
    if address.startswith("unix:"):
        return True
    if len(several := _each(address)) > 1:
        return all(map(is_loopback, several))
    address = _without_scheme(address)
    host = address.rsplit(":", 1)[0] if address.count(":") == 1 or address.startswith("[") else address
    return is_loopback_host(host)


def may_have_several(address: str) -> bool:
    """Whether the target is a list, or a name of another host, which may resolve to several addresses. A single router
    answers for itself while it drains: it still tells operators what it does."""
    if len(_each(address)) > 1:
        return True
    return not (is_loopback(address) or is_ip_address(_without_scheme(address).rpartition(":")[0]))


def _each(address: str) -> list[str]:
    """gRPC takes a list of addresses for two schemes."""
    scheme = address[:5]
    return [scheme + one for one in address[5:].split(",")] if scheme in ("ipv4:", "ipv6:") else [address]


def _without_scheme(address: str) -> str:
    """Also without the DNS server of `dns://SERVER/NAME:PORT`."""
    return re.sub(r"^(dns:(//[^/]*/)?|ipv4:|ipv6:)", "", address)


def _content(name: str, path: TlsPath | None) -> bytes | None:
    if path is None:
        return None
    content = read_bytes(os.fspath(path), MAX_SETTINGS_BYTES, name)
    # gRPC reports wrong content as a server that does not answer.
    if (b"PRIVATE KEY-----" if name == "tls_key" else b"-----BEGIN CERTIFICATE-----") not in content:
        raise ConfigError(name, path, "a PEM file with " + ("a private key" if name == "tls_key" else "certificates"))
    return content


# --- transport ------------------------------------------------------------------------------------------------
# Opens the channel of a client. A test replaces it (pdserve.testing.MockTransport).


class ClientTransport(Protocol):
    """Each method returns a channel of its kind: the methods that generated stubs call, and `close`."""

    def open(self, target: Target) -> Any: ...

    def open_aio(self, target: Target) -> Any: ...


class GrpcTransport:
    """Connects to the target. The default."""

    def open(self, target: Target) -> grpc.Channel:
        credentials, options = target.credentials(), target.channel_options()
        if credentials is None:
            return grpc.insecure_channel(target.address, options=options)
        return grpc.secure_channel(target.address, credentials, options=options)

    def open_aio(self, target: Target) -> grpc.aio.Channel:
        """Call it inside the event loop that will use the channel."""
        credentials, options = target.credentials(), target.channel_options()
        if credentials is None:
            return grpc.aio.insecure_channel(target.address, options=options)
        return grpc.aio.secure_channel(target.address, credentials, options=options)


# --- transport for programs that run long ---------------------------------------------------------------------
# It opens a new channel when the certificate files have changed. Running calls keep their channel, which is closed
# after they have ended.

GRACE_S: Final = 600.0  # for the calls on a channel that was replaced


@final
class ReloadingTransport:
    """Trusts the CA in the files, and presents their certificate."""

    def __init__(self, tls: ReloadingCertificates) -> None:
        self._tls = tls

    def open(self, target: Target) -> Any:
        """A blocking channel, which keeps its certificates."""
        return GrpcTransport().open(self._with(target, self._tls.current()))

    def open_aio(self, target: Target) -> Any:
        return ReloadingChannel(self, target)

    def channel_of(self, target: Target, known: Certificates | None) -> tuple[Any, Certificates] | None:
        """A new channel; None if the certificates are still `known`."""
        found = self._tls.current()
        if found is known:
            return None
        return GrpcTransport().open_aio(self._with(target, found)), found

    def _with(self, target: Target, found: Certificates) -> Target:
        tls = Tls(
            root_certs=found.ca,
            private_key=found.key or None,
            certificate_chain=found.cert or None,
            server_name=self._tls.peer_name or None,
        )
        return dataclasses.replace(target, tls=tls)


@final
class ReloadingChannel:
    """The methods of a grpc.aio channel that generated stubs use. Belongs to one event loop."""

    def __init__(self, transport: ReloadingTransport, target: Target) -> None:
        self._transport, self._target = transport, target
        self._known: Certificates | None = None
        self._channel: Any = None
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().unary_unary(*args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().unary_stream(*args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().stream_unary(*args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._current().stream_stream(*args, **kwargs)

    async def close(self, grace: float | None = None) -> None:
        for one in list(self._closing):
            one.cancel()
        if self._channel is not None:
            await self._channel.close(grace)

    def _current(self) -> Any:
        found = self._transport.channel_of(self._target, self._known)
        if found is not None:
            former, (self._channel, self._known) = self._channel, found
            if former is not None:
                closing = asyncio.ensure_future(former.close(GRACE_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._channel
