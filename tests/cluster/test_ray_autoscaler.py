"""`up --autoscale` on a Ray cluster that has no node for the workers yet: Ray's own autoscaler starts nodes for the
workers that the controller adds, and ends them after a stop. The nodes are processes of this host, by Ray's provider
for tests.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.core.errors import Unavailable
from pdserve.launch.ports import free_ports
from pdserve.prefix.embedded import server_binary
from tests.cluster.cluster import Cluster
from tests.cluster.test_ray_nodes import environment, until_connected
from tests.cluster.test_routers import until
from tests.cluster.test_scaling import ITSELF, PACE, SCALES_S, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MOST_NODES = 2
WAIT_S = 120  # for a node, which is a few processes
START_S = 300.0
PASSWORD = "a password of this test"
NODES = f"""
cluster_name: test
max_workers: {MOST_NODES}
idle_timeout_minutes: 0.1
head_node_type: ray.head.default
available_node_types:
  ray.head.default: {{node_config: {{}}, resources: {{CPU: 0}}, max_workers: 0}}
  node: {{node_config: {{}}, resources: {{CPU: 1, object_store_memory: 100000000}}, max_workers: {MOST_NODES}}}
provider:
  type: fake_multinode
  gcs_address: ADDRESS
  use_node_id_as_ip: true
  disable_node_updaters: true
  disable_launch_config_check: true
auth: {{}}
file_mounts: {{}}
cluster_synced_files: []
worker_setup_commands: []
worker_start_ray_commands: []
"""


def own_address() -> str:
    """Not loopback, on which Ray's nodes would find neither Redis nor each other's workers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


class AutoscaledRay:
    """A head without CPUs, and Ray's autoscaler, which starts and ends nodes with one CPU. Ray's own class for such a
    cluster would end every Ray of this host."""

    def __init__(self, folder: Path) -> None:
        host, (port, redis_port) = own_address(), free_ports(2)
        self.address = f"{host}:{port}"
        self.redis = f"redis://:{PASSWORD}@{host}:{redis_port}/0"
        self._mark = f"MARK_OF_THIS_RAY={secrets.token_hex(16)}"
        name, _, value = self._mark.partition("=")
        self._env = environment() | {name: value, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        (folder / "nodes.yaml").write_text(NODES.replace("ADDRESS", self.address))
        (folder / "redis.conf").write_text(
            f'bind {host}\nport {redis_port}\nrequirepass "{PASSWORD}"\nsave ""\ndir {folder}\n'
        )
        self._folder = tempfile.mkdtemp(prefix="pdray", dir="/tmp")  # short, for the paths of Ray's sockets
        self._processes: list[subprocess.Popen[bytes]] = []
        self._run(server_binary(), str(folder / "redis.conf"))
        self._run(
            str(Path(sys.executable).with_name("ray")),
            *("start", "--head", "--block", f"--node-ip-address={host}", f"--port={port}", "--num-cpus=0"),
            *("--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir={self._folder}"),
            f"--autoscaling-config={folder / 'nodes.yaml'}",
        )
        until_connected(host, port)

    def _run(self, *command: str) -> None:
        process = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes.append(process)

    def num_nodes(self) -> int:
        """Without the head."""
        return sum(Path(f"/proc/{pid}/comm").read_text().strip() == "raylet" for pid in self._pids()) - 1

    def _pids(self) -> Iterator[int]:
        """Of all processes that this Ray has started: they inherit its environment."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        while pids := list(self._pids()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._processes:
                process.poll()
        shutil.rmtree(self._folder)


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[AutoscaledRay]:
    found = AutoscaledRay(tmp_path)
    try:
        yield found
    finally:
        found.stop()


def test_ray_starts_and_ends_nodes_for_the_controller(
    ray: AutoscaledRay, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--ray={ray.address}", f"--ray-wait-s={WAIT_S}", "--set", "worker.threads=1", "--insecure")
    env = {**environment(), "PDSERVE_TOKEN": "", "PDSERVE_REDIS": ray.redis}
    with Cluster(*ITSELF, *flags, "--record", str(tmp_path / "run.jsonl"), start_s=START_S, env=env) as cluster:
        assert ray.num_nodes() == 1, "which it started for the first worker"
        with load(cluster, streams=6, token=None, **PACE):
            until(lambda: is_under_way(cluster), SCALES_S)
            with pytest.raises(Unavailable, match=r"another change \(autoscale: start"):
                cluster.client.scale(decode=1)
            until(lambda: len(cluster.workers()) == 2, SCALES_S)
            assert ray.num_nodes() == 2
            until(lambda: any(failures(cluster)), SCALES_S)
            assert f"within {WAIT_S} s. They need 1 CPUs (1) of which 0 of 2 are free" in failures(cluster)[0]
            assert len(cluster.workers()) == 2, "the one with a node stays"
        until(lambda: len(cluster.workers()) == 1, SCALES_S)
        until(lambda: ray.num_nodes() == 1, SCALES_S)
    assert main(["replay", str(tmp_path / "run-scaling.jsonl")]) == 0
    assert "the controller decided the same in all" in capsys.readouterr().out


def is_under_way(cluster: Cluster) -> bool:
    return any(one.reason.startswith("under way: start") for one in cluster.client.scaling(1).decisions)


def failures(cluster: Cluster) -> list[str]:
    return [one.failure for one in cluster.client.scaling().decisions if one.failure]
