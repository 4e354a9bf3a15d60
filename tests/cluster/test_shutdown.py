"""The end of `pdserve up`, and of its router, with 50 streams: each ends complete or with an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from pdserve import AsyncClient
from pdserve.client.retries import Retries
from pdserve.core.errors import Unavailable
from pdserve.launch.running import Running

WORDS = "the server is shutting down; retry"
DRAIN_S = 1.0
EACH = 25  # streams over HTTP, and as many over gRPC
FLAGS = (
    *("--model=toy", "--prefill=0", "--decode=1", "--http=0"),
    *("--set", f"router.drain_s={DRAIN_S}", "--set", f"gateway.drain_s={DRAIN_S}", "--set", "worker.toy_step_s=0.02"),
)


MOST_TOKENS = 2000  # of a stream that does not end within the drain


async def over_http(http: httpx.AsyncClient, url: str, number: int, tokens: int, begun: asyncio.Semaphore) -> str:
    body = {"prompt": f"stream {number}", "max_tokens": tokens, "stream": True}
    async with http.stream("POST", f"{url}/completions", json=body) as answer:
        last = ""
        async for line in answer.aiter_lines():
            if line:
                if not last:
                    begun.release()
                last = line.removeprefix("data: ")
    return "complete" if last == "[DONE]" else str(json.loads(last)["error"]["message"])


async def over_grpc(client: AsyncClient, number: int, tokens: int, begun: asyncio.Semaphore) -> str:
    try:
        stream = client.stream(f"stream {number}", max_tokens=tokens)
        is_first = True
        async for _ in stream:
            if is_first:
                begun.release()
            is_first = False
    except Unavailable as error:
        return error.message
    return "complete" if stream.completion.choices else "cut"


async def ends(cluster: Running, act: Callable[[], None], most_tokens: int = MOST_TOKENS) -> list[str]:
    """How each stream ends if `act` happens after all have begun: the HTTP streams first. A fifth of them is short."""
    tokens = [20 if number % 5 == 0 else most_tokens for number in range(EACH)]
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=EACH)
    async with (
        httpx.AsyncClient(timeout=60.0, limits=limits) as http,
        AsyncClient(cluster.target, retries=Retries(limit=0, resume_s=0.0)) as client,
    ):
        streams = [
            *(
                asyncio.create_task(over_http(http, cluster.http_url, number, most, begun))
                for number, most in enumerate(tokens)
            ),
            *(asyncio.create_task(over_grpc(client, number, most, begun)) for number, most in enumerate(tokens)),
        ]
        for _ in streams:
            await begun.acquire()
        await asyncio.to_thread(act)
        return list(await asyncio.gather(*streams))


@pytest.mark.parametrize("is_hurried", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_stream_ends_complete_or_with_the_error_event(is_hurried: bool) -> None:
    with Running.start(*FLAGS) as cluster:
        check_end(cluster, is_hurried=is_hurried)


def test_calls_end_with_an_error_if_a_router_or_the_cluster_ends() -> None:
    """The gateway, a process of its own, resumes its calls when the router is killed."""
    with Running.start(*FLAGS, "--http-process") as cluster:
        pid = cluster.pid("router")
        found = asyncio.run(ends(cluster, lambda: os.kill(pid, signal.SIGKILL), most_tokens=100))
        assert found[:EACH] == ["complete"] * EACH, "the gateway resumes its calls"
        assert "cut" not in found[EACH:], "each has an error"
        assert set(found[EACH:]) != {"complete"}
        cluster.wait_restarted("router", pid)
        check_end(cluster, is_hurried=True)


def check_end(cluster: Running, *, is_hurried: bool) -> None:
    """Ends the cluster while streams run. A second signal, if it `is_hurried`, ends it at once."""

    def end() -> None:
        cluster.process.send_signal(signal.SIGTERM)
        if is_hurried:
            cluster.wait_line("draining")
            cluster.process.send_signal(signal.SIGINT)

    found = asyncio.run(ends(cluster, end))
    assert set(found) <= {"complete", WORDS}
    assert WORDS in found[:EACH]
    assert WORDS in found[EACH:]
    assert cluster.process.wait(60.0) == 0


def test_folders_and_certificates_end_with_the_cluster(tmp_path: Path) -> None:
    """Also the folder of a killed worker. The log level, which hides lower records, holds until the end."""
    code = "import os; from pdserve.owned_folder import OwnedFolder as F; F.make('vllm'); os.kill(os.getpid(), 9)"
    env = {"TMPDIR": str(tmp_path)}
    flags = ("--model", "toy", "--prefill", "0", "--tls", "auto", "--log-level", "error")
    with Running.start(*flags, env=env) as cluster:
        assert list(tmp_path.glob("pdserve-run-*/**/*.key"))
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=False)
        assert [path.name for path in tmp_path.glob("pdserve-run-vllm-*")]
        assert cluster.stop() == 0
    assert list(tmp_path.glob("pdserve-run-*")) == []
    assert not [line for line in cluster.lines if " INFO " in line or " WARNING " in line]
