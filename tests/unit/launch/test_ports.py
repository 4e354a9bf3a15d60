"""Ports that the launcher keeps bound, and the claims of launchers on ports that they will use."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attacks.host import take_port
from pdserve.config import GatewayConfig
from pdserve.core.access.hosts import join
from pdserve.core.errors import ConfigError
from pdserve.gateway.server import GatewayHost
from pdserve.launch import ports
from pdserve.launch.local import with_ports
from pdserve.launch.ports import HeldPorts, claim, free_ports, user_of_port, with_user_of_port
from pdserve.launch.spec import ClusterSpec
from pdserve.listening import HELD_ENV, PortInUse, bind_error
from pdserve.owned_folder import OwnedFolder, sweep
from pdserve.telemetry.metrics import MetricsServer
from pdserve.testing import Cluster
from tests.support.tls_files import TestAuthority

WAIT_S = 60.0


@pytest.fixture
def held() -> Iterator[HeldPorts]:
    held = HeldPorts()
    yield held
    held.release()


def bind(host: str, port: int, *, reuse_address: int = 0) -> None:
    """Binds and listens, then closes. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse_address)
        one.bind((host, port))
        one.listen()


@contextlib.contextmanager
def listening(host: str) -> Iterator[int]:
    [port] = free_ports(1, ("127.0.0.1", "::1"))  # the kernel's choice may be in use on the other address
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        yield port


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as a second user, which only root can become")


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::"])
def test_another_user_cannot_bind_a_held_port(held: HeldPorts, host: str) -> None:
    [port] = free_ports(1)
    held.hold("port", host, port)
    with take_port(port) as stranger:
        tried, _ = stranger.communicate("", timeout=WAIT_S)
    assert list(json.loads(tried)) == ["EADDRINUSE"]


def test_the_user_of_a_port_is_named() -> None:
    def words(port: int) -> str:
        return with_user_of_port(PortInUse("port", "127.0.0.1", port), "127.0.0.1", port).message

    with Cluster(prefill=0) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        assert words(port).endswith("another pdserve cluster serves there (`pdserve topology`)")
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert words(held.getsockname()[1]).endswith("--port, for gRPC, sets it; another program listens there")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert words(held.getsockname()[1]).endswith("; try again")


@pytest.mark.parametrize("is_tls", [False, True])
def test_the_http_port_of_another_cluster_is_named(tmp_path: Path, *, is_tls: bool) -> None:
    settings = TestAuthority(tmp_path).settings("gateway") if is_tls else {}
    host = GatewayHost(GatewayConfig(router="127.0.0.1:1", port=0, **settings))
    port = int(host.start().rpartition(":")[2])
    try:
        said = user_of_port("127.0.0.1", port)
    finally:
        host.stop()
    assert said == "another pdserve cluster serves HTTP there (its live view has the path /ui)"


