"""The key file: tenants, their quotas, and hashes of their keys. Pure. docs/tenants.md describes the format.

A key is `pdk_` and 32 random bytes, so its SHA-256 cannot be inverted by guessing, and a lookup by that hash reveals
nothing through its time. A key of another form is not looked up, so the hash of a guessable password is useless here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, final

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.types import Slo

MAX_FILE_BYTES: Final = 16 * 2**20
MAX_TENANTS: Final = 10_000
MAX_KEYS: Final = 50_000
KEY_RANDOM_BYTES: Final = 32
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED_NAMES: Final = ("default", "other")  # label values of metrics
_KEY: Final = re.compile(r"pdk_[A-Za-z0-9_-]{43}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "tokens_per_minute": (1, 10**12),
    "max_concurrent": (1, 65_536),
    "max_priority": (-(2**31), 2**31 - 1),
}
_TENANT_FIELDS: Final = ("keys", "slo", *_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A group of callers that share quotas and a prefix cache. None: no limit."""

    name: str = ""  # empty: the default tenant, for callers with the operator's token, or if there is no key file
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None  # answers in progress
    slo: Slo | None = None  # targets of requests that set none; None: the router's defaults
    max_priority: int | None = None


DEFAULT_TENANT: Final = Tenant()


@final
@dataclass(frozen=True, slots=True)
class KeyFile:
    tenants: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))
    #: SHA-256 of a key -> its tenant.
    keys: Mapping[bytes, Tenant] = field(default_factory=lambda: MappingProxyType({}))

    def tenant_of(self, key: str) -> Tenant | None:
        """The tenant to which the key belongs; None if it is unknown."""
        return self.keys.get(_digest(key)) if is_key(key) else None


def make_key(random_bytes: bytes) -> str:
    assert len(random_bytes) == KEY_RANDOM_BYTES
    return "pdk_" + base64.urlsafe_b64encode(random_bytes).decode().rstrip("=")


def is_key(text: str) -> bool:
    """Whether the text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def key_hash(key: str) -> str:
    """The hash of a key, as in the file: 64 hexadecimal digits."""
    return _digest(key).hex()


def parse(text: str | bytes) -> KeyFile:
    """Raises ConfigError, naming the field."""
    return read(load(text))


def load(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a key file. Its fields are not checked. Raises ConfigError."""
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError("key_file", f"{len(text)} bytes", f"at most {MAX_FILE_BYTES} bytes")
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ConfigError("key_file", "a file that cannot be parsed", f"JSON ({error})") from None
    return _object("key_file", found)


def read(found: Mapping[str, Any]) -> KeyFile:
    """Checks every field. Raises ConfigError with the name of an invalid one."""
    _check_names("", found, ("slo_classes", "tenants"))
    classes = {
        name: _slo(f"slo_classes.{name[:64]}", given)
        for name, given in _object("slo_classes", found.get("slo_classes", {})).items()
    }
    given = _object("tenants", found.get("tenants", {}))
    if len(given) > MAX_TENANTS:
        raise ConfigError("tenants", f"{len(given)} tenants", f"at most {MAX_TENANTS}")
    tenants: dict[str, Tenant] = {}
    keys: dict[bytes, Tenant] = {}
    for name, one in given.items():
        check_tenant_name(name)
        where = f"tenants.{name}"
        one = _object(where, one)
        tenants[name] = tenant = _tenant(name, where, one, classes)
        for digest in _hashes(where, one.get("keys", [])):
            if digest in keys:
                raise ConfigError(f"{where}.keys", f"{digest.hex()[:12]}… again", "each key once, for one tenant")
            keys[digest] = tenant
    if len(keys) > MAX_KEYS:
        raise ConfigError("tenants", f"{len(keys)} keys", f"at most {MAX_KEYS}")
    return KeyFile(MappingProxyType(tenants), MappingProxyType(keys))


def check_tenant_name(name: str) -> None:
    """Raises ConfigError."""
    if not TENANT_NAME.fullmatch(name) or name in RESERVED_NAMES:
        expected = (
            "1 to 64 letters, digits, dots, hyphens or underscores, beginning with a letter or digit, other than "
            + " and ".join(RESERVED_NAMES)
        )
        raise ConfigError("tenant", repr(name[:64]), expected)


# ----------------------------------------------------------------------------------------------------------------


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _tenant(name: str, where: str, given: Mapping[str, Any], classes: Mapping[str, Slo]) -> Tenant:
    _check_names(f"{where}.", given, _TENANT_FIELDS)
    numbers: dict[str, int] = {}
    for quota, (low, high) in _RANGES.items():
        if given.get(quota) is None:
            continue
        value = given[quota]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{where}.{quota}", repr(value)[:64], f"a whole number from {low} to {high}")
        numbers[quota] = value
    slo = given.get("slo")
    if slo is not None and (not isinstance(slo, str) or slo not in classes):
        raise ConfigError(f"{where}.slo", repr(slo)[:64], f"one of slo_classes: {', '.join(classes) or 'none'}")
    numbers.setdefault("max_priority", 0)
    return Tenant(name=name, slo=None if slo is None else classes[slo], **numbers)


def _hashes(where: str, given: Any) -> list[bytes]:
    if not isinstance(given, list):
        raise ConfigError(f"{where}.keys", "another value", "a list of objects with sha256")
    found = []
    for index, one in enumerate(given):
        at = f"{where}.keys[{index}]"
        _check_names(f"{at}.", _object(at, one), ("sha256", "created"))
        text = one.get("sha256")
        # The value is not in the message, because it may be the key itself.
        if not isinstance(text, str) or not _HASH.fullmatch(text):
            raise ConfigError(f"{at}.sha256", "another value", "64 hexadecimal digits; `pdserve keys new` makes them")
        if not isinstance(one.get("created", ""), str):
            raise ConfigError(f"{at}.created", "another value", "a date")
        found.append(bytes.fromhex(text))
    return found


def _slo(where: str, given: Any) -> Slo:
    names = [one.name for one in fields(Slo)]
    _check_names(f"{where}.", _object(where, given), names)
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{where}.{name}", repr(value)[:64], "a number of seconds")
    if missing := {"ttft_s", "tpot_s"} - given.keys():
        raise ConfigError(f"{where}.{min(missing)}", "nothing", "a number of seconds")
    try:
        return Slo(**given)
    except InvalidRequest as error:
        raise ConfigError(f"{where}.{error.field.removeprefix('slo.')}", error.seen, error.expected) from None


def _object(where: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(where, "another value", "a JSON object")
    return found


def _check_names(prefix: str, found: Mapping[str, Any], known: Collection[str]) -> None:
    for name in found:
        if name not in known:
            raise ConfigError(f"{prefix}{name[:64]}", "an unknown field", f"one of {', '.join(known)}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated[:64]!r} twice")
    return found
