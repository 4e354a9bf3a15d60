"""Finds ports that can be kept, and keeps them bound, because a restarted process must listen where others look for it.

Between the death of a process and its restart, another user could otherwise bind its port, and would receive what
clients send there, such as their tokens.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import random
import re
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, final

from pdserve.bounded_file import cache_file, open_private
from pdserve.client.retries import Retries
from pdserve.client.sync import Client
from pdserve.core.access.hosts import is_any_host, is_loopback_host, join, local_host
from pdserve.core.errors import ConfigError, PdserveError, PermissionDenied, Unauthenticated
from pdserve.listening import PortInUse, bind_error

# --- sockets that listen --------------------------------------------------------------------------------------
# The processes of a session that listen beyond loopback, from the kernel's tables. Linux only; empty elsewhere.

_LISTEN: Final = "0A"
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


class ListeningSocket(NamedTuple):
    process: str
    pid: int
    address: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        found = ipaddress.ip_address(self.address)
        mapped = getattr(found, "ipv4_mapped", None)
        return (mapped or found).is_loopback

    def __str__(self) -> str:
        return f"{self.process} (pid {self.pid}) on {self.address}:{self.port}"


def listeners(pids: Iterable[int]) -> list[ListeningSocket]:
    """All listening TCP sockets of these processes; none for ended processes and those of other users."""
    sockets = dict(_listening_sockets())
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = _SOCKET.fullmatch(os.readlink(descriptor))
                    if inode is not None and inode[1] in sockets:
                        found.add(ListeningSocket(name, pid, *sockets[inode[1]]))
    return sorted(found)


def listening_on(port: int) -> list[str]:
    """The addresses of this host at which any process listens on `port`."""
    return sorted({address for _, (address, found) in _listening_sockets() if found == port})


def _listening_sockets() -> Iterator[tuple[str, tuple[str, int]]]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    yield fields[9], _endpoint(fields[1])


def _endpoint(text: str) -> tuple[str, int]:
    """The kernel prints an address as 32-bit words in the byte order of the machine."""
    words, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    return str(ipaddress.ip_address(packed)), int(port, 16)


# --- ports that are kept --------------------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # on a system without it, no port is claimed
    fcntl = None  # type: ignore[assignment]

_ASK_S: Final = 1.0  # for what uses a port
_PAGE: Final = "/ui"
_PAGE_BYTES: Final = 16_384  # with the headers and the title
_TITLE: Final = b"<title>pdserve"
_LOWEST: Final = 20_000
_TRIES: Final = 2_000
_claims: Final[set[int]] = set()


class PortHolder(Protocol):
    """Another process that keeps ports bound."""

    def hold(self, port: int, places: Sequence[tuple[int, str, int]]) -> None:
        """`places`: the family of each socket, its address, and whether it is of IPv6 alone."""
        ...

    def release(self, port: int) -> None: ...


@final
class HeldPorts:
    """Ports that stay bound until `release`, or until this process ends, even if it is killed. None of them listens, so
    the kernel refuses connections while no server is bound beside it (pdserve/listening.py)."""

    def __init__(self) -> None:
        self._sockets: dict[int, list[socket.socket]] = {}
        self._other: PortHolder | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(self._sockets)

    def hold(self, name: str, host: str, port: int) -> None:
        """Raises ConfigError about the setting `name` if `port` is not available on `host`, or on another address to
        which a client's name for `host` may lead."""
        held: list[socket.socket] = []
        try:
            for family, address in _addresses(host):
                held.append(_bound(family, address, port))
        except OSError as error:
            for one in held:
                one.close()
            raise bind_error(name, host, port) or _in_use_beside(name, host, port) from error
        if all(map(_can_share, held)):
            self._sockets[port] = held
            if self._other is not None:
                self._other.hold(port, list(map(_place, held)))
        else:  # gVisor decides at the bind: servers then bind alone, as without a launcher
            for one in held:
                one.close()

    def hold_with(self, other: PortHolder, ports: Iterable[int] = ()) -> None:
        """From now on, `other` holds them too, also after this process has ended. It holds `ports` already."""
        self._other = other
        for port, held in self._sockets.items():
            other.hold(port, list(map(_place, held)))
        for port in ports:
            self._sockets[port] = []
            claim(port)

    def release(self, ports: Iterable[int] | None = None) -> None:
        """None: all. Idempotent. Other launchers of this user may choose them from now on."""
        for port in list(self._sockets) if ports is None else list(ports):
            if port in self._sockets and self._other is not None:
                self._other.release(port)
            for one in self._sockets.pop(port, ()):
                one.close()
            unclaim(port)