def test_a_page_that_never_ends_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends a byte at a time."""
    monkeypatch.setattr(ports, "_ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    with one, contextlib.suppress(OSError):
                        while one.recv(1):
                            one.sendall(b"x")

        threading.Thread(target=drip, daemon=True).start()
        assert user_of_port("127.0.0.1", server.getsockname()[1]) == "another program listens there"


def test_a_held_port_takes_no_connection(held: HeldPorts) -> None:
    [port] = free_ports(1)
    held.hold("port", "127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), WAIT_S)


def test_every_connection_reaches_the_server_beside_it(held: HeldPorts, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    held.hold("port", "127.0.0.1", port)
    monkeypatch.setenv(HELD_ENV, f"1,{port}")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", port))
        server.listen(64)
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.getpeername() == client.getsockname()


def test_only_a_process_of_the_launcher_listens_beside_it(held: HeldPorts, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    held.hold("port", "127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        MetricsServer("127.0.0.1", port, lambda *_: [], None)
    assert bind_error("port", "127.0.0.1", port) is not None
    monkeypatch.setenv(HELD_ENV, str(port))
    MetricsServer("127.0.0.1", port, lambda *_: [], None).close()


def test_a_second_launcher_of_the_same_user_is_refused(held: HeldPorts) -> None:
    [port] = free_ports(1)
    held.hold("port", "127.0.0.1", port)
    with pytest.raises(ConfigError, match=f"port: got {port}"):
        HeldPorts().hold("port", "127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "other", "clients"),
    [("127.0.0.1", "::1", "`localhost`"), ("::1", "127.0.0.1", "`localhost`"), ("0.0.0.0", "::1", "0.0.0.0")],
)
def test_another_address_in_use_is_refused_with_the_reason(
    held: HeldPorts, host: str, other: str, clients: str
) -> None:
    """A client of `localhost` may reach either loopback address."""
    with listening(other) as port:
        where = rf"{port} \(in use on {re.escape(join(other, port))}\)"
        why = f"a port that is free there too, because clients of {clients} may reach that program"
        with pytest.raises(ConfigError, match=f"port: got {where}, expected {why}"):
            held.hold("port", host, port)
        assert not ports.is_free(host, port)
    assert held.ports == ()


@pytest.mark.parametrize(("hosts", "other"), [(["127.0.0.1"], "::1"), (["127.0.0.1", "127.0.0.2"], "127.0.0.2")])
def test_a_chosen_port_can_be_held_on_all_its_addresses(
    held: HeldPorts, monkeypatch: pytest.MonkeyPatch, hosts: list[str], other: str
) -> None:
    [free] = free_ports(1)
    with listening(other) as taken:
        monkeypatch.setattr(ports.random, "sample", lambda *_: [free, taken])
        assert free_ports(1, hosts) == (free,)
    for host in hosts:
        held.hold("port", host, free)
        held.release()


def test_a_host_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"host: got 192\.0\.2\.1, expected an address of this machine"):
        free_ports(1, ["192.0.2.1"])


def test_a_port_of_an_ended_server_can_be_held(held: HeldPorts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), WAIT_S)
        accepted, _ = server.accept()
        accepted.close()  # first, so that this side waits in TIME_WAIT
        client.close()
    held.hold("port", "127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port, reuse_address=1)


def test_a_killed_launcher_leaves_no_port_bound() -> None:
    code = (
        "from pdserve.launch.ports import HeldPorts, free_ports\n"
        "[port] = free_ports(1)\n"
        "held = HeldPorts()\n"
        "held.hold('port', '0.0.0.0', port)\n"
        "print(port, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", port)
        assert not claim(port)
        other.kill()
        other.wait(WAIT_S)
    bind("127.0.0.1", port)
    assert claim(port)
    assert claim(port), "one's own"


def test_squatted_names_stop_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Abstract names and those in /tmp have no owner, so any user can take them."""
    with contextlib.ExitStack() as squatted:
        for port in range(20_000, 20_500):
            one = squatted.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # another process has it already
                one.bind(f"\0pdserve.port.{port}")
        code = "from pdserve.launch import ports; print(all(map(ports.claim, range(20_000, 20_500))))"
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "True\n"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "no folder"])
def test_an_unusable_file_of_claims_stops_nobody(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "pdserve"
    if kind == "no folder":
        folder.write_text("")
    else:
        folder.mkdir()
        file = folder / "ports.lock"
        {"link": lambda: file.symlink_to(tmp_path / "victim"), "pipe": lambda: os.mkfifo(file), "folder": file.mkdir}[
            kind
        ]()
    code = "from pdserve.launch.ports import free_ports; print(len(free_ports(3)))"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env) == "3\n"
    assert not (tmp_path / "victim").exists()


def test_a_file_system_without_locks_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(ports.fcntl, "lockf", refuse)
    monkeypatch.setattr(ports.fcntl, "flock", refuse)
    assert free_ports(1)
    folder = OwnedFolder.make("test")
    assert folder.path not in sweep()
    folder.remove()


def test_a_kernel_that_shares_no_port_after_its_bind_gets_none_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_can_share", lambda held: False)
    [port] = free_ports(1)
    held = HeldPorts()
    held.hold("port", "127.0.0.1", port)
    assert held.ports == ()
    assert ports.is_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match="routers: got 2, expected 1: this system lets no two processes listen"):
        with_ports(ClusterSpec(model="toy", port=0, routers=2), held)
    assert held.ports == ()
