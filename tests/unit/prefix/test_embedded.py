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
from pdserve.owned_folder import sweep
from pdserve.prefix.embedded import EmbeddedRedis


def test_it_is_open_to_its_user_only_and_stores_nothing() -> None:
    with EmbeddedRedis.start() as server, redis.Redis.from_url(server.url) as client:
        assert client.set("key", "value")
        assert client.config_get("save")["save"] == ""
        assert client.config_get("port")["port"] == "0"
        assert server.path.parent.stat().st_mode & 0o077 == 0
        assert server.is_alive
    assert not psutil.pid_exists(server.pid)
    assert not server.path.parent.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TOKEN", "secret-of-callers")
    with EmbeddedRedis.start() as server:
        shown = b"".join(Path(f"/proc/{server.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    assert b"secret-of-callers" not in shown


def test_a_path_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"redis socket: got .*, expected one that Redis can listen on: "):
        EmbeddedRedis.start(tmp_path / "absent" / "redis.sock")


def test_another_takes_the_place_of_a_killed_one() -> None:
    with EmbeddedRedis.start() as server:
        server.kill()
        assert not server.is_alive
        with EmbeddedRedis.start(server.path) as again, redis.Redis.from_url(again.url) as client:
            assert client.ping()
            assert again.url == server.url


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
    end_s = time.monotonic() + 60.0
    while psutil.pid_exists(server_pid) and psutil.Process(server_pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, "the server outlived its parent"
        time.sleep(0.01)
    sweep(tmp_path)  # as the next launcher does
    assert list(tmp_path.iterdir()) == []