def free_ports(count: int, hosts: Collection[str] = ("127.0.0.1",), *, avoid: Collection[int] = ()) -> tuple[int, ...]:
    """`count` different ports that can be held on each of `hosts`, and that no other launcher of this user has claimed;
    none of `avoid`.

    They are below the kernel's ephemeral range: between a worker's death and its restart an outgoing connection could
    take a port in that range, and a client that reconnects could even connect to itself.
    """
    for host in hosts:
        check_free("port", host, 0)  # it is an address of this machine
    found: list[int] = []
    candidates = random.sample(range(_LOWEST, _ephemeral_start()), _TRIES)
    while candidates and len(found) < count:
        port = candidates.pop()
        if port not in avoid and all(is_free(host, port) for host in hosts) and claim(port):
            found.append(port)
    if len(found) < count:
        raise ConfigError("port", f"{len(found)} free ports on {', '.join(hosts)}", f"{count} of them")
    return tuple(found)


def claim(port: int) -> bool:
    """False if another process of this user has claimed it: seconds may pass between the choice and the use of a port,
    and another launcher must not choose it in that time. The claim is a lock on one byte of a file, and ends with the
    process. Always true if this user has no such file: a claim only avoids a failed start."""
    if fcntl is None or (lock := _claims_file()) < 0:
        return True
    if port not in _claims:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError as error:
            # Some network file systems have no locks: then nothing is known of other launchers.
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        _claims.add(port)
    return True


def unclaim(port: int) -> None:
    if port in _claims:
        _claims.remove(port)
        fcntl.lockf(_claims_file(), fcntl.LOCK_UN, 1, port)


def is_free(host: str, port: int) -> bool:
    return all(bind_error("port", address, port) is None for _, address in _addresses(host))


def check_free(name: str, host: str, port: int) -> None:
    """Raises ConfigError about the setting `name` if `port` of `host` is not available."""
    error = bind_error(name, host, port)
    if error is not None:
        raise error


def with_user_of_port(error: PortInUse, host: str, port: int) -> ConfigError:
    """The error of a port that is in use, with what uses it."""
    flags = {"port": "--port, for gRPC, sets it; ", "http": "--http sets it; ", "metrics": "--metrics sets it; "}
    return ConfigError(
        error.field, error.seen, f"{error.expected}; {flags.get(error.field, '')}{user_of_port(host, port)}"
    )


def user_of_port(host: str, port: int) -> str:
    """What uses a port, as far as that can be found in a few seconds."""
    if not listening_on(port):
        user = "no server listens there: an outgoing connection may hold it, as Linux takes its ports from "
        return user + f"{_ephemeral_start()} on; try again"
    address = local_host(host)
    if _is_gateway(address, port):
        return f"another pdserve cluster serves HTTP there (its live view has the path {_PAGE})"
    if _is_router(join(address, port)):
        return "another pdserve cluster serves there (`pdserve topology`)"
    return "another program listens there"


def _is_gateway(host: str, port: int) -> bool:
    """Whether it serves the page of the live view, over HTTP or HTTPS."""
    return any(_TITLE in _page_of(host, port, is_tls=is_tls) for is_tls in (False, True))


