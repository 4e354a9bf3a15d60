"""`pdserve up --detach`, `adopt` and `down`: the launcher is replaced while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve import Client, Retries, Tls
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.launch.child import StartFailed
from pdserve.launch.running import RunningDetached
from pdserve.testing import toy_answer
from tests.cluster.cluster import PATIENT
from tests.cluster.test_routers import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

TOKEN = "a token of the tests, 32 letters"
TOKENS = 40
FLAGS = ("--model", "toy", "--decode", "2", "--http", "0", "--tls", "auto", "--orphan-s", "600", *PATIENT)
STEPS = ("--set", "worker.toy_step_s=0.02")
ENV = {"OMP_NUM_THREADS": "1", "PDSERVE_TOKEN": TOKEN}


def connect(cluster: RunningDetached) -> Client:
    tls = Tls.from_files(ca=cluster.ready_line.rpartition(", ca ")[2].rstrip(")"))
    return Client(cluster.target, token=TOKEN, tls=tls, retries=Retries(limit=0))


@contextmanager
def streams(cluster: RunningDetached, number: int = 4) -> Iterator[list[str]]:
    """Until the end of the block, that many at a time. None may be interrupted."""
    answers: list[str] = []
    wrong: list[str] = []
    has_ended = threading.Event()

    def send(own: int) -> None:
        prompt = f"{own} of the prompts, which prefill workers compute"
        expected = toy_answer(prompt, TOKENS)
        with connect(cluster) as client:
            while not has_ended.is_set():
                try:
                    text = "".join(one.text for one in client.stream(prompt, max_tokens=TOKENS, temperature=0))
                except Exception as error:  # of any kind: the test reports it
                    wrong.append(repr(error))
                    return
                (answers if text == expected else wrong).append(text)

    threads = [threading.Thread(target=send, args=(own,)) for own in range(number)]
    for one in threads:
        one.start()
    try:
        until(lambda: len(answers) >= number or wrong)
        yield answers
        before = len(answers)
        until(lambda: len(answers) >= before + number or wrong)
    finally:
        has_ended.set()
        for one in threads:
            one.join()
    assert not wrong


def serving(client: Client) -> set[str]:
    return {one.worker_id for one in client.topology().workers if one.is_connected and not one.is_draining}


def _kill_at_a_drain(cluster: RunningDetached, steps: list[str], text: str) -> None:
    steps.append(text.partition(",")[0])
    if steps[-1] == "draining":
        cluster.kill_launcher()


def test_a_launcher_is_replaced_without_an_outage() -> None:
    with RunningDetached.start(*FLAGS, *STEPS, env=ENV) as cluster, connect(cluster) as client:
        pids = cluster.pids()
        assert pids.keys() == {"redis", "p0", "d0", "d1", "router"}
        with pytest.raises(StartFailed, match="port in use"):
            RunningDetached.start("--model", "toy", "--port", cluster.target.rpartition(":")[2], env=ENV)
        with streams(cluster):
            first = cluster.launcher_pid()
            cluster.adopt()
            assert cluster.launcher_pid() != first
            assert cluster.pids() == pids
            client.scale(decode=3)  # the router reaches the new launcher, which makes certificates
            client.roll(["d2"], surge=0, settings="")
        pids = cluster.pids()
        with streams(cluster):
            cluster.kill_launcher()
            assert cluster.pids() == pids, "they go on"
            cluster.adopt()
            steps: list[str] = []
            with pytest.raises(Unavailable):  # in the middle of a roll-out
                client.roll(on_step=lambda step: _kill_at_a_drain(cluster, steps, step.text))
            assert steps[:3] == ["starting", "ready", "draining"]
            cluster.adopt()
            until(lambda: serving(client) == {"p0", "d0", "d1", "d2"})
        pids = cluster.pids()
        assert pids.keys() == {"redis", "router", *serving(client)}
        cluster.kill_launcher()
        os.kill(pids["p0"], signal.SIGKILL)
        until(lambda: "p0" not in cluster.pids())
        cluster.adopt()
        until(lambda: serving(client) == {"p0", "d0", "d1", "d2"})
        after = cluster.pids()
        assert {name for name in after if after[name] != pids[name]} == {"p0"}
        os.kill(after["d1"], signal.SIGKILL)
        until(lambda: cluster.pids().get("d1", after["d1"]) != after["d1"])  # it is kept alive
        os.kill(cluster.launcher_pid(), signal.SIGHUP)
        until(lambda: "the settings were read again" in cluster.log.read_text())
        with pytest.raises(ConfigError, match="undo: got no roll-out"):
            client.roll(undo=True)
        after = cluster.pids()
        cluster.down()
        assert not cluster.log.parent.exists()
        assert not [pid for pid in after.values() if os.path.exists(f"/proc/{pid}/exe")]


def test_the_driver_of_ray_outlives_the_launcher() -> None:
    pytest.importorskip("ray")
    with RunningDetached.start("--model", "toy", "--ray", *STEPS, *PATIENT, env=ENV) as cluster:
        pids = cluster.pids()
        assert pids.keys() == {"redis", "ray", "router"}
        with Client(cluster.target, token=TOKEN) as client:
            workers = {one.worker_id: one.incarnation for one in client.topology().workers}
            cluster.adopt()
            cluster.kill_launcher()
            cluster.adopt()
            assert cluster.pids() == pids
            assert {one.worker_id: one.incarnation for one in client.topology().workers} == workers
            client.scale(decode=2)
            assert serving(client) == {"p0", "d0", "d1"}


def test_a_failed_start_leaves_nothing() -> None:
    with pytest.raises(StartFailed, match="status 1"):
        RunningDetached.start("--model", "toy", "--set", "worker.transport=nccl", env=ENV)
    done = subprocess.run([sys.executable, "-m", "pdserve", "down", "--port", "1"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "up --detach" in done.stderr
