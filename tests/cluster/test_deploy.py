"""The commands of the compose file and of the manifests, run as processes of this host with local addresses."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.launch.ports import free_ports
from pdserve.launch.settings import bundled_model
from pdserve.prefix.embedded import server_binary
from tests.unit.deploy.manifests import ROOT, container, expanded, load
from tests.unit.deploy.test_one_host import SERVICES, words

START_S = 120.0
TOKEN = "t" * 32


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for one in reversed(started):
            one.terminate()
        for one in started:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def wait_for(url: str, started: list[subprocess.Popen[bytes]], log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60):
                return
        except (OSError, urllib.error.URLError):
            ended = [one.args for one in started if one.poll() is not None]
            assert not ended, (ended, log.read_text()[-3000:])
            assert time.monotonic() < ends_s, (url, log.read_text()[-3000:])
            time.sleep(0.1)


def completion(port: int) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": "def fib(n):", "max_tokens": 8, "temperature": 0}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_every_command_serves_as_it_stands(tmp_path: Path) -> None:
    redis, p0, d0, metrics_p0, metrics_d0, router, metrics, http, pod, pod_metrics, pod_http, pod_http_metrics = (
        free_ports(12)
    )
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name, value in {
        "token": TOKEN,
        "cluster-secret": "c" * 32,
        "redis-password": "p",
        "redis-url": f"redis://:p@127.0.0.1:{redis}/0",
    }.items():
        (secrets / name).write_text(value)
    log = tmp_path / "log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE")}

    def start(started: list[subprocess.Popen[bytes]], command: list[str], **own: str) -> None:
        command = [sys.executable if word == "python" else word for word in command]
        environ = {**clean, "OMP_NUM_THREADS": "1", **own}
        with log.open("ab") as output:
            started.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output, cwd=ROOT))

    def local(command: list[str], replaced: dict[str, str]) -> list[str]:
        kept = []
        for word in command:
            flag = word.partition("=")[0]
            if flag in replaced:
                kept.append(f"{flag}={replaced.pop(flag)}")
            elif flag != "--otlp":  # there is no collector
                kept.append(
                    "--host=127.0.0.1" if flag == "--host" else word.replace("/models/bundled", str(bundled_model()))
                )
        assert not replaced, "flags that the manifests lack"
        return kept

    def held(name: str) -> dict[str, str]:
        files = SERVICES[name].get("environment", {})
        return {one: path.replace("/run/secrets", str(secrets)) for one, path in files.items()}

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/redis-server").symlink_to(server_binary())
    entry = [word.replace("$$", "$").replace("/run/secrets", str(secrets)) for word in SERVICES["redis"]["entrypoint"]]
    with processes() as started:
        start(
            started,
            [*entry, *SERVICES["redis"]["command"], "--port", str(redis), "--bind", "127.0.0.1"],
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        )
        for name, port, at in (("prefill", p0, metrics_p0), ("decode", d0, metrics_d0)):
            own = {"--port": str(port), "--metrics-port": str(at), "--advertise": "127.0.0.1"}
            start(started, local(words(name), own), **held(name))
        ports = {"--port": str(router), "--metrics-port": str(metrics)}
        start(started, local(words("router"), ports), **held("router"))
        wait_for(f"http://127.0.0.1:{metrics}/metrics", started, log)
        ports = {"--port": str(http), "--router": f"127.0.0.1:{router}"}
        start(started, local(words("gateway"), ports), **held("gateway"))
        wait_for(f"http://127.0.0.1:{http}/health", started, log)
        expected = completion(http)
        assert expected

        manifests = load()
        for name, ports in (
            ("pdserve-router", {"--port": str(pod), "--metrics-port": str(pod_metrics)}),
            (
                "pdserve-gateway",
                {"--port": str(pod_http), "--router": f"127.0.0.1:{pod}", "--metrics-port": str(pod_http_metrics)},
            ),
        ):
            only = container(manifests, name)
            command = expanded([*only["command"], *only["args"]], {"POD_NAME": "pod-1"})
            start(started, local(command, ports), **(held("router") if name == "pdserve-router" else {}))
            if name == "pdserve-router":
                wait_for(f"http://127.0.0.1:{pod_metrics}/metrics", started, log)
        wait_for(f"http://127.0.0.1:{pod_http}/health", started, log)
        assert completion(pod_http) == expected
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{pod_http}/v1/models", timeout=60)
