"""`up` on this host: real processes on the toy engine, and a real Redis."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.attacks.host import try_socket
from pdserve import AsyncClient, Client, InvalidRequest, Unauthenticated
from pdserve.client.results import Completion
from pdserve.launch.child import StartFailed
from pdserve.launch.ports import listeners
from pdserve.launch.running import Running
from pdserve.owned_folder import sweep
from tests.support.slow import slow_except

from .conftest import WAIT_S, is_alive, until

PROMPT = "a prompt that is longer than what a decode worker reads itself"
TOKEN = "secret-of-callers"
SLOW = ("--set", "worker.toy_step_s=0.02")


def ask(cluster: Running, prompt: str = PROMPT, max_tokens: int = 8) -> Completion:
    with Client(cluster.target) as client:
        return client.generate(prompt, max_tokens=max_tokens, temperature=0)


def test_the_ready_line_lists_processes_and_addresses(toy: Running) -> None:
    redis = toy.address("redis")
    assert toy.ready_line == f"pdserve ready: grpc {toy.target} (1 prefill, 1 decode, redis {redis}, model toy)"


def test_a_short_prompt_is_answered_by_the_decode_worker_alone(toy: Running) -> None:
    assert ask(toy, "hi").timings.path == "local"


def test_an_abandoned_stream_frees_its_memory(toy: Running) -> None:
    def idle(client: Client) -> bool:
        topology = client.topology()
        return topology.running_requests == topology.queued_requests == 0 and not any(
            worker.num_blocks - worker.free_blocks - worker.evictable_blocks for worker in topology.workers
        )

    with Client(toy.target) as client:
        for _ in client.stream(PROMPT, max_tokens=4000, ignore_eos=True):
            break
        until(lambda: idle(client))


async def test_the_asyncio_client_gets_the_same_answer(toy: Running) -> None:
    async with AsyncClient(toy.target) as client:
        done = await client.generate(PROMPT, max_tokens=8, temperature=0)
    assert done.token_ids == (await asyncio.to_thread(ask, toy)).token_ids


def test_topology_and_explain_work_through_the_cluster(toy: Running) -> None:
    with Client(toy.target) as client:
        assert {(one.worker_id, one.role, one.is_connected) for one in client.topology().workers} == {
            ("p0", "prefill", True),
            ("d0", "decode", True),
        }
        done = client.generate(PROMPT, max_tokens=2)
        assert client.explain(done.request_id).decision == done.timings.path
        assert client.model().name == "toy"
        assert client.tokenize("ab") == [97, 98]


def test_a_bad_request_names_its_field_through_the_whole_cluster(toy: Running) -> None:
    with Client(toy.target) as client, pytest.raises(InvalidRequest) as caught:
        client.generate(PROMPT, top_p=1.5)
    assert caught.value.field.endswith("top_p")


def test_a_port_in_use_is_one_line_and_starts_nothing(toy: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        with pytest.raises(StartFailed, match=rf"port: got {port} \(port in use\), expected a free port") as caught:
            Running.start("--model", "toy", "--port", port)
    assert "--port, for gRPC, sets it; another program listens there" in str(caught.value)


def test_a_killed_worker_restarts_with_its_id_and_port(toy: Running) -> None:
    for name in ("p0", "d0"):
        pid, address = toy.pid(name), toy.address(name)
        with Client(toy.target) as client:
            before = {one.worker_id: one.incarnation for one in client.topology().workers}
            os.kill(pid, signal.SIGKILL)
            toy.wait_line(f"pid {pid} was ended by SIGKILL; starting it again")
            assert toy.wait_restarted(name, pid) != pid
            assert toy.address(name) == address

            def has_come_back(name: str = name, before: dict[str, str] = before, client: Client = client) -> bool:
                seen = {one.worker_id: one for one in client.topology().workers}
                return name in seen and seen[name].is_connected and seen[name].incarnation != before[name]

            until(has_come_back)
        assert len(ask(toy).token_ids) == 8


def test_a_killed_router_restarts_on_its_port(toy: Running) -> None:
    pid = toy.pid("router")
    os.kill(pid, signal.SIGKILL)
    toy.wait_restarted("router", pid)
    assert len(ask(toy).token_ids) == 8


def test_redis_listens_on_a_private_socket_file_only(toy: Running) -> None:
    socket_file = Path(toy.address("redis"))
    assert socket_file.is_socket()
    assert socket_file.parent.stat().st_mode & 0o077 == 0
    assert listeners([toy.pid("redis")]) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as a second user, which only root can become")
def test_another_user_reaches_nothing_of_redis(toy: Running) -> None:
    ends = try_socket(toy.address("redis"))
    assert {name: end for name, end in ends.items() if end not in ("EACCES", "EPERM")} == {}


def test_a_killed_redis_fails_no_request(toy: Running) -> None:
    pid = toy.pid("redis")
    os.kill(pid, signal.SIGKILL)
    assert len(ask(toy).token_ids) == 8
    toy.wait_restarted("redis", pid)
    assert len(ask(toy).token_ids) == 8


@pytest.mark.parametrize("number", slow_except([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_drains_and_ends_all_processes(number: signal.Signals) -> None:
    """With an answer of both workers: the default policy may predict that an idle decode worker is faster alone."""
    with Running.start("--model", "toy", "--set", "router.policy=round-robin", *SLOW) as cluster:
        pids = cluster.pids()
        done = ask(cluster)
        assert (len(done.token_ids), done.finish_reason) == (8, "length")
        assert (done.timings.path, done.timings.prefill_worker, done.timings.decode_worker) == ("remote", "p0", "d0")
        with Client(cluster.target) as client, client.stream(PROMPT, max_tokens=40, temperature=0) as stream:
            next(stream)
            cluster.process.send_signal(number)
            said = cluster.wait_line("draining: ")
            assert re.search(r"draining: 1 request, at most \d+ s; a second signal ends everything at once", said)
            assert sum(len(piece.token_ids) for piece in stream) == 39
        assert cluster.process.wait(WAIT_S) == 0
        assert sorted(pids) == ["d0", "p0", "redis", "router"]
        planned = [line for line in cluster.lines if re.search("router gone|kv (sender|connection)", line)]
        assert planned == [], "a planned stop does not report its own disconnections"
        assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_a_second_signal_ends_the_cluster_at_once() -> None:
    with Running.start("--model", "toy", "--prefill", "0", "--set", "worker.toy_step_s=0.2") as cluster:
        pids = cluster.pids()
        with Client(cluster.target) as client, client.stream(PROMPT, max_tokens=1000) as stream:
            next(stream)
            cluster.process.send_signal(signal.SIGTERM)
            cluster.wait_line("draining")
            cluster.process.send_signal(signal.SIGTERM)
            cluster.process.wait(WAIT_S)
        until(lambda: not any(is_alive(pid) for pid in pids.values()))


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    shared = {path.name for path in Path("/dev/shm").glob("*")}
    cluster = Running.start("--model", "toy", "--prefill", "0", env={"TMPDIR": str(tmp_path)})
    pids = cluster.pids()
    cluster.kill()
    until(lambda: not any(is_alive(pid) for pid in pids.values()))
    sweep(tmp_path)  # as the next start of a cluster does
    assert list(tmp_path.iterdir()) == []
    assert not any("pdserve" in path.name for path in Path("/dev/shm").glob("*") if path.name not in shared)


def test_a_worker_that_cannot_start_is_one_line_and_ends_the_launcher() -> None:
    done = up("--prefill", "0", "--set", "worker.kv_memory_bytes=1")
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("pdserve up: error: ")
    assert "kv_memory_bytes: got 1, expected at least" in last
    assert "Traceback" not in done.stderr


def test_an_unknown_model_folder_is_named() -> None:
    done = up("--model", "/nowhere/at/all")
    assert done.returncode == 2
    assert "/nowhere/at/all" in done.stderr.splitlines()[-1]


def test_wrong_settings_are_a_usage_error() -> None:
    done = up("--model", "toy", "--set", "router.max_que=3")
    assert done.returncode == 2
    assert "router.max_que" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def decode_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A decode worker without a prefill worker, a token, and a folder for logs."""
    logs = tmp_path_factory.mktemp("logs")
    flags = ("--model", "toy", "--prefill", "0", "--log-dir", str(logs))
    with Running.start(*flags, env={"PDSERVE_TOKEN": TOKEN}) as cluster:
        yield cluster, logs


def test_only_callers_and_the_router_have_the_token(decode_only: tuple[Running, Path]) -> None:
    cluster, _ = decode_only
    with Client(cluster.target, token=TOKEN) as client:
        assert client.model().name == "toy"
    with Client(cluster.target) as client, pytest.raises(Unauthenticated):
        client.model()
    has_token = {
        name: TOKEN.encode() in Path(f"/proc/{pid}/environ").read_bytes() for name, pid in cluster.pids().items()
    }
    assert has_token == {"d0": False, "redis": False, "router": True}
    for pid in cluster.pids().values():
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in line
        assert b"redis://" not in line


def test_decode_workers_alone_serve_locally(decode_only: tuple[Running, Path]) -> None:
    cluster, _ = decode_only
    with Client(cluster.target, token=TOKEN) as client:
        assert client.generate(PROMPT, max_tokens=8, temperature=0).timings.path == "local"


def test_logs_go_to_a_folder(decode_only: tuple[Running, Path]) -> None:
    cluster, logs = decode_only
    assert not any(" | " in line for line in cluster.lines)
    assert {path.name for path in logs.iterdir()} == {"d0.log", "router.log"}


def up(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve", "up", "--port", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
