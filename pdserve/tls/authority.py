"""A CA for one cluster, and certificates from it. Needs the package cryptography."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.core.setting import CA, CERT, KEY

VALID: Final = datetime.timedelta(days=825)
_EARLY: Final = datetime.timedelta(hours=1)  # hosts' clocks differ
_MAX_NAME: Final = 64  # characters of a common name


@final
class Authority:
    """Its key exists only in memory, so that no process but this one, and one that it tells the key, can make a
    certificate."""

    def __init__(
        self,
        name: str,
        *,
        now: datetime.datetime | None = None,
        valid: datetime.timedelta = VALID,
        secret: str = "",
    ) -> None:
        """`secret`: of the authority that this one continues."""
        self._now = now or datetime.datetime.now(datetime.UTC)
        self._valid = valid
        if secret:
            self._key, self._cert = _from_pem(secret.encode())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        self._cert = (
            self._builder(subject, subject, self._key.public_key(), valid)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(is_ca=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._cert.public_bytes(serialization.Encoding.PEM)

    @property
    def secret(self) -> str:
        """With it, another process can make certificates of this authority."""
        return (_private_pem(self._key) + self.pem).decode()

    def issue(self, name: str, hosts: Sequence[str], *, valid: datetime.timedelta | None = None) -> tuple[bytes, bytes]:
        """Certificate and key, PEM, for a server at `hosts` (names or addresses) that is a client, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = (
            self._builder(_name(name), self._cert.subject, key.public_key(), self._valid if valid is None else valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_ca=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return cert.public_bytes(serialization.Encoding.PEM), _private_pem(key)

    def write(self, folder: Path, name: str, hosts: Sequence[str], *, valid: datetime.timedelta | None = None) -> None:
        """Writes CERT, KEY and CA into `folder`, and replaces earlier ones. Only the owner can read the key."""
        cert, key = self.issue(name, hosts, valid=valid)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, data in ((CA, self.pem), (KEY, key), (CERT, cert)):
            write_private(folder / file, data)

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(self._now, self._now + valid) - _EARLY)
            .not_valid_after(self._now + valid)
        )


def write_private(path: Path, data: bytes) -> None:
    """Replaces the file at once, so that a reader sees the old or the new content. Mode 0600."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    draft.replace(path)


def hosts_of(pem: bytes) -> list[str]:
    """The names and addresses in the first certificate of a PEM file. Raises ValueError."""
    cert = x509.load_pem_x509_certificates(pem)[0]
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _from_pem(secret: bytes) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Raises ValueError."""
    key = serialization.load_pem_private_key(secret, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")
    return key, x509.load_pem_x509_certificate(secret)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_NAME])])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
