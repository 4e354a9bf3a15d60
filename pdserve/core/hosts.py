"""Decides which addresses only this host can reach, and which calls must not go through an HTTP proxy. Pure."""

from __future__ import annotations

import ipaddress
from typing import Final

from pdserve.core.errors import ConfigError

_ANY: Final = ("", "0.0.0.0", "::")

#: gRPC's channel option for connections within the cluster or this host. gRPC would otherwise send them to the proxy
#: that `http_proxy` names, which cannot reach them.
NO_HTTP_PROXY: Final = ("grpc.enable_http_proxy", 0)


def is_loopback_host(host: str) -> bool:
    """Whether only this host can reach `host`. False for a name other than localhost, which may resolve to any host."""
    host = host.strip("[]")
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def is_ip_address(host: str) -> bool:
    """Whether `host` is no name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_any_host(host: str) -> bool:
    """Whether a server on `host` listens on every address of this host."""
    return host.strip("[]") in _ANY


def local_host(host: str) -> str:
    """The address at which this host reaches its own server that listens on `host`."""
    if not is_any_host(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def join(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_endpoint(name: str, text: str) -> None:
    """Raises ConfigError if the setting `name` is not HOST:PORT, which may follow http:// or https://."""
    scheme, found, rest = text.rpartition("://")
    host, _, port = rest.removesuffix("/").rpartition(":")
    is_host = (
        bool(host) and ("://" not in host) and not set(host) & set(" /@?#") and (":" not in host or host[0] == "[")
    )
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65_535
    if not is_host or not is_port or (found and scheme not in ("http", "https")):
        raise ConfigError(name, repr(text[:128]), "HOST:PORT, such as localhost:4317, or http(s)://HOST:PORT")
