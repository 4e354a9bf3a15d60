"""What `up` makes to keep others out: certificates of a cluster, and the limits of a Ray of its own. Imports no ray.

A Ray that `up --ray` starts for itself is confined to this host and this user. Its processes listen on loopback,
require a token and a certificate, and keep their sockets, logs, token and keys in a folder of mode 0700. Ray binds
its ports exclusively, so the launcher cannot keep them. If one of its processes crashes, the others dial its port
again for up to a day; without a certificate, another user who has bound the port would receive the token, with which
the remaining processes execute any program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import shlex
import socket
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_bytes
from pdserve.config import RAY_TOKEN_ENV
from pdserve.core.access.hosts import endpoint_of, is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.core.installation import advice
from pdserve.core.setting import CA, CERT, KEY
from pdserve.core.urls import hide_password, place
from pdserve.launch.spec import CALLERS, ClusterSpec, ClusterTls
from pdserve.owned_folder import SHORT, OwnedFolder, sweep
from pdserve.tls.certificates import PURPOSE, announce

if TYPE_CHECKING:
    from pdserve.tls.authority import Authority

TOKEN_PATH_ENV: Final = "RAY_AUTH_TOKEN_PATH"
MODE_ENV: Final = "RAY_AUTH_MODE"
# Ray names sockets PARENT/pdserve-run-ray-XXXXXXXX/r/session_DATE_TIME_PID/sockets/plasma_store, of at most 107 bytes.
_LONGEST_PARENT: Final = 12
_LOCAL_ENV: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_TLS_ENV: Final = "RAY_USE_TLS"
_PEM_ENVS: Final = {"RAY_TLS_SERVER_CERT": CERT, "RAY_TLS_SERVER_KEY": KEY, "RAY_TLS_CA_CERT": CA}
_FOR_COMMANDS: Final = (MODE_ENV, TOKEN_PATH_ENV, _LOCAL_ENV, _TLS_ENV, *_PEM_ENVS)
ADDRESSES: Final = "auto, local, HOST:PORT or ray://HOST:PORT"


def is_address(text: str) -> bool:
    """Whether `text` has the form of the address of a Ray cluster, and so cannot be a model."""
    return text in ("auto", "local") or text.startswith("ray://") or endpoint_of(text) is not None


def confine(environ: MutableMapping[str, str]) -> OwnedFolder:
    """Sets the variables that Ray reads at import, for itself and its processes; returns its temporary folder."""
    from pdserve.tls.authority import Authority  # needs the extra server, and `pdserve up` reads addresses without it

    parent = Path(tempfile.gettempdir())
    sweep()
    folder = OwnedFolder.make("ray", parent if len(str(parent)) <= _LONGEST_PARENT else SHORT)
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # With clusters disabled, Ray uses 127.0.0.1 as the address of its node, and all its servers listen only there.
    # Otherwise it chooses another address, even if _node_ip_address is this one.
    environ[_LOCAL_ENV] = "0"
    # By default a raylet ends with its actors a minute after the control plane is lost.
    environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
    environ.setdefault(MODE_ENV, "token")
    token = folder.path / "auth_token"
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    environ.pop(RAY_TOKEN_ENV, None)
    environ[TOKEN_PATH_ENV] = str(token)
    keys = folder.path / "tls"
    Authority("pdserve ray").write(keys, "ray", ["localhost", "127.0.0.1"])
    environ[_TLS_ENV] = "1"
    environ.update({name: str(keys / pem) for name, pem in _PEM_ENVS.items()})
    return folder


def temp_dir(folder: OwnedFolder) -> str:
    """A folder inside, because Ray makes its own folder accessible to all users."""
    return str(folder.path / "r")


def join(environ: MutableMapping[str, str]) -> None:
    """The same for a Ray that was started elsewhere, without a folder. Ray sends a token only if configured."""
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    held = environ.get(RAY_TOKEN_ENV) or environ.get(TOKEN_PATH_ENV)
    if held or (Path.home() / ".ray" / "auth_token").exists():
        environ.setdefault(MODE_ENV, "token")


def check_redis_socket(url: str) -> None:
    """Raises ConfigError if this process cannot reach the socket file of a Redis on its host."""
    if url.startswith("unix:") and not os.access(Path(place(url)).parent, os.X_OK):
        expected = "a URL that Ray's workers reach; they cannot enter this folder, as another user or in a container"
        raise ConfigError("redis", hide_password(url), expected)


def status_command(environ: Mapping[str, str], address: str, python: Path) -> str:
    """The command that shows the state of Ray at this address, for a shell of this user. Pure.

    The token and the certificates are in files, which the command names. With clusters enabled, Ray's command replaces
    the loopback address with another one of this host, on which a Ray of ours does not listen.
    """
    given = [f"{name}={shlex.quote(environ[name])}" for name in _FOR_COMMANDS if environ.get(name)]
    return " ".join([*given, shlex.quote(str(python.with_name("ray"))), "status", "--address", address])


def warnings(environ: MutableMapping[str, str], open_ports: list[str], *, is_own: bool) -> list[str]:
    """Describes for the operator which ports other hosts can reach. Pure."""
    found = []
    if open_ports:
        reach = "others can reach these ports of Ray: "
        found.append(f"WARNING: {reach}{', '.join(open_ports)}; protect them with a firewall")
    if environ.get(MODE_ENV) != "token" and (is_own or open_ports):
        found.append(
            f"WARNING: Ray requires no token ({MODE_ENV} is {environ.get(MODE_ENV) or 'unset'}): every process that "
            f"reaches its ports can run any program as this user; set {MODE_ENV}=token on every host"
        )
    return found


# --- certificates ---------------------------------------------------------------------------------------------
# A cluster's own CA, or the certificate of its operator.

_LOCAL = ("localhost", "127.0.0.1", "::1")


@final
class MadeCertificates:
    """The folder of a cluster's certificates, and the CA that signs them. Its key is never written: only this launcher,
    and one that takes its place, can make further certificates."""

    def __init__(self, folder: OwnedFolder, authority: Authority, hosts: list[str]) -> None:
        self.folder, self._authority, self._hosts = folder, authority, hosts

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def secret(self) -> str:
        """Of the CA, for `continue_certificates`."""
        return self._authority.secret

    def add(self, name: str) -> None:
        """For a process of that name, unless it has one."""
        if not (self.path / name).exists():
            self._authority.write(self.path / name, name, self._hosts)

    def remove(self) -> None:
        """Idempotent."""
        self.folder.remove()


def continue_certificates(spec: ClusterSpec, secret: str) -> MadeCertificates | None:
    """Of a running cluster, which another launcher has started. Raises OSError and ValueError."""
    if spec.tls is None or not spec.tls.is_made_here:
        return None
    check_cryptography()
    from pdserve.tls.authority import Authority

    authority = Authority(f"pdserve {spec.cluster}", secret=secret)
    return MadeCertificates(OwnedFolder.of_another(Path(spec.tls.folder)), authority, certified_hosts(spec.host))


def make_certificates(spec: ClusterSpec) -> tuple[ClusterSpec, MadeCertificates | None]:
    """The spec with the folder of its certificates; None: they are the operator's, or there are none. Raises
    ConfigError."""
    if spec.tls is None or not spec.tls.is_made_here:
        return spec, None
    check_cryptography()
    from pdserve.tls.authority import Authority, write_private

    folder = OwnedFolder.make(PURPOSE)
    try:
        tls = dataclasses.replace(spec.tls, folder=str(folder.path))
        authority = Authority(f"pdserve {spec.cluster}")
        made = MadeCertificates(folder, authority, certified_hosts(spec.host))
        for name in (*spec.worker_ids, *CALLERS):
            made.add(name)
        write_private(Path(tls.ca), authority.pem)
        announce(folder.path, tuple(port for port in (spec.port, spec.http) if port))
    except BaseException:
        folder.remove()
        raise
    return dataclasses.replace(spec, tls=tls), made


def certified_hosts(host: str) -> list[str]:
    """The names and addresses at which this host's processes are called."""
    own = socket.gethostname()
    found = [*_LOCAL, own]
    with contextlib.suppress(OSError):
        found += [str(address[4][0]) for address in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)]
    if host not in ("0.0.0.0", "::") and not is_loopback_host(host):
        found.append(host)
    return list(dict.fromkeys(one.partition("%")[0] for one in found))


def of_operator(folder: str, client_ca: str) -> ClusterTls:
    """An operator's folder. Raises ConfigError if its certificate cannot be read."""
    check_cryptography()
    from pdserve.tls.authority import hosts_of

    tls = ClusterTls(folder=str(Path(folder).expanduser().absolute()), client_ca=client_ca)
    cert = Path(tls.folder, CERT)
    try:
        hosts = hosts_of(read_bytes(cert, MAX_SETTINGS_BYTES, "tls"))
    except ConfigError as error:
        expected = f"auto, or a folder with {CERT}, tls.key and ca.crt ({error.message})"
        raise ConfigError("tls", folder, expected) from None
    except ValueError as error:
        raise ConfigError("tls", str(cert), f"a PEM certificate ({error})") from None
    if not hosts:
        raise ConfigError("tls", str(cert), "a certificate with the names it is for (subjectAltName)")
    # Processes of this host call each other on loopback, which a certificate for other hosts does not name.
    name = "" if "127.0.0.1" in hosts else hosts[0].replace("*", "pdserve", 1)
    return dataclasses.replace(tls, peer_name=name)


def check_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("tls", "no such package as cryptography", f"the extra server: {advice('server')}")
