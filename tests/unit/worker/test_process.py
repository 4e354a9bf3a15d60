"""`python -m prefill_worker` and `python -m decode_worker` as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.config_flags import to_flags
from pdserve.core.types import Role
from pdserve.engine.toy import answer
from tests.support.cluster_secret import ENVIRONMENT

PROMPT = list(range(10, 31))
ENV = {**os.environ, **ENVIRONMENT}
MODULE = {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker"}
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn(worker_config: Any) -> Iterator[Spawn]:
    processes: list[subprocess.Popen[str]] = []

    def begin(role: Role, **changes: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", MODULE[role], *to_flags(worker_config(role, **changes))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def listening(process: subprocess.Popen[str], role: Role) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(rf"{MODULE[role]} {role.value}-0 listening on (127\.0\.0\.1:\d+)\n", line)
    assert found, (line, process.stderr and process.stderr.read() if process.poll() is not None else "")
    return found[1]


async def test_two_processes_serve_a_request_and_end_on_sigterm(spawn: Spawn, attach: Any, ask: Any) -> None:
    processes = {role: spawn(role, transport="auto") for role in Role}
    router = await attach()
    for role, process in processes.items():
        await router.attach(role, listening(process, role))
    assert await router.remote(ask("r", PROMPT)) == answer(PROMPT, 8, prefilled=len(PROMPT))
    await router.close()
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    for process in processes.values():
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), err


def test_a_toy_worker_imports_no_torch() -> None:
    code = (
        "import sys; from pdserve.config import WorkerConfig; from decode_worker.program import make_host\n"
        "host = make_host(WorkerConfig(model='toy', worker_id='d', cluster_secret='only for this test'))\n"
        "host.start(); host.stop()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


WRONG: list[dict[str, Any]] = [
    {"model": "/no/such/folder"},
    {"block_size": 0},
    {"host": "203.0.113.1"},
    {"profile": "abacus"},
]


@pytest.mark.parametrize("changes", WRONG)
def test_invalid_settings_end_the_process_with_one_line(changes: dict[str, Any]) -> None:
    flags = {"model": "toy", "worker_id": "d", **changes}
    command = [sys.executable, "-m", "decode_worker", *(f"--{k.replace('_', '-')}={v}" for k, v in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENV)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("decode_worker: ")
    assert "Traceback" not in done.stderr


def test_a_signal_that_another_thread_receives_ends_the_process() -> None:
    code = (
        "import signal, sys, threading, time\n"
        "from pdserve.config import WorkerConfig; from pdserve.program import run\n"
        "class Host:\n"
        "    memory = ''\n"
        "    ended, waiting = threading.Event(), threading.Event()\n"
        "    def start(self):\n"
        "        threading.Thread(target=self.signal, daemon=True).start(); return '127.0.0.1:1'\n"
        "    def signal(self):\n"
        "        self.waiting.wait(); time.sleep(0.2)  # the main thread is blocked\n"
        "        signal.pthread_kill(threading.get_ident(), signal.SIGTERM); time.sleep(60)\n"
        "    def wait(self, timeout_s=None):\n"
        "        self.waiting.set(); return self.ended.wait(timeout_s)\n"
        "    def drain(self):\n"
        "        self.ended.set()\n"
        "flags = ['--model=toy', '--worker-id=d']\n"
        "sys.exit(run('decode_worker', WorkerConfig, lambda config: Host(), flags))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=ENV
    )
    assert (done.returncode, done.stdout) == (0, "decode_worker d listening on 127.0.0.1:1\n"), done.stderr


def test_a_hung_engine_ends_the_process() -> None:
    code = (
        "import time\n"
        "from pdserve.config import WorkerConfig; from decode_worker.program import make_host\n"
        "host = make_host(WorkerConfig(model='toy', worker_id='d', stall_s=0.3, cluster_secret='only for this test'))\n"
        "host.start()\n"
        "host._engine.post(lambda: time.sleep(60)); host.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert "engine_thread.py" in done.stderr  # The stack shows the position.
