"""`python -m pdserve.gateway` as an operator starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest

from pdserve.launch.ports import free_ports
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, read_all

Connect = Callable[[str], socket.socket]
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, "-m", "pdserve.gateway", "--port=0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            assert line.startswith("gateway gateway-0 listening on 127.0.0.1:")
            yield started, line.split()[-1]
        finally:
            started.kill()


def test_metrics_have_their_own_port(toy: Served) -> None:
    [port] = free_ports(1)
    with (
        process(f"--router={toy.router}", f"--metrics-port={port}"),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer,
    ):
        assert b"pdserve_http_connections" in answer.read()


def test_the_time_to_the_first_part_of_a_stream_is_measured(toy: Served) -> None:
    with gateway(toy.router) as host, openai.OpenAI(base_url=f"http://{host.address}/v1", api_key="x") as client:
        for is_streamed in (True, False):
            found = client.completions.create(model="toy", prompt="hi", max_tokens=4, stream=is_streamed)
            if is_streamed:
                assert list(found)
        urllib.request.urlopen(f"http://{host.address}/ui").close()
        with urllib.request.urlopen(f"http://{host.address}/metrics", timeout=WAIT_S) as answer:
            assert b"pdserve_http_ttft_seconds_count 1.0\n" in answer.read()


def test_the_gateway_serves_and_ends_on_a_signal(toy: Served, raw: Connect) -> None:
    with process(f"--router={toy.router}") as (started, address):
        connection = raw(address)
        connection.sendall(HEALTH)
        assert b'"status":"ok"' in read_all(connection)
        started.send_signal(signal.SIGTERM)
        assert started.wait(WAIT_S) == 0


def test_requests_that_are_not_http_write_no_lines(toy: Served, raw: Connect) -> None:
    with process(f"--router={toy.router}") as (started, address):
        for _ in range(20):
            connection = raw(address)
            connection.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in read_all(connection)
        started.send_signal(signal.SIGTERM)
        _, stderr = started.communicate(timeout=WAIT_S)
        assert len(stderr.splitlines()) < 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--router=127.0.0.1:1", "--idle-s=0"], "idle_s: got 0.0, expected a number from 0.1"),
        (["--router=127.0.0.1:1", "--host=192.0.2.7", "--insecure"], "no server answers"),
    ],
)
def test_a_wrong_setting_ends_the_start(flags: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.gateway", "--port=0", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ},
    )
    assert done.returncode == 2
    assert message in done.stderr
