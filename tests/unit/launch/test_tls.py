"""The TLS files that `up` gives to processes, and how commands find the CA."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

from pdserve.config import RouterConfig
from pdserve.core.access.hosts import local_host
from pdserve.core.errors import ConfigError
from pdserve.launch import settings
from pdserve.launch.confine import certified_hosts, make_certificates, of_operator
from pdserve.launch.local import tls_to
from pdserve.launch.spec import ClusterSpec, ClusterTls, gateway, gateway_config, processes
from pdserve.owned_folder import OwnedFolder
from pdserve.tls.authority import hosts_of
from pdserve.tls.certificates import PURPOSE, announce, certificates_of, local_ca
from tests.support.tls_files import TestAuthority

SECRET = "a secret of this test"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def spec(**changes: object) -> ClusterSpec:
    return ClusterSpec(model="toy", http=0, cluster_secret=SECRET, **changes)  # type: ignore[arg-type]


def test_each_process_has_a_certificate_of_its_own(temporary: Path) -> None:
    asked = spec(
        http_process=True,
        tls=ClusterTls.asked("auto", ""),
        host="192.0.2.9",
        settings={"router": {"token": "t"}},
    )
    made, folder = make_certificates(asked)
    assert folder is not None
    http = gateway(made, "192.0.2.9:1")
    assert http is not None
    configs = [one.config for one in (*processes(made), http)]
    assert len({config.tls_cert for config in configs}) == len(configs) == 4
    for config in configs:
        tls = certificates_of(config, is_mutual=True)
        assert tls is not None
        assert {"127.0.0.1", "localhost", "::1", "192.0.2.9"} <= set(hosts_of(tls.current().cert))
    folder.remove()


def test_an_operators_certificate_serves_all_processes(tmp_path: Path) -> None:
    folder = Path(TestAuthority(tmp_path).files("all", ("*.serving.example", "other.example")).cert).parent
    tls = of_operator(str(folder), "/callers.pem")
    assert tls.peer_name == "pdserve.serving.example", "a name for processes that call each other on loopback"
    *workers, router = (one.config for one in processes(spec(tls=tls)))
    assert {one.tls_cert for one in (*workers, router)} == {str(folder / "tls.crt")}
    assert isinstance(router, RouterConfig)
    assert router.tls_client_ca == "/callers.pem"
    assert not hasattr(workers[0], "tls_client_ca")
    client = tls_to(dataclasses.replace(router, tls_client_ca=""))
    assert client is not None
    assert client.server_name == "pdserve.serving.example"


def test_a_certificate_for_loopback_needs_no_other_name(tmp_path: Path) -> None:
    folder = Path(TestAuthority(tmp_path).files("all").cert).parent
    assert of_operator(str(folder), "").peer_name == ""


def test_a_table_gives_a_process_another_certificate() -> None:
    given = {"gateway": {"tls_cert": "public.crt", "tls_key": "public.key"}}
    http = gateway_config(spec(tls=ClusterTls(folder="/certs"), settings=given))
    assert http is not None
    assert (http.tls_cert, http.tls_ca) == ("public.crt", "/certs/ca.crt")
    assert (http.router_cert, http.router_key) == ("/certs/tls.crt", "/certs/tls.key")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tls=auto", "ray=1.2.3.4:6379"], "tls: got auto, expected a folder with certificates that is on every host"),
        (["tls=/nowhere"], "tls: got /nowhere, expected auto, or a folder with tls.crt, tls.key and ca.crt"),
        (["tls_client_ca=/a.pem"], "tls_client_ca: got /a.pem, expected tls beside it"),
    ],
)
def test_invalid_tls_settings_are_rejected_before_the_start(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.read({"model": "toy"}, None, words)


def test_tls_allows_a_host_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "t")
    asked = settings.read({"model": "toy", "tls": "auto", "host": "0.0.0.0"}, None, []).spec
    assert asked.tls is not None
    assert asked.tls.is_made_here
    assert settings.read({"model": "toy", "insecure": True, "host": "0.0.0.0"}, None, []).spec.tls is None


@pytest.mark.parametrize(
    ("host", "own"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.9", "192.0.2.9"), ("127.0.0.1", "127.0.0.1")]
)
def test_commands_call_the_listening_address(host: str, own: str) -> None:
    assert local_host(host) == own


def test_wildcard_addresses_are_not_certificate_names() -> None:
    assert "0.0.0.0" not in certified_hosts("0.0.0.0")


def test_the_ca_is_found_by_the_port(temporary: Path) -> None:
    folder = OwnedFolder.make(PURPOSE)
    announce(folder.path, (50051, 8000))
    assert local_ca("50051") == local_ca("8000") == str(folder.path / "ca.crt")
    assert local_ca("50052") == local_ca("") == local_ca("../50051") == ""
    folder.remove()
    assert local_ca("50051") == ""


def test_a_folder_writable_by_others_is_not_trusted(temporary: Path) -> None:
    folder = OwnedFolder.make(PURPOSE)
    announce(folder.path, (50051,))
    os.chmod(folder.path, 0o770)
    assert local_ca("50051") == ""
    os.chmod(folder.path, 0o700)
    (temporary / "pdserve-run-tls-link").symlink_to(folder.path)
    assert local_ca("50051") == str(folder.path / "ca.crt"), "and no link to it"
    folder.remove()
