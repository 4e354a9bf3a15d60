"""A cluster whose workers run in separate network namespaces; the router and the client are outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from pdserve import Client, PdserveError
from tests.cluster.cluster import free_ports, rest
from tests.support.cluster_secret import ENVIRONMENT
from tests.support.netns import Network

PORT: Final = 7100


class NetCluster:
    """Toy workers, one in each namespace of the network, and a router outside. Use as a context manager."""

    def __init__(self, network: Network, worker_flags: Sequence[str], router_flags: Sequence[str]) -> None:
        self.network = network
        self.target = f"127.0.0.1:{free_ports(1)}"
        port = self.target.rpartition(":")[2]
        workers = ",".join(f"{address}:{PORT}" for address in network.addresses.values())
        self._processes = [self._worker(name, worker_flags) for name in network.namespaces]
        command = ["-m", "router", "--model", "toy", "--port", port, f"--workers={workers}", *router_flags]
        self._processes.append(subprocess.Popen([sys.executable, *command], env=_environment()))
        self.client = Client(self.target)

    def _worker(self, name: str, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        module = "prefill_worker" if name.startswith("p") else "decode_worker"
        where = ["--host", self.network.addresses[name], "--port", str(PORT), "--insecure"]
        command = [sys.executable, "-m", module, "--model", "toy", "--worker-id", name, *where, *flags]
        return subprocess.Popen(["ip", "netns", "exec", self.network.namespaces[name], *command], env=_environment())

    def wait_until_idle(self, within_s: float = 60.0) -> None:
        rest(self.client, len(self.network.namespaces), within_s)

    def __enter__(self) -> NetCluster:
        ends_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(PdserveError, OSError):
                if sum(w.is_connected for w in self.client.topology().workers) == len(self.network.namespaces):
                    return self
            if time.monotonic() > ends_s or any(one.poll() is not None for one in self._processes):
                self.__exit__(None, None, None)
                raise AssertionError("the cluster in namespaces does not start")
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        for one in reversed(self._processes):  # the router first
            one.terminate()
        for one in self._processes:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
