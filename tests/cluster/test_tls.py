"""`pdserve up --tls auto` as users run it: every port of every process, the commands, and OpenAI's client.
test_shutdown.py deletes the files with their cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pdserve import Client
from pdserve.isolated.tied_program import session_of
from pdserve.launch.ports import listeners
from pdserve.launch.running import Running
from pdserve.testing import toy_answer
from tests.cluster.cluster import free_ports

WAIT_S = 60.0
WORDS = (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PING\r\n", bytes(256))
ANSWER = toy_answer("hello", 4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    flags = ["--model", "toy", "--tls", "auto", "--http", "0", "--transport", "tcp", "--log-level", "info"]
    metrics = ["--metrics", str(free_ports(5))]
    patient = ["--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"]
    with Running.start(*flags, *metrics, *patient) as running:
        yield running


def ca_of(cluster: Running) -> Path:
    found = re.search(r", ca ([^)]+)\)", cluster.ready_line)
    assert found is not None, cluster.ready_line
    return Path(found[1])


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


def test_no_port_of_any_process_answers_plain_text(cluster: Running) -> None:
    cluster.wait_line("TLS is on")  # by then, the lines with all pids have been read
    pids = {pid for leader in [cluster.process.pid, *cluster.pids().values()] for pid in [leader, *session_of(leader)]}
    ports = listeners(pids)
    assert {one.pid for one in ports} >= {cluster.pid(name) for name in ("p0", "d0", "router")}
    assert len(ports) >= 10, "gRPC of three, HTTPS, KV, five of metrics"
    for one in ports:
        for words in WORDS:
            assert heard(one.address, one.port, words)[:1] in (b"", b"\x15"), f"{one} answers {words!r}"


def heard(host: str, port: int, words: bytes) -> bytes:
    found = b""
    with socket.create_connection((host, port)) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(WAIT_S)
        sock.sendall(words)
        with contextlib.suppress(OSError):  # it has closed the connection already
            sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(4096):
            found += data
    return found


def test_only_the_owner_can_read_keys(cluster: Running) -> None:
    folder = ca_of(cluster).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = sorted(folder.rglob("*.key"))
    assert [key.parent.name for key in keys] == ["d0", "gateway", "p0", "router"]
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    assert len({key.read_bytes() for key in keys}) == len(keys)
    assert not list(folder.glob("*.key")), "a key of the CA"


def test_commands_on_this_host_find_the_ca(cluster: Running) -> None:
    done = run("generate", "--target", cluster.target, "hello", "--max-tokens", "4", "--temperature", "0")
    assert (done.returncode, done.stdout.strip()) == (0, ANSWER.strip()), done.stderr
    assert "p0" in run("topology", "--target", cluster.target).stdout


def test_a_command_with_another_ca_reports_the_cause(cluster: Running) -> None:
    done = run("generate", "--target", cluster.target, "--tls", "hello")
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"pdserve generate: error: no connection to {cluster.target}: "
        "its certificate is not from a CA that this side trusts; name its CA with --tls-ca FILE, or omit --tls: "
    )
    assert done.stderr.count("\n") == 1


def test_the_sdk_and_openai_are_served(cluster: Running) -> None:
    with Client(cluster.target, tls=str(ca_of(cluster))) as client:
        assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER
    assert "transport=tcp" in cluster.wait_line("kv connection up")
    assert cluster.http_url.startswith("https://")
    http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=ca_of(cluster)))
    with openai.OpenAI(base_url=cluster.http_url, api_key="none", http_client=http) as client_of_openai:
        assert client_of_openai.models.list().data[0].id == "toy"


def test_a_killed_worker_restarts_with_its_certificate(cluster: Running) -> None:
    old = cluster.pid("d0")
    os.kill(old, 9)
    cluster.wait_restarted("d0", old)
    with Client(cluster.target, tls=str(ca_of(cluster)), timeout_s=WAIT_S) as client:
        assert client.generate("hello", max_tokens=4, temperature=0.0).text == ANSWER


def test_the_benchmark_finds_the_ca_by_itself(cluster: Running) -> None:
    """Over HTTPS and, as the second server, over gRPC."""
    small = ("--requests", "6", "--turns", "1", "--input-tokens", "8:16", "--output-tokens", "3:5", "--json")
    done = run("bench", "--url", cluster.http_url, "--compare", cluster.target, *small)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(one["server"], one["completed"]) for one in runs] == [("pdserve", 6), ("other", 6)]


def test_the_benchmark_rejects_an_invalid_ca_file(cluster: Running, tmp_path: Path) -> None:
    other = tmp_path / "none.crt"
    other.write_text("no certificate")
    done = run("bench", "--url", cluster.http_url, "--tls-ca", str(other))
    assert done.returncode == 1
    assert "PEM files" in done.stderr
