"""A Ray that we start is limited to this host and user. For a foreign one, we warn about open ports."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.launch import confine
from pdserve.launch.ports import ListeningSocket, _endpoint, listeners
from pdserve.tls.authority import hosts_of


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return {"RAY_AUTH_TOKEN": "of another cluster", "RAY_TLS_SERVER_KEY": "of another cluster"}


def test_a_redis_in_a_folder_that_workers_cannot_enter_is_named(tmp_path: Path) -> None:
    confine.check_redis_socket(f"unix://{tmp_path}/redis.sock")
    confine.check_redis_socket("redis://:pa55@127.0.0.1:1/0")
    with pytest.raises(ConfigError, match=r"redis: got unix:///nowhere/redis\.sock, expected a URL that Ray"):
        confine.check_redis_socket("unix:///nowhere/redis.sock")


def test_an_own_ray_reads_its_token_and_keys_from_private_files(environ: dict[str, str]) -> None:
    folder = confine.confine(environ)
    try:
        token = Path(environ["RAY_AUTH_TOKEN_PATH"])
        assert token.parent == folder.path
        assert token.stat().st_mode & 0o777 == 0o600
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert len(token.read_text()) == 64
        assert environ["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in environ
        assert environ["RAY_USE_TLS"] == "1"
        for name, mode in (("SERVER_KEY", 0o600), ("SERVER_CERT", 0o600), ("CA_CERT", 0o600)):
            file = Path(environ[f"RAY_TLS_{name}"])
            assert folder.path in file.parents
            assert file.stat().st_mode & 0o777 == mode
        assert "127.0.0.1" in hosts_of(Path(environ["RAY_TLS_SERVER_CERT"]).read_bytes())
        longest = f"{confine.temp_dir(folder)}/session_2026-11-22_11-26-14_524951_4194304/sockets/plasma_store"
        assert len(longest) < 107
    finally:
        folder.remove()


def test_a_foreign_ray_is_sent_a_token_if_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for environ, mode in (
        ({"RAY_AUTH_TOKEN": "t"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "/t"}, "token"),
        ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}, "disabled"),
        ({}, None),
    ):
        confine.join(environ)
        assert environ.get("RAY_AUTH_MODE") == mode


@pytest.mark.parametrize(
    ("mode", "ports", "is_own", "said"),
    [
        ("token", [], True, []),
        ("token", ["raylet on 10.0.0.1:6380"], False, ["raylet on 10.0.0.1:6380"]),
        ("disabled", [], True, ["Ray requires no token (RAY_AUTH_MODE is disabled)"]),
        (None, ["raylet on 10.0.0.1:1"], False, ["raylet on 10.0.0.1:1", "RAY_AUTH_MODE is unset"]),
        (None, [], False, []),
    ],
)
def test_warnings_name_what_is_open(mode: str | None, ports: list[str], is_own: bool, said: list[str]) -> None:
    environ = {} if mode is None else {"RAY_AUTH_MODE": mode}
    found = confine.warnings(environ, ports, is_own=is_own)
    assert len(found) == len(said)
    assert all(words in warning and warning.startswith("WARNING") for words, warning in zip(said, found, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_listeners_are_found_by_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [one] = [one for one in listeners([os.getpid()]) if one.port == port]
    assert (one.pid, one.address, one.is_on_loopback) == (os.getpid(), "127.0.0.1", True)
    assert not [one for one in listeners([os.getpid()]) if one.port == port]


@pytest.mark.skipif(sys.byteorder != "little", reason="the text is of a little-endian machine")
@pytest.mark.parametrize(
    ("text", "address", "is_on_loopback"),
    [
        ("0100007F:1F90", "127.0.0.1", True),
        ("00000000:1F90", "0.0.0.0", False),
        ("00000000000000000000000000000000:1F90", "::", False),
        ("00000000000000000000000001000000:1F90", "::1", True),
        ("0000000000000000FFFF00000100007F:1F90", "::ffff:127.0.0.1", True),
        ("0000000000000000FFFF00000100000A:1F90", "::ffff:10.0.0.1", False),
    ],
)
def test_addresses_as_the_kernel_prints_them(text: str, address: str, is_on_loopback: bool) -> None:
    found, port = _endpoint(text)
    assert port == 8080
    one = ListeningSocket("raylet", 1, found, port)
    assert one.is_on_loopback is is_on_loopback
    if not address.startswith("::ffff"):
        assert found == address


def test_the_state_of_ray_can_be_asked() -> None:
    environ = {"PATH": "/bin", "RAY_AUTH_TOKEN": "hidden", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/a b/t"}
    assert confine.status_command(environ, "127.0.0.1:1", Path("/e/bin/python")) == (
        "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH='/a b/t' /e/bin/ray status --address 127.0.0.1:1"
    )
    assert confine.status_command({}, "h:2", Path("/e/bin/python")) == "/e/bin/ray status --address h:2"
