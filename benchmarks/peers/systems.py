"""The systems of the comparison: how each is installed, started and found among the processes.

Each has one prefill and one decode worker that only wait: the first token comes as soon as the prompt is there, then
one each 5 ms. So an ideal answer of 16 tokens takes 75 ms. The router tokenizes, renders the chat template and
detokenizes with the bundled model's files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.launch.running import Running
from pdserve.launch.settings import bundled_model

STEP_S: Final = 0.005
START_S: Final = 90.0
STOP_S: Final = 8.0
LAUNCHER: Final = "launcher"
OWN: Final = ("pdserve", "pdserve-http-process")
DYNAMO: Final = "dynamo"
SMG: Final = "smg"
DIRECT: Final = "direct"
SYSTEMS: Final = (*OWN, DYNAMO, SMG, DIRECT)
#: What `pip install` gets in the environment PEERS/NAME. Dynamo's wheel would require etcd, NATS and engines.
PACKAGES: Final = {
    DYNAMO: (
        "--no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1",
        "aiohttp certifi 'kubernetes<33' msgspec prometheus-client 'pydantic<=2.13.5' pyzmq 'redis<9' tqdm "
        "transformers typing-extensions uvloop zstandard",
    ),
    SMG: ("smg==1.13.0 smg-grpc-proto==0.4.28 uvloop",),
}
_WORKER: Final = re.compile(r"[pd]\d+")
_PDSERVE: Final = (
    *("--model", "stdlib-5m", "--engine", "toy", "--prefill", "1", "--decode", "1", "--http", "0"),
    *("--set", "worker.max_context_tokens=131072", "--set", "worker.max_batch=512"),
    *("--set", "worker.max_batch_tokens=131072", "--set", "worker.inbox_depth=4096", "--set", "worker.kv_blocks=65536"),
    *("--set", "worker.speculation=off", "--set", f"decode_worker.toy_step_s={STEP_S}"),
    *("--set", "router.slo_ttft_s=2.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One that runs. `routing`: the processes whose CPU counts, with their children; `engines`: the others."""

    name: str
    host: str
    port: int
    model: str
    routing: Mapping[str, int]
    engines: Mapping[str, int]
    start_s: float  # from starting all its processes to the first token


def install_commands(peers: Path, names: tuple[str, ...]) -> list[str]:
    """For the environments of `names` that are not there. Pure, except that it looks for files."""
    lines = []
    for name in names:
        if name in PACKAGES and not python_of(peers, name).exists():
            lines.append(f"{sys.executable} -m venv {peers / name}")
            lines += [f"{peers / name}/bin/pip install {one}" for one in PACKAGES[name]]
    return lines


def python_of(peers: Path, name: str) -> Path:
    return peers / name / "bin" / "python"


@contextmanager
def running(name: str, peers: Path, logs: Path) -> Iterator[System]:
    """Raises OSError if it does not answer in time. Leaving the block ends its processes."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        if name in OWN:
            more = () if name == "pdserve" else ("--http-process",)
            cluster = stack.enter_context(Running.start(*_PDSERVE, *more))
            port, model = int(cluster.http_url.removesuffix("/v1").rpartition(":")[2]), "stdlib-5m"
            await_token(port, model, began_s)
            pids = cluster.pids()
            routing = {one: pid for one, pid in pids.items() if not _WORKER.fullmatch(one)}
            engines = {one: pid for one, pid in pids.items() if one not in routing}
            engines[LAUNCHER] = cluster.process.pid
        else:
            port, commands, env = _commands(name, peers)
            model = "model"
            pids = {}
            for one, command in commands.items():
                pids[one] = stack.enter_context(_process(command, env, logs / f"{name}.{one}.log"))
            await_token(port, model, began_s)
            routing = {} if name == DIRECT else {list(pids)[-1]: list(pids.values())[-1]}
            engines = {one: pid for one, pid in pids.items() if one not in routing}
        yield System(
            name=name,
            host="127.0.0.1",
            port=port,
            model=model,
            routing=routing,
            engines=engines,
            start_s=time.monotonic() - began_s,
        )


def await_token(port: int, model: str, began_s: float) -> None:
    """Until the whole system answers a chat. Raises OSError."""
    asked = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5.0) as answer:
            if b"[DONE]" in answer.read():
                return
        if time.monotonic() - began_s > START_S:
            raise OSError(f"nothing answers a chat at port {port} after {START_S:.0f} s")
        time.sleep(0.05)


def _commands(name: str, peers: Path) -> tuple[int, dict[str, list[str]], dict[str, str]]:
    """The port, the commands in the order of their start with the router last, and the environment."""
    ports, model = free_ports(4), str(bundled_model())
    python = str(python_of(peers, name))
    port, second, third, metrics = ports
    if name == DIRECT:
        worker = [sys.executable, "-m", "benchmarks.peers.client", "--port", str(port), "--step-s", str(STEP_S)]
        return port, {"worker": worker}, {}
    if name == SMG:
        script = str(Path(__file__).parent / "smg_worker.py")
        worker = [python, script, "--model", model, "--step-s", str(STEP_S)]
        return (
            port,
            {
                "prefill": [*worker, "--port", str(second), "--role", "prefill"],
                "decode": [*worker, "--port", str(third), "--role", "decode"],
                "smg": [
                    *(str(python_of(peers, name).parent / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
                    *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--pd-disaggregation"),
                    *("--prefill", f"grpc://127.0.0.1:{second}", "--decode", f"grpc://127.0.0.1:{third}"),
                    *("--policy", "cache_aware", "--worker-startup-check-interval", "1", "--model-path", model),
                ],
            },
            {},
        )
    mocker = [python, "-m", "dynamo.mocker", "--model-path", model, "--model-name", "model"]
    store = peers / "discovery"
    store.mkdir(exist_ok=True)
    for file in sorted(store.rglob("*"), reverse=True):  # of the workers of an earlier run
        file.rmdir() if file.is_dir() else file.unlink()
    commands = {}
    for role, step_ms in (("prefill", 0.0), ("decode", STEP_S * 1e3)):
        engine = {
            "backend": "vllm",
            "worker_type": role,
            "block_size": 16,
            "num_gpu_blocks": 65536,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 131072,
            "timing_model": {"type": "fixed", "prefill_ms": 0.0, "decode_ms": step_ms},
        }
        file = store.parent / f"mocker_{role}.json"
        file.write_text(json.dumps({"engine": engine}))
        commands[role] = [*mocker, "--extra-engine-args", str(file), "--disaggregation-mode", role]
    commands["frontend"] = [
        *(python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"),
        *("--kv-cache-block-size", "16", "--namespace", "bench"),
    ]
    env = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(store), "DYN_NAMESPACE": "bench", "HF_HUB_OFFLINE": "1"}
    return port, commands, env


@contextmanager
def _process(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[int]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
