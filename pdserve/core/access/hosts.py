"""Which addresses only this host can reach, which calls must not go through an HTTP proxy, and what a bearer token may
contain. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.urls import hide_password

PORTS: Final = (0, 65_535)
MIN_TOKEN_CHARS: Final = 16  # of a token that other hosts could guess

_ENDPOINT: Final = re.compile(
    r"((?P<name>[^\s\[\]:/@,?#]+)|\[(?P<ipv6>[0-9a-fA-F:.]+(%[\w.-]+)?)\]):(?P<port>[0-9]{1,5})",
    re.ASCII,
)
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


def network_of(host: str) -> str:
    """The caller that an address stands for: itself, or its IPv6 network (/64), all addresses of which one caller may
    use. Raises ValueError if `host` is no address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def local_host(host: str) -> str:
    """The address at which this host reaches its own server that listens on `host`."""
    if not is_any_host(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def join(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def endpoint_of(text: str) -> tuple[str, int] | None:
    """Host, without brackets, and port of HOST:PORT; None if `text` has another form."""
    found = _ENDPOINT.fullmatch(text)
    if found is None or not 1 <= (port := int(found["port"])) <= PORTS[1]:
        return None
    ipv6 = found["ipv6"]
    if ipv6 and not (":" in ipv6 and is_ip_address(ipv6)):
        return None
    return ipv6 or found["name"], port


def check_endpoint(
    name: str, text: str, example: str = "10.0.0.1:7000", schemes: Sequence[str] = ()
) -> tuple[str, int]:
    """Host and port. Raises ConfigError if the setting `name` is not HOST:PORT, which may follow one of `schemes`."""
    scheme, found, rest = text.rpartition("://")
    endpoint = endpoint_of(rest.removesuffix("/") if found and scheme in schemes else text)
    if endpoint is None:
        what = " without a scheme" if found and not schemes else f" with a port from 1 to {PORTS[1]}"
        urls = "".join(f", or {one}://HOST:PORT" for one in schemes)
        raise ConfigError(name, repr(hide_password(text)[:128]), f"HOST:PORT{what}, such as {example}{urls}")
    return endpoint


# --- bearer tokens --------------------------------------------------------------------------------------------

MAX_TOKEN_CHARS: Final = 4096


def is_token(token: str) -> bool:
    """Headers of HTTP and metadata of gRPC carry printable ASCII only, and lose spaces at the ends."""
    return 0 < len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable() and token == token.strip()


def is_weak_token(token: str) -> bool:
    """Whether a token that is set can be guessed, because it is so short."""
    return 0 < len(token) < MIN_TOKEN_CHARS


def check_token(name: str, token: str) -> None:
    """Raises ConfigError, which does not repeat the token."""
    if not is_token(token):
        raise ConfigError(
            name,
            "a value that no header can carry",
            f"1 to {MAX_TOKEN_CHARS} characters of printable ASCII, without spaces at the ends",
        )
