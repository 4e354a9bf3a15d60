"""Certificate files that change: good ones are used, bad ones are reported, and the earlier ones stay."""

from __future__ import annotations

import datetime
import logging
import os
import ssl
from pathlib import Path

import pytest

from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.tls import certificates
from pdserve.tls.authority import Authority, hosts_of, write_private
from pdserve.tls.certificates import TRY_AGAIN_S, Certificates, ReloadingCertificates, TlsFiles
from tests.support.tls_files import TestAuthority

MINUTE = datetime.timedelta(minutes=1)


@pytest.fixture
def ours(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


def read(files: TlsFiles) -> ReloadingCertificates:
    return ReloadingCertificates(files, is_mutual=True)


def test_unchanged_files_are_read_once(ours: TestAuthority) -> None:
    tls = ours.tls("one")
    assert tls.current() is tls.current()


def test_new_files_are_used(ours: TestAuthority) -> None:
    tls = ours.tls("one")
    before = tls.current()
    ours.files("one")
    assert tls.current().cert != before.cert
    assert tls.current() is tls.current()


def test_a_partial_change_keeps_the_earlier_files(ours: TestAuthority, caplog: pytest.LogCaptureFixture) -> None:
    tls = ours.tls("one")
    before = tls.current()
    cert, key = ours.authority.issue("one", ["127.0.0.1"])
    write_private(Path(tls.files.cert), cert)
    with caplog.at_level(logging.ERROR):
        assert tls.current() is before
        assert tls.current() is before
    [told] = caplog.records
    assert "key values mismatch" in told.why  # type: ignore[attr-defined]
    write_private(Path(tls.files.key), key)
    assert (tls.current().cert, tls.current().key) == (cert, key)


@pytest.mark.parametrize("content", [b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_broken_file_keeps_the_earlier_ones(ours: TestAuthority, name: str, content: bytes) -> None:
    tls = ours.tls("one")
    before = tls.current()
    write_private(Path(getattr(tls.files, name)), content)
    assert tls.current() is before


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_a_missing_file_keeps_the_earlier_ones(
    ours: TestAuthority, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ours.tls("one")
    before = tls.current()
    os.unlink(getattr(tls.files, name))
    assert tls.current() is before
    assert f"tls_{name}: got {getattr(tls.files, name)}" in caplog.records[-1].why  # type: ignore[attr-defined]
    ours.files("one")
    assert tls.current() is not before


def test_a_certificate_that_the_ca_does_not_accept_is_not_used(ours: TestAuthority, tmp_path: Path) -> None:
    tls = ours.tls("one")
    before = tls.current()
    for file, data in zip(("cert", "key"), Authority("other").issue("one", ["127.0.0.1"]), strict=True):
        write_private(Path(getattr(tls.files, file)), data)
    assert tls.current() is before
    ours.files("one", valid=-MINUTE)  # a right one that has expired
    assert tls.current() is before
    ours.files("one")
    assert tls.current() is not before


def test_a_certificate_that_is_not_valid_yet_is_used_later(
    ours: TestAuthority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, opened, is_valid = 0.0, 0, False

    def greet_itself(found: Certificates) -> None:
        nonlocal opened
        opened += 1
        if not is_valid:
            raise ssl.SSLError(1, "certificate is not yet valid")

    tls = ReloadingCertificates(ours.files("one"), is_mutual=True, clock=lambda: now_s)
    before = tls.current()
    monkeypatch.setattr(certificates, "_greet_itself", greet_itself)
    ours.files("one")
    for _ in range(3):
        assert tls.current() is before
    assert opened == 1, "not for every connection"
    now_s = TRY_AGAIN_S
    assert tls.current() is before
    assert (opened, len(caplog.records)) == (2, 1), "reported once"
    now_s, is_valid = 2 * TRY_AGAIN_S, True
    assert tls.current() is not before
    now_s = 9 * TRY_AGAIN_S
    assert tls.current() is tls.current()
    assert opened == 3


def test_a_change_that_keeps_the_time_and_size_is_noticed(ours: TestAuthority) -> None:
    tls = ours.tls("one")
    before = tls.current()
    path = Path(tls.files.ca)
    facts = path.stat()
    path.write_bytes(path.read_bytes())  # in place
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert tls.current() is not before


def test_an_expired_certificate_does_not_start(ours: TestAuthority) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert: got .*tls.crt, expected .* \(certificate has expired\)"):
        read(ours.files("one", valid=-MINUTE))


def test_an_encrypted_key_is_an_error(ours: TestAuthority) -> None:
    from cryptography.hazmat.primitives import serialization

    files = ours.files("one")
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    write_private(Path(files.key), pem)
    with pytest.raises(ConfigError, match="tls_cert: got"):
        read(files)


def test_an_oversized_file_is_not_read(ours: TestAuthority) -> None:
    files = ours.files("one")
    write_private(Path(files.ca), b"x" * (2**20 + 1))
    with pytest.raises(ConfigError, match="a file of at most"):
        read(files)


def test_keys_can_be_read_by_their_owner_only(ours: TestAuthority) -> None:
    files = ours.files("one")
    assert os.stat(files.key).st_mode & 0o777 == 0o600
    assert os.stat(Path(files.key).parent).st_mode & 0o777 == 0o700


def test_a_certificate_names_its_hosts(ours: TestAuthority) -> None:
    cert, _ = ours.authority.issue("one", ["a.example", "10.0.0.1", "::1"])
    assert hosts_of(cert) == ["a.example", "10.0.0.1", "::1"]
    with pytest.raises(ValueError, match="PEM"):
        hosts_of(b"nothing")


def test_generated_files_satisfy_strict_verifiers(ours: TestAuthority) -> None:
    files = ours.files("one")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    client = ssl.create_default_context(cafile=files.ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (near, far, near, far):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert near.getpeercert()


WORKER = {"model": "toy", "worker_id": "p0"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": "c"}, "tls_key"),
        ({"tls_key": "k"}, "tls_cert"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_ca"),
        ({"tls_ca": "a"}, "tls_cert"),
        ({"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "inject_faults": "seed=1"}, "inject_faults"),
    ],
)
def test_a_worker_has_all_files_or_none(settings: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        WorkerConfig(**WORKER, **settings)
    assert raised.value.field == field


def test_a_client_ca_needs_a_certificate() -> None:
    with pytest.raises(ConfigError, match="tls_client_ca: got a, expected tls_cert"):
        RouterConfig(model="toy", tls_client_ca="a")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "worker.example", ""])
def test_plain_text_beyond_loopback_names_both_options(host: str) -> None:
    certificate = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    for kind, settings in (
        (WorkerConfig, WORKER),
        (RouterConfig, {"model": "toy", "token": "t"}),
        (GatewayConfig, {"router": "127.0.0.1:1"}),
    ):
        with pytest.raises(ConfigError, match=r"host: .*`pdserve up --tls auto` or `--tls DIR`.*--insecure"):
            kind(**settings, host=host)
        assert kind(**settings, host=host, insecure=True).host == host
        assert kind(**settings, host=host, **certificate).host == host


def test_an_open_port_without_a_token_names_its_variable_and_flag() -> None:
    with pytest.raises(ConfigError, match=r"host: got 0\.0\.0\.0, .*PDSERVE_TOKEN.*--key-file"):
        RouterConfig(model="toy", host="0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_may_be_plain_text(host: str) -> None:
    assert WorkerConfig(**WORKER, host=host).host == host
    assert RouterConfig(model="toy", host=host).host == host
