"""`up --ray ADDRESS` on a Ray cluster of three nodes, each in a network namespace of its own: where the workers go, and
what the loss of a node costs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve import Client, PdserveError
from pdserve.engine.toy import answer
from pdserve.launch.child import StartFailed
from pdserve.launch.ports import free_ports
from pdserve.launch.running import Running
from pdserve.prefix.embedded import server_binary
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt
from tests.support.netns import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(why_not() != "", reason=why_not())]

NODES = ("a", "b", "c")
CPUS = 2
LOST_S = 5.0
# A node's mounts are its own. In a shared folder two nodes that start at once take the same socket.
OWN_FOLDER = ("sh", "-c", 'mount -t tmpfs tmpfs /tmp/ray && exec "$@"', "sh")
PASSWORD = "a password of this test"


class RayNodes:
    """A head without CPUs in the root namespace, which the launcher uses, and three nodes with two CPUs each."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self.head = f"{next(iter(network.addresses.values())).rpartition('.')[0]}.254"
        port, redis_port = free_ports(2)
        self.address = f"{self.head}:{port}"
        self.redis = f"redis://:{PASSWORD}@{self.head}:{redis_port}/0"
        self._processes: list[subprocess.Popen[bytes]] = []
        config = f'bind {self.head}\nport {redis_port}\nrequirepass "{PASSWORD}"\nsave ""\n'
        (folder / "redis.conf").write_text(config)
        self._run(server_binary(), str(folder / "redis.conf"))
        self._ray("--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=0", address=self.head)
        until_connected(self.head, port)
        for name in NODES:
            self._ray(
                f"--address={self.address}",
                f"--num-cpus={CPUS}",
                address=network.addresses[name],
                inside=("ip", "netns", "exec", network.namespaces[name], *OWN_FOLDER),
            )

    def _ray(self, *flags: str, address: str, inside: tuple[str, ...] = ()) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        where = (f"--node-ip-address={address}", "--object-store-memory=100000000", "--block")
        self._run(*inside, ray, "start", *flags, *where)

    def _run(self, *command: str) -> None:
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes.append(process)

    def kill(self, name: str) -> None:
        """Every process of the node at once."""
        for pid in self._pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self, name: str) -> list[int]:
        listed = ("ip", "netns", "pids", self._network.namespaces[name])
        return [int(pid) for pid in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()]

    def stop(self) -> None:
        for name in NODES:
            self.kill(name)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_connected(host: str, port: int) -> None:
    until_s = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        assert time.monotonic() < until_s, f"nobody listens on {host}:{port}"
        time.sleep(0.1)


def environment() -> Mapping[str, str]:
    return os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with Network(NODES) as network:
        nodes = RayNodes(network, tmp_path_factory.mktemp("ray"))
        try:
            yield nodes
        finally:
            nodes.stop()


def flags(nodes: RayNodes, count: int) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """`up`'s flags and environment for this many workers of each role, with one thread each."""
    numbers = ("--prefill", str(count), "--decode", str(count), "--set", "worker.threads=1", "--insecure")
    env = {**environment(), "PDSERVE_TOKEN": "", "PDSERVE_REDIS": nodes.redis}
    return ("--model", "toy", f"--ray={nodes.address}", *numbers), env


def hosts(client: Client) -> dict[str, list[str]]:
    """The roles on each host, by address."""
    found: dict[str, list[str]] = {}
    for worker in client.topology().workers:
        if worker.is_connected:
            found.setdefault(worker.endpoint.rpartition(":")[0], []).append(worker.worker_id[0])
    return {host: sorted(roles) for host, roles in found.items()}


def test_a_lost_node_costs_its_workers_alone(nodes: RayNodes) -> None:
    words, env = flags(nodes, len(NODES))
    with Cluster(*words, "--ray-wait-s=200", start_s=300, env=env) as cluster:
        assert hosts(cluster.client) == {address: ["d", "p"] for address in nodes._network.addresses.values()}
        nodes.kill("b")
        until_s = time.monotonic() + LOST_S
        while sum(map(len, hosts(cluster.client).values())) != 2 * (len(NODES) - 1):
            assert time.monotonic() < until_s, hosts(cluster.client)
            ask(cluster.client)
        for _ in range(20):
            ask(cluster.client)


def ask(client: Client) -> None:
    prompt = toy_prompt(300, salt=5)
    done: Any = client.generate(prompt, max_tokens=16, temperature=0)
    assert list(done.token_ids) == answer(prompt, 16)


def test_a_cluster_without_enough_cpus_is_refused(nodes: RayNodes) -> None:
    """Eight threads are more than its nodes have, although Ray may not have noticed yet that one was killed."""
    words, env = flags(nodes, len(NODES) + 1)
    began_s = time.monotonic()
    with pytest.raises((StartFailed, PdserveError), match=r"need 8 CPUs \((1, ){7}1\) of which [0-6] of [46] are free"):
        Running.start(*words, env=env)
    assert time.monotonic() - began_s < 60.0  # most of it is Ray's own start


def test_a_python_that_a_node_lacks_ends_the_start(nodes: RayNodes) -> None:
    """Ray itself would start it again and again."""
    words, env = flags(nodes, 1)
    with pytest.raises((StartFailed, PdserveError), match=r"on its node: worker\.engine_python: got /no/python"):
        Running.start(*words, "--ray-wait-s", "120", "--set", "worker.engine_python=/no/python", env=env)
