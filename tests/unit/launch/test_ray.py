"""`up --ray`: the workers are actors of a real Ray that is started for this file alone (about ten seconds)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve import Client
from pdserve.client.results import Completion
from pdserve.launch.running import Running
from pdserve.launch.spec import ClusterSpec, Kind, Value
from pdserve.launch.with_ray import spec_from_json, spec_to_json

from .conftest import WAIT_S, is_alive, until

PROMPT = "a prompt that is longer than what a decode worker reads itself"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    with Running.start("--model", "toy", "--ray", "--prefill", "2", "--decode", "2") as running:
        yield running


def ask(cluster: Running, max_tokens: int = 8) -> Completion:
    with Client(cluster.target) as client:
        return client.generate(PROMPT, max_tokens=max_tokens, temperature=0)


def in_session(leader_pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader_pid and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_two_of_each_role_are_placed_and_answer(cluster: Running) -> None:
    with Client(cluster.target) as client:
        topology = client.topology()
        assert len(topology.of_role("prefill")) == 2
        assert len(topology.of_role("decode")) == 2
    assert len(ask(cluster).token_ids) == 8
    assert "(2 prefill, 2 decode, " in cluster.ready_line


@pytest.mark.parametrize("name", ["p1", "d1"])
def test_a_killed_actor_comes_back_under_its_id_as_a_new_incarnation(cluster: Running, name: str) -> None:
    pid = cluster.pid(name)
    with Client(cluster.target) as client:
        [before] = [one.incarnation for one in client.topology().workers if one.worker_id == name]
        os.kill(pid, signal.SIGKILL)
        assert len(ask(cluster).token_ids) == 8
        assert cluster.wait_restarted(name, pid) != pid

        def is_back() -> bool:
            seen = {one.worker_id: one for one in client.topology().workers}
            return name in seen and seen[name].is_connected and seen[name].incarnation != before

        until(is_back)
        assert len(client.topology().workers) == 4
    assert len(ask(cluster).token_ids) == 8


def test_losing_the_control_plane_stops_no_request_and_no_process_is_left(cluster: Running) -> None:
    """The last test of the file: it ends the cluster."""
    pids = cluster.pids()
    members = in_session(pids["ray"])
    [control] = [pid for pid in members if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]
    os.kill(control, signal.SIGKILL)
    until(lambda: not is_alive(control))
    for _ in range(10):
        assert len(ask(cluster).token_ids) == 8
    members += in_session(pids["ray"])
    assert cluster.stop() == 0
    until(lambda: not any(is_alive(pid) for pid in {*pids.values(), *members}), WAIT_S)


def test_the_router_s_secret_is_not_on_the_driver_s_command_line() -> None:
    settings: dict[Kind, dict[str, Value]] = {"worker": {"kv_blocks": 3}, "router": {"token": "hidden"}}
    redis = "redis://:hidden@127.0.0.1:1/0"
    spec = ClusterSpec(model="toy", cluster_secret="hidden as well", redis=redis, settings=settings)
    assert "hidden" not in spec_to_json(spec)


def test_the_driver_reads_back_what_the_launcher_wrote() -> None:
    spec = ClusterSpec(
        model="toy", prefill=2, gpus=("0",), cluster_secret="s" * 16, redis="r", settings={"worker": {"kv_blocks": 3}}
    )
    assert spec_from_json(spec_to_json(spec), "s" * 16, "r") == spec
