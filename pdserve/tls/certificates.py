"""The certificate files of a process, read again when they change, and the CA of a cluster on this host. Standard
library only.

Every new connection calls `current()`, which compares the files' metadata with those of the last reading. Files that
cannot be used are reported once, and the certificates that were read before stay in use: a file may be half written, or
a certificate may have been replaced before its key. They are tried again after TRY_AGAIN_S, because a certificate may
become valid only some seconds later by this host's clock. Open connections keep their certificates.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, final

from pdserve.bounded_file import MAX_SETTINGS_BYTES, read_bytes
from pdserve.core.errors import ConfigError
from pdserve.core.setting import CA, CallerTlsSettings, TlsSettings

log = logging.getLogger(__name__)

TRY_AGAIN_S: Final = 10.0

Signature = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; an empty one does not exist."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    client_ca: str = ""

    @classmethod
    def of(cls, config: TlsSettings) -> TlsFiles:
        client_ca = config.tls_client_ca if isinstance(config, CallerTlsSettings) else ""
        return cls(cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca, client_ca=client_ca)

    @property
    def named(self) -> list[tuple[str, str]]:
        """The settings that name a file, and the files."""
        found = (("tls_cert", self.cert), ("tls_key", self.key), ("tls_ca", self.ca), ("tls_client_ca", self.client_ca))
        return [(name, path) for name, path in found if path]


@final
@dataclass(frozen=True)
class Certificates:
    """One consistent reading of the files; absent ones are empty. The reader has made every context that it needs."""

    files: TlsFiles
    cert: bytes
    key: bytes
    ca: bytes
    client_ca: bytes

    @property
    def caller_ca(self) -> bytes:
        """The CA certificates of callers that must present a certificate: the cluster's own processes call, too."""
        return self.client_ca + b"\n" + self.ca if self.client_ca else b""

    @cached_property
    def peer_server(self) -> ssl.SSLContext:
        """For a server whose clients are the cluster's own processes."""
        context = self._server(self.ca)
        context.num_tickets = 0  # peers do not resume sessions
        return context

    @cached_property
    def caller_server(self) -> ssl.SSLContext:
        """For a server of callers; they need a certificate if there is a CA for them."""
        return self._server(self.caller_ca, ssl.TLSVersion.TLSv1_2)

    @cached_property
    def client(self) -> ssl.SSLContext:
        """For connections to the cluster's own processes."""
        return self.client_of(checks_name=True)

    def client_of(self, *, checks_name: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = checks_name
        context.load_verify_locations(cadata=self.ca.decode())
        if self.cert:
            self._load_own(context)
        return context

    def _server(self, roots: bytes, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = oldest
        self._load_own(context)
        if roots:
            context.load_verify_locations(cadata=roots.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _load_own(self, context: ssl.SSLContext) -> None:
        # With a password function, an encrypted key is an error; without one, OpenSSL would ask on the terminal.
        context.load_cert_chain(self.files.cert, self.files.key, password=lambda: b"")


@final
class ReloadingCertificates:
    """Any thread may call it."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        peer_name: str = "",
        is_mutual: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`peer_name`: the name in the certificates of other processes; empty: the host that is called. `is_mutual`:
        the CA must accept the process's own certificate, for a server and for a client.

        Raises ConfigError, which names the setting, if a file cannot be used.
        """
        self.files, self.peer_name, self._is_mutual = files, peer_name, is_mutual
        self._lock = threading.Lock()
        self._clock = clock
        self._error = ""  # of the last reading
        self._tried_s = 0.0
        self._read_at: Signature = ()
        self._current = self._read(self._signature())

    def current(self) -> Certificates:
        with self._lock:
            try:
                signature = self._signature()
                is_due = self._error and self._clock() >= self._tried_s + TRY_AGAIN_S
                if signature != self._read_at or is_due:
                    self._current = self._read(signature)
                    self._error = ""
                    log.info("TLS files were read again", extra={"files": [path for _, path in self.files.named]})
            except ConfigError as error:
                if error.message != self._error:
                    self._error = error.message
                    log.error("new TLS files cannot be used, the earlier ones stay", extra={"why": error.message})
            return self._current

    def _signature(self) -> Signature:
        return tuple(_facts(name, path) for name, path in self.files.named)

    def _read(self, signature: Signature) -> Certificates:
        """Raises ConfigError."""
        # Files that cannot be used are not read for every connection.
        self._read_at, self._tried_s = signature, self._clock()
        files = self.files
        content = {path: _content(name, path) for name, path in files.named}
        found = Certificates(
            files=files,
            cert=content.get(files.cert, b""),
            key=content.get(files.key, b""),
            ca=content.get(files.ca, b""),
            client_ca=content.get(files.client_ca, b""),
        )
        try:
            if found.ca:
                _load("tls_ca", files.ca, "CA certificates", lambda: _trust(found.ca))
            if found.client_ca:
                _load("tls_client_ca", files.client_ca, "CA certificates", lambda: _trust(found.client_ca))
            if found.cert:
                expected = f"a certificate, with its key in {files.key}"
                _load("tls_cert", files.cert, expected, lambda: found.caller_server)
            if self._is_mutual:
                _load("tls_cert", files.cert, f"a certificate from the CA in {files.ca}", lambda: _greet_itself(found))
            if found.ca:
                _load("tls_ca", files.ca, "CA certificates", lambda: found.client)
        finally:
            if self._signature() != signature:  # the contexts were made of other files than `content`
                self._read_at = ()
                raise ConfigError("tls_cert", files.cert, "files that do not change while they are read")
        return found


def certificates_of(config: TlsSettings, *, is_mutual: bool) -> ReloadingCertificates | None:
    """None for a process without TLS. Raises ConfigError if a file cannot be used."""
    files = TlsFiles.of(config)
    if not files.named:
        return None
    return ReloadingCertificates(files, peer_name=config.tls_peer_name, is_mutual=is_mutual and bool(files.ca))


def _content(name: str, path: str) -> bytes:
    return read_bytes(path, MAX_SETTINGS_BYTES, name)


def _facts(name: str, path: str) -> tuple[int, int, int, int]:
    try:
        facts = os.stat(path)
    except OSError as error:
        raise ConfigError(name, path, f"a file that can be read ({error.strerror})") from None
    return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size


def _load(name: str, path: str, expected: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(name, path, f"{expected} ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()


def _trust(roots: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_verify_locations(cadata=roots.decode())
    return context


def _greet_itself(found: Certificates) -> None:
    """A handshake in memory. Raises ssl.SSLError if the CA does not accept the certificate, or if it has expired."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = found.client_of(checks_name=False).wrap_bio(to_client, to_server)
    server = found.peer_server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


# --- CA of a cluster on this host -----------------------------------------------------------------------------
# How commands find the CA of a cluster that `pdserve up --tls auto` has started.
#
# The folder with the cluster's certificates is an OwnedFolder: only its user can read it, and it ends with its
# launcher. It holds a file for each port of the cluster.

PURPOSE: Final = "tls"
_PORT: Final = "port-{port}"


def announce(folder: Path, ports: tuple[int, ...]) -> None:
    """Clients of these ports on this host then find the CA in `folder`."""
    for port in ports:
        (folder / _PORT.format(port=port)).touch(mode=0o600)


def local_ca(port: str) -> str:
    """The path of the CA of this user's cluster that serves `port`; empty if there is none."""
    if not port.isdecimal() or len(port) > 5:
        return ""
    from pdserve.owned_folder import PREFIX, temporary_folders  # loads archive formats, which few clients need

    for parent in temporary_folders():
        for folder in parent.glob(f"{PREFIX}{PURPOSE}-*"):
            if _is_ours(folder) and (folder / _PORT.format(port=int(port))).exists():
                return str(folder / CA)
    return ""


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write there: another user could offer a CA of its own."""
    from pdserve.owned_folder import is_private  # as above

    try:
        return is_private(folder.lstat())
    except OSError:
        return False
