"""A cluster in a child process, for the demo, benchmarks and tests.

with Running.start("--model", "toy") as cluster:
    Client(cluster.target).generate("hi")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from pdserve.launch.child import StartFailed
from pdserve.launch.detached.link import KEEPER_SOCKET, look

READY_S: Final = 180.0
LATE_S: Final = 5.0  # by which stderr, which names the processes, may be read after the ready line on stdout
STOP_S: Final = 60.0
_POLL_S: Final = 0.02
_LOG: Final = re.compile(r"writes to (\S+); `pdserve down`")
_READY: Final = re.compile(r"^pdserve ready: grpc (\S+) (?:http (\S+) )?")
_STARTED: Final = re.compile(r"^ *\d+\.\d+ s  ([\w-]+) +pid (\d+) listens on (\S+)")


@final
class Running:
    """`pdserve up` with the given flags. Leaving the block ends it and its processes."""

    def __init__(self, process: subprocess.Popen[str], on_line: Callable[[str], None] | None) -> None:
        self.process = process
        self.ready_line = ""
        self.target = ""
        self.http_url = ""  # of the gateway, if there is one
        self.lines: list[str] = []  # of stderr
        self._on_line = on_line
        self._pids: dict[str, int] = {}
        self._addresses: dict[str, str] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="up-stderr", daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        *flags: str,
        timeout_s: float = READY_S,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Self:
        """Returns when the cluster is ready. Picks a free port unless `flags` name one. Raises StartFailed."""
        port = () if "--port" in flags else ("--port", "0")
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", *port, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        running = cls(process, on_line)
        try:
            running._wait_ready(timeout_s)
        except BaseException:
            running.kill()
            raise
        return running

    def pid(self, name: str) -> int:
        """Of the latest process of that name (p0, d0, router, router-1, redis). Raises KeyError if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._pids, LATE_S)
            return self._pids[name]

    def address(self, name: str) -> str:
        """Raises KeyError as `pid`."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._addresses, LATE_S)
            return self._addresses[name]

    def pids(self) -> dict[str, int]:
        with self._changed:
            return dict(self._pids)

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 60.0) -> int:
        """The new process's pid, once it listens. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._pids.get(name, old_pid) != old_pid, timeout_s):
                raise TimeoutError(f"{name} did not come back within {timeout_s:.0f} s")
            return self._pids[name]

    def wait_line(self, text: str, timeout_s: float = 60.0) -> str:
        """The first line on stderr that holds `text`. Raises TimeoutError."""

        def find() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._changed:
            if not self._changed.wait_for(lambda: find() is not None, timeout_s):
                raise TimeoutError(f"no line with {text!r} within {timeout_s:.0f} s")
            return find() or ""

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Drains; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._reader.join(5.0)
        return status

    def kill(self) -> None:
        """Kills the launcher immediately. The kernel then ends the cluster's processes."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()

    def _wait_ready(self, timeout_s: float) -> None:
        assert self.process.stdout is not None
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.daemon = True
        began_s = time.monotonic()
        timer.start()
        try:
            self.ready_line = _message(self.process.stdout.readline().rstrip("\n"))
        finally:
            timer.cancel()
        found = _READY.match(self.ready_line)
        if found is None:
            self.process.wait()
            self._reader.join(5.0)
            last = self.lines[-1] if self.lines else "it said nothing"
            raise StartFailed(f"no cluster after {time.monotonic() - began_s:.0f} s: {last}")
        self.target, self.http_url = found.group(1), found.group(2) or ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.rstrip("\n")
            found = _STARTED.match(line)
            with self._changed:
                self.lines.append(line)
                if found is not None:
                    self._pids[found.group(1)] = int(found.group(2))
                    self._addresses[found.group(1)] = found.group(3)
                self._changed.notify_all()
            if self._on_line is not None:
                self._on_line(line)


def _message(line: str) -> str:
    """The text of a line, which is a JSON object under --log-format json."""
    try:
        found = json.loads(line)
    except ValueError:
        return line
    return str(found.get("message", "")) if isinstance(found, dict) else line


@final
class RunningDetached:
    """`pdserve up --detach` with the given flags. Leaving the block ends it and its processes."""

    def __init__(self, env: Mapping[str, str], ready_line: str, log: Path) -> None:
        found = _READY.match(ready_line)
        assert found is not None
        self.target, self.http_url = found.group(1), found.group(2) or ""
        self.ready_line, self.log = ready_line, log
        self._env = env
        self._port = self.target.rpartition(":")[2]

    @classmethod
    def start(cls, *flags: str, env: Mapping[str, str] | None = None) -> Self:
        """Returns when the cluster is ready. Picks a free port unless `flags` name one. Raises StartFailed."""
        port = () if "--port" in flags else ("--port", "0")
        environ = {**os.environ, **(env or {})}
        done = _command("up", "--detach", *port, *flags, env=environ)
        found = _LOG.search(done.stderr)
        if done.returncode != 0 or found is None:
            raise StartFailed(f"`up --detach` has ended with status {done.returncode}: {done.stderr[-1000:]}")
        return cls(environ, done.stdout.strip(), Path(found.group(1)))

    def adopt(self) -> str:
        """Replaces its launcher. Returns what the command writes to stderr. Raises StartFailed."""
        done = _command("adopt", "--port", self._port, env=self._env)
        if done.returncode != 0:
            raise StartFailed(f"`adopt` has ended with status {done.returncode}: {done.stderr[-1000:]}")
        return done.stderr

    def launcher_pid(self) -> int:
        """0: it has none."""
        return asyncio.run(look(self.log.parent / KEEPER_SOCKET)).launcher_pid

    def kill_launcher(self) -> None:
        """Returns when the keeper has noticed it."""
        os.kill(self.launcher_pid(), signal.SIGKILL)
        while self.launcher_pid():
            time.sleep(_POLL_S)

    def pids(self) -> dict[str, int]:
        """Of the processes, by name."""
        return dict(asyncio.run(look(self.log.parent / KEEPER_SOCKET)).pids)

    def down(self) -> None:
        """Idempotent. Raises StartFailed."""
        if self.log.exists() and (done := _command("down", "--port", self._port, env=self._env)).returncode != 0:
            raise StartFailed(f"`down` has ended with status {done.returncode}: {done.stderr[-1000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()


def _command(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A process that it leaves behind keeps stderr open, so that is a file."""
    with tempfile.TemporaryFile("w+") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=env,
            timeout=READY_S,
        )
        stderr.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, stderr.read())
