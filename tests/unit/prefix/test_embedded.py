import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from pdserve.core.errors import ConfigError
from pdserve.prefix.embedded import EmbeddedRedis


def test_embedded_redis_listens_on_loopback_and_stores_nothing() -> None:
    with EmbeddedRedis.start() as server, redis.Redis.from_url(server.url) as client:
        assert client.set("key", "value")
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert client.config_get("save")["save"] == ""
        assert server.is_alive
    assert not psutil.pid_exists(server.pid)


def test_a_unix_socket_is_open_to_its_user_only() -> None:
    with EmbeddedRedis.start(is_unix=True) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        path = server.url.removeprefix("unix://")
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
        assert client.config_get("port")["port"] == "0"
    assert not os.path.exists(os.path.dirname(path))


def test_strangers_are_rejected() -> None:
    with EmbeddedRedis.start() as server:
        for url in (f"redis://127.0.0.1:{server.port}/0", f"redis://:wrong@127.0.0.1:{server.port}/0"):
            with redis.Redis.from_url(url) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
                stranger.sadd("{pd:default}:workers", "d9")
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_password_is_not_in_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "secret-of-callers")
    with EmbeddedRedis.start() as server:
        shown = b"".join(Path(f"/proc/{server.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    assert server.password.encode() not in shown
    assert b"secret-of-callers" not in shown


def test_passwords_differ_unless_given() -> None:
    with EmbeddedRedis.start() as one, EmbeddedRedis.start() as other, EmbeddedRedis.start(password="same") as third:
        assert one.password != other.password
        assert len(one.password) == 64
        assert third.url == f"redis://:same@127.0.0.1:{third.port}/0"


def test_a_taken_port_is_a_config_error() -> None:
    with EmbeddedRedis.start() as server, pytest.raises(ConfigError, match=r"redis port: got \d+ \(port in use\)"):
        EmbeddedRedis.start(port=server.port)


def test_embedded_redis_restarts_on_its_port() -> None:
    with EmbeddedRedis.start() as server:
        server.kill()
        assert not server.is_alive
        with EmbeddedRedis.start(port=server.port) as again, redis.Redis.from_url(again.url) as client:
            assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_embedded_redis_ends_with_a_killed_parent(tmp_path: Path) -> None:
    code = "from pdserve.prefix.embedded import EmbeddedRedis as E; print(E.start().pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    try:
        server_pid = int(parent.stdout.readline())
        assert psutil.pid_exists(server_pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end_s = time.monotonic() + 5.0
    while psutil.pid_exists(server_pid) and psutil.Process(server_pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the server outlived its parent"
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
