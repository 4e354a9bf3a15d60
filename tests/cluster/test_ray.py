"""`up --ray`: correct answers, restarted actors, and a Ray that other users cannot reach.

The workers are actors of a real Ray, which is started for this file (about ten seconds).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve import Client, PdserveError
from pdserve.client.results import ChangeStep, Completion
from pdserve.core.errors import ChangeFailed
from pdserve.core.types import Role
from pdserve.isolated.tied_program import session_of
from pdserve.launch.ports import listeners
from pdserve.launch.running import Running
from tests.cluster import suite
from tests.cluster.cluster import Cluster
from tests.cluster.faults import a_decode_worker_dies_in_mid_stream, a_prefill_worker_dies_while_it_prefills
from tests.cluster.test_scaling import load, roles, workers
from tests.support.slow import slow_except
from tests.unit.launch.conftest import WAIT_S, is_alive, until

pytestmark = pytest.mark.timeout(600)

SECRET = "a secret of this cluster alone"
PROMPT = "a prompt that is longer than what a decode worker reads itself"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = ("--model", "toy", "--ray", "--prefill", "2", "--decode", "2", "--set", "worker.toy_step_s=0.01")
    env = {"PDSERVE_TOKEN": "", "PDSERVE_CLUSTER_SECRET": SECRET}
    with Cluster(*flags, start_s=300, env=env) as cluster:
        yield cluster


def ray_folder(running: Running) -> Path:
    """The folder of the token that Ray's control plane reads."""
    for pid in session_of(running.pid("ray")):
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(b"RAY_AUTH_TOKEN_PATH="):
                return Path(one.partition(b"=")[2].decode()).parent
    raise AssertionError("no process of Ray reads a token from a file")


def ray_status(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    command = cluster.running.wait_line("its state: ").partition("its state: ")[2]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True, timeout=120, check=False)


def until_four_are_reserved(cluster: Cluster) -> None:
    until(lambda: "4.0/4096.0 place (4.0 used of 4.0 reserved" in ray_status(cluster).stdout, 60.0)


def ask(cluster: Cluster, max_tokens: int = 8) -> Completion:
    with Client(cluster.target) as client:
        return client.generate(PROMPT, max_tokens=max_tokens, temperature=0)


# Answers do not depend on what starts the workers; test_local.py runs all of these.
@pytest.mark.parametrize("requests", slow_except(suite.ALL, suite.toy_answers_are_exact))
def test_two_prefill_and_two_decode_actors(cluster: Cluster, requests: Callable[[Cluster], None]) -> None:
    requests(cluster)


def test_an_actor_keeps_its_log(cluster: Cluster) -> None:
    with Client(cluster.target) as client:
        assert any("worker is ready" in one.text for one in client.worker_log("d0"))


def test_a_killed_decode_actor_loses_no_token(cluster: Cluster) -> None:
    a_decode_worker_dies_in_mid_stream(cluster)


@pytest.mark.slow  # test_faults.py does the same with processes
def test_a_killed_prefill_actor_loses_no_token(cluster: Cluster) -> None:
    a_prefill_worker_dies_while_it_prefills(cluster)


def test_two_of_each_role_are_placed_and_answer(cluster: Cluster) -> None:
    with Client(cluster.target) as client:
        topology = client.topology()
        assert len(topology.of_role("prefill")) == 2
        assert len(topology.of_role("decode")) == 2
    assert len(ask(cluster).token_ids) == 8
    assert "(2 prefill, 2 decode, " in cluster.running.ready_line


def test_ray_listens_on_loopback_only(cluster: Cluster) -> None:
    found = listeners(session_of(cluster.running.pid("ray")))
    assert {"gcs_server", "raylet"} <= {one.process for one in found}
    assert [str(one) for one in found if not one.is_on_loopback] == []
    assert not any("others can reach" in line for line in cluster.running.lines)


def test_the_state_of_ray_is_shown_by_the_printed_command(cluster: Cluster) -> None:
    done = ray_status(cluster)
    assert "4.0/4096.0 place (4.0 used of 4.0 reserved in placement groups)" in done.stdout, done.stdout + done.stderr


