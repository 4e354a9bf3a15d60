"""Makes a cluster's CA and certificates, and reads what an operator's certificate is valid for."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import socket
from pathlib import Path

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_bytes
from pdserve.core.access.hosts import is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.core.installation import advice
from pdserve.core.setting import CERT
from pdserve.launch.spec import CALLERS, ClusterSpec, ClusterTls
from pdserve.owned_folder import OwnedFolder
from pdserve.tls.local_ca import PURPOSE, announce

_LOCAL = ("localhost", "127.0.0.1", "::1")


def make_certificates(spec: ClusterSpec) -> tuple[ClusterSpec, OwnedFolder | None]:
    """The spec with the folder of its certificates; None: they are the operator's, or there are none.

    The CA's key is never written: only this launcher could make further certificates. Raises ConfigError.
    """
    if spec.tls is None or not spec.tls.is_made_here:
        return spec, None
    check_cryptography()
    from pdserve.tls.authority import Authority, write_private

    folder = OwnedFolder.make(PURPOSE)
    try:
        tls = dataclasses.replace(spec.tls, folder=str(folder.path))
        authority = Authority(f"pdserve {spec.cluster}")
        hosts = certified_hosts(spec.host)
        for name in (*spec.worker_ids, *CALLERS):
            authority.write(folder.path / name, name, hosts)
        write_private(Path(tls.ca), authority.pem)
        announce(folder.path, tuple(port for port in (spec.port, spec.http) if port))
    except BaseException:
        folder.remove()
        raise
    return dataclasses.replace(spec, tls=tls), folder


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
