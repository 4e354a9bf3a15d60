"""Declares one setting: its help, its default, and its allowed values. The TLS settings of all processes are declared
here. Pure: standard library only.

A range is declared once, and checked for every source of the value: a flag, `--set`, a TOML file or a test.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.core.access.hosts import is_loopback_host
from pdserve.core.errors import ConfigError
from pdserve.core.urls import has_password

LARGEST_COUNT: Final = 2**31 - 1  # limit of fields that are sent as int32
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")  # used in Redis keys and file names


@dataclass(frozen=True, slots=True)
class Range:
    """A closed range. NaN and infinity are outside every range."""

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:.15g} to {self.high:.15g}"


def setting(
    text: str,
    default: Any = dataclasses.MISSING,
    *,
    env: str = "",
    within: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
    is_name: bool = False,
    is_url: bool = False,
    is_live: bool = False,
) -> Any:
    """Declares a dataclass field.

    `env` names the environment variable of a secret, which has no flag. With `is_url`, the value is a secret only if it
    contains a password. With `is_name`, the value must match NAME. With `is_live`, a running process takes a new value.
    """
    allowed = None if within is None else Range(*within)
    metadata = {
        "help": text,
        "env": env,
        "range": allowed,
        "choices": choices,
        "is_name": is_name,
        "is_url": is_url,
        "is_live": is_live,
    }
    return dataclasses.field(default=default, repr=not env, metadata=metadata)


def live_names(kind: Any) -> list[str]:
    """The fields of a dataclass that a running process takes new values of."""
    return [one.name for one in dataclasses.fields(kind) if one.metadata.get("is_live")]


def is_hidden(one: dataclasses.Field[Any], value: str) -> bool:
    """Whether `value` must not be on a command line, which other users can read."""
    return bool(one.metadata["env"]) and (not one.metadata["is_url"] or has_password(value))


def check_fields(config: Any) -> None:
    """Raises ConfigError for the first field that is outside its range or its choices."""
    for one in dataclasses.fields(config):
        check_value(one, getattr(config, one.name), one.name)


def check_value(one: dataclasses.Field[Any], value: object, name: str) -> None:
    """Raises ConfigError about the setting `name` if `value` is outside the field's range or choices."""
    allowed, choices = one.metadata.get("range"), one.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(name, value, "one of " + ", ".join(choices))
    if allowed is not None and value not in allowed:
        raise ConfigError(name, value, str(allowed))
    if one.metadata.get("is_name") and not (isinstance(value, str) and NAME.fullmatch(value)):
        raise ConfigError(name, repr(value), "1 to 128 letters, digits, dots, hyphens or underscores")


# --- known name nearest to a mistyped one ---------------------------------------------------------------------

MAX_NAME_CHARS: Final = 64  # of a mistyped name; comparing takes quadratic time, and no known name is longer


def nearest(name: str, known: Iterable[str], cutoff: float | None = None) -> str | None:
    """`cutoff`: least similarity; by default lower for short names, of which one typing error changes more."""
    if cutoff is None:
        cutoff = 0.6 if len(name) < 5 else 0.7
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), None) if len(name) <= MAX_NAME_CHARS else None


def did_you_mean(found: str | None) -> str:
    """The end of an error message; empty without a suggestion."""
    return f"; did you mean {found}?" if found else ""


# --- TLS settings ---------------------------------------------------------------------------------------------
# They include the rule that nothing is served in plain text beyond loopback.
#
# Every process of a cluster has the same group of settings. A process presents one certificate: as a server to its
# callers, and as a client to the processes that it calls.

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
            "a loopback address, or TLS: `pdserve up --tls auto` or `--tls DIR`, or tls_cert and tls_key of a single "
            "process; with --insecure it is served in plain text"
        )
        raise ConfigError("host", host, expected)


# --- files of certificates ------------------------------------------------------------------------------------
# Named as in a Kubernetes secret of type kubernetes.io/tls.

CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