def test_the_start_names_each_worker(cluster: Cluster) -> None:
    table = [line.split()[0] for line in cluster.running.lines if " s  █" in line]
    assert table[1:3] == ["ray_init", "placement"]
    assert sorted(table[3:7]) == ["d0", "d1", "p0", "p1"]


def test_ray_requires_a_private_token(cluster: Cluster) -> None:
    folder = ray_folder(cluster.running)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "auth_token").stat().st_mode & 0o777 == 0o600


def test_processes_of_ray_inherit_no_secret(cluster: Cluster) -> None:
    """Actors get the secret as an argument."""
    for pid in set(session_of(cluster.running.pid("ray"))) - {cluster.running.pid("ray")}:
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"redis://" not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("name", slow_except(["p1", "d1"], "p1"))  # a decode actor is killed above
def test_a_killed_actor_restarts_as_a_new_incarnation(cluster: Cluster, name: str) -> None:
    with Client(cluster.target) as client:
        [before] = [one.incarnation for one in client.topology().workers if one.worker_id == name]
        pid = cluster.kill(name)
        assert len(ask(cluster).token_ids) == 8

        def is_back() -> bool:
            seen = {one.worker_id: one for one in client.topology().workers}
            return name in seen and seen[name].is_connected and seen[name].incarnation != before

        until(is_back)
        assert cluster.pid_of(name) != pid
        assert len(client.topology().workers) == 4
    assert len(ask(cluster).token_ids) == 8


# What decides about the workers runs beside a stand-in for Ray in tests/unit/launch/test_ray_workers.py.


def test_a_worker_is_restarted_under_load(cluster: Cluster) -> None:
    until(lambda: len(cluster.workers()) == 4, 120.0)  # one may still be starting again
    before = workers(cluster.client)
    with load(cluster, 2, token=None):
        cluster.client.roll(["d1"], surge=0)
    after = workers(cluster.client)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name].incarnation != before[name].incarnation] == ["d1"]


@pytest.mark.slow  # starts a worker
def test_workers_are_added_and_ended_under_load(cluster: Cluster) -> None:
    said: list[ChangeStep] = []
    with load(cluster, 2, token=None):
        cluster.client.scale(decode=3, on_step=said.append)
        assert roles(cluster.client) == {
            **dict.fromkeys(("p0", "p1"), Role.PREFILL),
            **dict.fromkeys(("d0", "d1", "d2"), Role.DECODE),
        }
        cluster.client.scale(decode=2, on_step=said.append)
        assert len(roles(cluster.client)) == 4
    assert next(one.text for one in said if one.worker_id == "d2") == "starting"
    assert said[-1].text == "the cluster has 2 prefill and 2 decode workers"
    until_four_are_reserved(cluster)


@pytest.mark.slow  # starts five workers
def test_a_roll_out_and_a_change_of_role_under_load(cluster: Cluster) -> None:
    before = workers(cluster.client)
    with load(cluster, 2, token=None):
        cluster.client.roll(settings="[worker]\nkv_blocks = 3000\n")
        after = workers(cluster.client)
        assert after.keys() == before.keys()
        assert all(after[name].incarnation != before[name].incarnation for name in after)
        assert {one.num_blocks for one in after.values()} == {3000}
        [name, _] = sorted(name for name, one in after.items() if one.role is Role.DECODE)
        cluster.client.set_role(name, Role.PREFILL)
        assert len(cluster.client.topology().of_role("prefill")) == 3
        cluster.client.set_role(name, Role.DECODE)
    until_four_are_reserved(cluster)


@pytest.mark.slow  # waits for a GPU until `ray_wait_s`
def test_a_worker_that_does_not_start_leaves_nothing(cluster: Cluster) -> None:
    before = workers(cluster.client)
    with load(cluster, 2, token=None), pytest.raises(ChangeFailed, match="replaced: none"):
        cluster.client.roll(
            settings="[worker]\nload = 'dummy'\nkv_dtype = 'fp8'\ntransport = 'nccl'\ndevice = 'cuda'\n"
        )
    assert roles(cluster.client).keys() == before.keys()
    until_four_are_reserved(cluster)


