"""A real cluster as a user starts it: `python -m pdserve up`, ended by SIGTERM.

Processes are found by the ports that they listen on, so that the same tests drive plain processes and Ray actors.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from pdserve import Client
from pdserve.launch import ports
from pdserve.launch.running import Running

# A crowded machine computes a prompt slowly, and the router then rejects what would be late. Tests that are not about
# targets must not depend on that.
PATIENT = ("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20")


class Cluster:
    """`pdserve up` with these flags, after PATIENT ones. Use as a context manager; `client` speaks to its router."""

    def __init__(self, *flags: str, start_s: float = 180.0, env: Mapping[str, str] | None = None) -> None:
        self.running = Running.start(*PATIENT, *flags, timeout_s=start_s, env={"OMP_NUM_THREADS": "1", **(env or {})})
        self.process = self.running.process
        self.target = self.running.target
        self.port = int(self.target.rpartition(":")[2])
        self.client = Client(self.target)
        self.num_workers = sum(map(int, re.findall(r"(\d+) (?:prefill|decode)", self.running.ready_line)))

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

    def decode_worker_of(self, request_id: str) -> str:
        """Where the router placed the request. Workers' own reports come later."""
        chosen = self.client.explain(request_id).chosen
        assert chosen is not None, f"{request_id} is not placed"
        return chosen.decode_worker

    def wait_until_idle(self, within_s: float = 60.0) -> None:
        """Like `rest`; an error contains the last lines of the cluster's log."""
        try:
            rest(self.client, self.num_workers, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._last_lines(30)}") from None

    def stop(self) -> None:
        self.client.close()
        try:
            self.running.stop(60.0)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"up did not drain:\n{self._last_lines(30)}") from None

    def _last_lines(self, count: int) -> str:
        return "\n".join(self.running.lines[-count:])

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            print(self._last_lines(60))
        self.stop()


def rest(client: Client, num_workers: int, within_s: float) -> None:
    """Waits until that many workers are connected, no request runs or waits, and each block is free or cached."""
    deadline = time.monotonic() + within_s
    while True:
        topology = client.topology()
        idle = topology.running_requests == 0 and topology.queued_requests == 0
        idle = idle and len(topology.workers) == num_workers
        idle = idle and all(
            w.is_connected and w.running == w.waiting == 0 and w.free_blocks + w.evictable_blocks == w.num_blocks
            for w in topology.workers
        )
        if idle:
            return
        assert time.monotonic() < deadline, f"not idle: {topology}"
        time.sleep(0.05)


def pid_listening_on(port: int) -> int:
    """The process that listens on 127.0.0.1:port, found in /proc."""
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
    """The first of `count` consecutive free ports, below those that outgoing connections use."""
    while True:
        [first] = ports.free_ports(1)
        if all(ports.is_free("127.0.0.1", port) and ports.claim(port) for port in range(first, first + count)):
            return first


def scrape(port: int, metric: str) -> float:
    """The sum of a metric's samples at a Prometheus endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((metric + " ", metric + "{")))