def _page_of(host: str, port: int, *, is_tls: bool) -> bytes:
    """The beginning of the answer, as far as it comes in time."""
    answer, deadline_s = b"", time.monotonic() + _ASK_S
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        one = stack.enter_context(socket.create_connection((host, port), _ASK_S))
        if is_tls:  # no secret is sent, so the certificate does not matter
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            one = stack.enter_context(context.wrap_socket(one))
        one.sendall(f"GET {_PAGE} HTTP/1.1\r\nhost: {join(host, port)}\r\nconnection: close\r\n\r\n".encode())
        while len(answer) < _PAGE_BYTES and (left_s := deadline_s - time.monotonic()) > 0.0:
            one.settimeout(left_s)
            if not (more := one.recv(_PAGE_BYTES)):
                break
            answer += more
    return answer


def _is_router(address: str) -> bool:
    try:
        with Client(address, timeout_s=_ASK_S, connect_timeout_s=_ASK_S, retries=Retries(limit=0)) as client:
            client.topology()
    except (Unauthenticated, PermissionDenied):
        return True
    except PdserveError:
        return False
    return True


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A socket that no other user can bind beside. Raises OSError."""
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_any_host(address)))
        try:
            one.bind((address, port))
        except OSError:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended server are in TIME_WAIT
            one.bind((address, port))
            # Other users could bind beside a socket with this option that does not listen.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        # Only after the bind, so that the bind fails if another launcher of this user keeps the port.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        one.close()
        raise
    return one


def _place(held: socket.socket) -> tuple[int, str, int]:
    is_v6 = held.family == socket.AF_INET6
    only_v6 = held.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) if is_v6 else 0
    return int(held.family), str(held.getsockname()[0]), only_v6


def _in_use_beside(name: str, host: str, port: int) -> ConfigError:
    """The error if another program has `port`, but not on `host` itself."""
    where = ", ".join(join(address, port) for address in listening_on(port)) or "another address of this machine"
    names = "`localhost`" if is_loopback_host(host) else host
    expected = f"a port that is free there too, because clients of {names} may reach that program; 0 picks one"
    return ConfigError(name, f"{port} (in use on {where})", expected)


def _can_share(held: socket.socket) -> bool:
    """Whether this kernel lets a server bind beside a socket that has got the option after its own bind."""
    with socket.socket(held.family, socket.SOCK_STREAM) as one:
        if held.family == socket.AF_INET6:
            only = held.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as servers do
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            one.bind(held.getsockname())
        except OSError:
            return False
    return True


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What a server on `host` binds, and the addresses to which a client's name for it may lead: `localhost` has two,
    and a server on any address may be called by IPv4 and IPv6. Raises OSError."""
    host = host.strip("[]")
    if is_any_host(host):
        return [(socket.AF_INET6, "::")] if _has("::") else [(socket.AF_INET, "0.0.0.0")]
    if is_loopback_host(host):
        own = [] if host in ("localhost", "127.0.0.1", "::1") else [(socket.AF_INET, host)]
        return [*own, (socket.AF_INET, "127.0.0.1"), *([(socket.AF_INET6, "::1")] if _has("::1") else [])]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # A link-local address needs its interface beside it, which nobody calls by a name.
    return list(dict.fromkeys((one[0], str(one[4][0])) for one in found if not str(one[4][0]).startswith("fe80:")))


def _has(address: str) -> bool:
    """Whether this host has IPv6 with that address."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


@functools.cache
def _claims_file() -> int:
    """Open until this process ends, because closing it would end all claims. -1 if there is none."""
    file = cache_file("ports.lock")
    try:
        return -1 if file is None else open_private(file, is_appended=True)
    except OSError:
        return -1


def _ephemeral_start() -> int:
    try:
        start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        start = 32_768
    return start if start >= _LOWEST + 2 * _TRIES else 32_768