@pytest.mark.slow  # starts Ray and all workers again
def test_a_failed_worker_does_not_end_a_driver_that_starts_again(cluster: Cluster) -> None:
    driver = cluster.running.pid("ray")
    wanted = Path(Path(f"/proc/{driver}/cmdline").read_bytes().split(b"\0")[-2].decode())
    content = json.loads(wanted.read_text())
    assert content["has_started"]
    [worker] = [one for one in content["workers"] if one["id"] == "d1"]
    worker["flags"] = [one for one in worker["flags"] if not one.startswith("--model=")] + ["--model=/nowhere"]
    worker["revision"] += 1
    written = wanted.with_suffix(".test")
    written.write_text(json.dumps(content))
    written.replace(wanted)
    until(lambda: sorted(cluster.workers()) == ["d0", "p0", "p1"], 120.0)
    os.kill(driver, signal.SIGKILL)
    cluster.running.wait_line("has not started again: d1: ", 120.0)
    until(lambda: sorted(cluster.workers()) == ["d0", "p0", "p1"], 120.0)
    restarted = cluster.running.pid("ray")
    assert restarted != driver
    assert len(ask(cluster).token_ids) == 8
    cluster.client.roll(["d1"], surge=0)
    until(lambda: sorted(cluster.workers()) == ["d0", "d1", "p0", "p1"], 120.0)
    assert cluster.running.pid("ray") == restarted


def test_losing_the_control_plane_stops_no_request(cluster: Cluster) -> None:
    """The last test of the file: it ends the cluster."""
    pids, folder = cluster.running.pids(), ray_folder(cluster.running)
    members = session_of(pids["ray"])
    [control] = [pid for pid in members if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]
    [listener] = listeners([control])
    os.kill(control, signal.SIGKILL)
    until(lambda: not is_alive(control))
    for _ in range(10):
        assert len(ask(cluster).token_ids) == 8
    # A process that takes the port receives nothing but the begin of a TLS handshake, which needs a certificate.
    with socket.create_server(("127.0.0.1", listener.port)) as impostor:
        impostor.settimeout(WAIT_S)
        for _ in range(3):
            dialled, _ = impostor.accept()
            with dialled:
                dialled.settimeout(WAIT_S)
                assert dialled.recv(1) == b"\x16"
    members += session_of(pids["ray"])
    assert cluster.running.stop() == 0
    until(lambda: not any(is_alive(pid) for pid in {*pids.values(), *members}), WAIT_S)
    assert not folder.exists()


@pytest.mark.slow  # pdserve rank itself: tests/unit/worker/test_remote_ranks.py
def test_further_ranks_of_a_worker_are_separate_actors() -> None:
    """One node stands for two."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = {"tensor_parallel": 2, "local_ranks": 1, "rendezvous": f"127.0.0.1:{port - 1}"}
    flags = [f"--set=decode_worker.{name}={value}" for name, value in settings.items()]
    env = {"PDSERVE_TOKEN": "", "PDSERVE_CLUSTER_SECRET": SECRET}
    sizes = ("--set=worker.kv_blocks=128", "--set=worker.max_context_tokens=512")
    with Cluster("--ray", *flags, *sizes, start_s=280, env=env) as cluster:
        assert ask(cluster, 16).text
        [rank] = [pid for pid in session_of(cluster.running.pid("ray")) if is_rank(pid)]
        os.kill(rank, signal.SIGKILL)
        until(lambda: not is_alive(rank))
        until(lambda: bool(answers(cluster)), 200.0)


def is_rank(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return {b"kvtransfer.ranks.follower", b"join"} <= set(words)


def answers(cluster: Cluster) -> str:
    try:
        return ask(cluster, 16).text
    except PdserveError:
        return ""
