"""Limits of open files, which are checked before anything is started."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from kvtransfer.link import receiver
from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.listening import (
    LEAST_CONNECTIONS,
    MAX_ACCEPTED,
    MAX_LINGERING,
    OF_A_PROCESS,
    WORKER_CONNECTIONS,
    needed_by,
)
from pdserve.worker import host

WAIT_S = 60.0


def test_a_process_needs_one_for_each_connection() -> None:
    assert WORKER_CONNECTIONS == host.MAX_CONNECTIONS + receiver.MAX_CONNECTIONS
    assert needed_by(WorkerConfig(model="toy", worker_id="p0")) == OF_A_PROCESS + WORKER_CONNECTIONS
    assert needed_by(RouterConfig(model="toy", max_connections=7, workers=("h:1", "h:2"))) == OF_A_PROCESS + 9
    assert needed_by(GatewayConfig(router="h:1", max_connections=7)) == OF_A_PROCESS + 7 + MAX_LINGERING + MAX_ACCEPTED
    of_default = OF_A_PROCESS + LEAST_CONNECTIONS + MAX_LINGERING + MAX_ACCEPTED
    assert needed_by(GatewayConfig(router="h:1")) == of_default


@pytest.mark.parametrize(
    ("hard", "given", "expected"), [(20_000, 3072, 3072), (2000, 3072, 1616), (900, 3072, 516), (900, 600, 600)]
)
def test_default_connections_fit_the_hard_limit(hard: int, given: int, expected: int) -> None:
    code = (
        "from pdserve.config import GatewayConfig\n"
        "from pdserve.listening import with_allowed_connections\n"
        f"config = GatewayConfig(router='h:1', max_connections={given})\n"
        "print(with_allowed_connections(config).max_connections)"
    )
    _, own = resource.getrlimit(resource.RLIMIT_NOFILE)
    if own != resource.RLIM_INFINITY and own < hard:
        pytest.skip(f"the hard limit here is {own}")
    done = limited(hard, hard, "-c", code)
    assert done.stdout == f"{expected}\n"
    assert bool(done.stderr) is (expected != given)


def limited(soft: int, hard: int, *command: str) -> subprocess.CompletedProcess[str]:
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"
    become = f"{limit}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return subprocess.run(
        [sys.executable, "-c", become, *command], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize(
    ("command", "process"),
    [
        (("-m", "pdserve", "up", "--model", "toy", "--port", "0"), "p0"),
        (("-m", "router", "--model", "toy", "--port", "0"), "router"),
        (("-m", "pdserve.gateway", "--router", "127.0.0.1:1", "--port", "0"), "gateway"),
        (("-m", "decode_worker", "--model", "toy", "--worker-id", "d0", "--port", "0"), "decode_worker"),
    ],
)
def test_too_low_a_limit_is_refused_in_one_line(command: tuple[str, ...], process: str) -> None:
    ended = limited(200, 200, *command)
    assert ended.returncode != 0
    [line] = ended.stderr.splitlines()
    assert "ulimit -n: got 200, expected at least" in line
    assert f"open files for {process}: raise it with `ulimit -n" in line
    assert ended.stdout == ""


def test_the_launcher_itself_is_refused_first() -> None:
    ended = limited(64, 64, "-m", "pdserve", "up", "--model", "toy", "--port", "0")
    [line] = ended.stderr.splitlines()
    assert ended.returncode != 0
    assert "got 64, expected at least" in line


def test_the_soft_limit_is_raised() -> None:
    code = (
        "import resource\n"
        "from pdserve.listening import allow_descriptors\n"
        "allow_descriptors(1000, 'router')\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1000 and hard != resource.RLIM_INFINITY:
        pytest.skip(f"the hard limit here is {hard}")
    assert limited(64, 2000, "-c", code).stdout == "2000 2000\n"
