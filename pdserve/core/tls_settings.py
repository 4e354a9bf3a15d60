"""The TLS settings of a process, and the rule that nothing is served in plain text beyond loopback. Pure.

Every process of a cluster has the same group of settings. A process presents one certificate: as a server to its
callers, and as a client to the processes that it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.hosts import is_loopback_host
from pdserve.core.setting import setting

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """The TLS settings of a worker. All of its callers belong to the cluster."""

    tls_cert: str = setting(
        "PEM file with this process's certificate, and intermediate certificates after it; plain text when empty", ""
    )
    tls_key: str = setting("PEM file with the private key of tls_cert", "")
    tls_ca: str = setting(
        "PEM file with the CA certificates of the cluster; its processes accept only each other's certificates from "
        "these",
        "",
    )
    tls_peer_name: str = setting(
        "name in the certificates of the processes that this one calls; the host that it calls when empty", ""
    )
    insecure: bool = setting("serve plain text beyond loopback", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerTlsSettings(TlsSettings):
    """The TLS settings of a process that callers from outside the cluster may reach."""

    tls_client_ca: str = setting(
        "PEM file with the CA certificates of callers; they then need a certificate from these, or from tls_ca", ""
    )


def check_tls(config: TlsSettings, host: str, *, is_worker: bool = False) -> None:
    """Raises ConfigError if the settings are incomplete, or if `host` would serve plain text to other hosts."""
    if bool(config.tls_cert) is not bool(config.tls_key):
        absent = "tls_key" if config.tls_cert else "tls_cert"
        raise ConfigError(absent, "nothing", "a PEM file: a certificate and its key are set together")
    if is_worker and bool(config.tls_cert) is not bool(config.tls_ca):
        absent = "tls_ca" if config.tls_cert else "tls_cert"
        raise ConfigError(absent, "nothing", "a PEM file: a worker has a certificate, its key and the cluster's CA")
    if isinstance(config, CallerTlsSettings) and config.tls_client_ca and not config.tls_cert:
        raise ConfigError("tls_client_ca", config.tls_client_ca, "tls_cert and tls_key beside it")
    if not (config.tls_cert or config.insecure or is_loopback_host(host)):
        expected = (
            "a loopback address, or TLS: `pdserve up --tls auto`, or a certificate in tls_cert and tls_key; with "
            "--insecure it is served in plain text"
        )
        raise ConfigError("host", host, expected)
