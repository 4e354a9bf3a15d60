"""A real cluster as a user starts it: `python -m pdserve up`, found by its ready line, ended by SIGTERM.

Processes are found by the ports that they listen on, so that the same tests drive plain processes and Ray actors.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path
from types import TracebackType

from pdserve import Client

ROOT = Path(__file__).parents[2]
READY = re.compile(r"\bready\b.*?127\.0\.0\.1:(\d+)")
REDIS = re.compile(r"redis 127\.0\.0\.1:(\d+)")


class Cluster:
    """`pdserve up` with these flags. Use as a context manager; `client` speaks to its router."""

    def __init__(self, *flags: str, start_s: float = 90.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", "--port", "0", *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.stderr: deque[str] = deque(maxlen=2000)
        self._ready = threading.Event()
        self._line = ""
        for stream, keep in ((self.process.stderr, self.stderr.append), (self.process.stdout, self._read_ready)):
            threading.Thread(target=_drain, args=(stream, keep), daemon=True).start()
        deadline = time.monotonic() + start_s
        while not self._ready.wait(0.1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"no ready line (exit {self.process.poll()}):\n{''.join(self.stderr)}")
        found = READY.search(self._line)
        assert found is not None, self._line
        self.port = int(found[1])
        redis = REDIS.search(self._line)
        self.redis_port = int(redis[1]) if redis else None
        self.target = f"127.0.0.1:{self.port}"
        self.client = Client(self.target)

    def _read_ready(self, line: str) -> None:
        if READY.search(line):
            self._line = line
            self._ready.set()

    def workers(self) -> list[str]:
        """Ids of the connected workers."""
        return [w.worker_id for w in self.client.topology().workers if w.is_connected]

    def pid_of(self, worker_id: str) -> int:
        for worker in self.client.topology().workers:
            if worker.worker_id == worker_id and worker.is_connected:
                return pid_listening_on(int(worker.endpoint.rpartition(":")[2]))
        raise AssertionError(f"{worker_id} is not connected")

    def kill(self, worker_id: str) -> int:
        pid = self.pid_of(worker_id)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_idle(self, within_s: float = 10.0) -> None:
        """All workers there, nothing running or waiting anywhere, and every block free or in a prefix cache."""
        deadline = time.monotonic() + within_s
        while True:
            topology = self.client.topology()
            idle = topology.running_requests == 0 and topology.queued_requests == 0
            idle = idle and all(
                w.is_connected and w.running == w.waiting == 0 and w.free_blocks + w.evictable_blocks == w.num_blocks
                for w in topology.workers
            )
            if idle:
                return
            assert time.monotonic() < deadline, f"not idle: {topology}\n{''.join(self.stderr)[-3000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(45)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
                raise AssertionError(f"up did not drain:\n{''.join(self.stderr)[-3000:]}") from None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            print("".join(self.stderr)[-6000:])
        self.stop()


def pid_listening_on(port: int) -> int:
    """The process that listens on 127.0.0.1:port, by /proc."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            part = line.split()
            if part[3] == "0A" and int(part[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{part[9]}]")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(fd) in inodes for fd in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue  # the process ended, or is not ours
    raise AssertionError(f"nobody listens on {port}")


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as found:
            first: int = found.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def scrape(port: int, metric: str) -> float:
    """The sum of a metric's samples at a Prometheus endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((metric + " ", metric + "{")))


def _drain(stream, keep) -> None:  # type: ignore[no-untyped-def]
    for line in stream:
        keep(line)
