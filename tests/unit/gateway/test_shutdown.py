"""The end of a gateway: what the client of each kind of request sees."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import pytest

from pdserve import Client
from pdserve.client.retries import Retries
from pdserve.core.errors import PdserveError, ShuttingDown
from pdserve.gateway.asgi import RequestRunner
from pdserve.gateway.door import Shutdown
from pdserve.gateway.server import GatewayHost
from pdserve.telemetry.metrics import Metrics
from pdserve.testing import Cluster
from pdserve.wire.status import not_connected
from tests.unit.client.conftest import Script, delta, finished, listening, started
from tests.unit.gateway.conftest import WAIT_S, Served, gateway, is_idle, until

WORDS = "the server is shutting down; retry"
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
MESSAGES = [{"role": "user", "content": "count"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "count", **LONG, "stream": True},
    "/v1/chat/completions": {"messages": MESSAGES, **LONG, "stream": True},
    "/v1/responses": {"input": "count", "max_output_tokens": 900, "ignore_eos": True, "stream": True},
}
ENDS: dict[str, Callable[[GatewayHost], None]] = {"drain": GatewayHost.drain, "stop": GatewayHost.stop}


@contextmanager
def streaming(host: GatewayHost, path: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    how = ("POST", STREAMS[path]) if path in STREAMS else ("GET", None)
    with httpx.stream(how[0], f"http://{host.address}{path}", json=how[1], timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))
        yield lines


def last_event(lines: Iterator[str]) -> Any:
    return json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))


async def test_the_end_waits_for_the_errors_and_not_only_for_their_causes() -> None:
    """The process ends next, so what is not sent by then is lost. A client may be slow to take the error."""
    shutdown, is_failing, client_reads = Shutdown(), asyncio.Event(), asyncio.Event()
    runner = RequestRunner(shutdown, Metrics("gateway"))
    statuses: list[int] = []

    async def handle(*_: Any) -> int:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(message: Any) -> None:
        is_failing.set()
        await client_reads.wait()
        statuses.append(message.get("status", 0))

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    answering = asyncio.create_task(runner.run("/v1/models", handle, scope, None, send))
    await asyncio.sleep(0)
    ending = asyncio.create_task(shutdown.interrupt(WAIT_S))
    await is_failing.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not ending.done()
    client_reads.set()
    await ending
    assert statuses == [503, 0]
    await answering


async def test_the_end_does_not_wait_for_a_client_that_never_reads() -> None:
    shutdown = Shutdown()
    with shutdown.answering():
        await shutdown.interrupt(0.01)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_ends_with_an_error_event(bundled: Served, path: str, end: str) -> None:
    with gateway(bundled.router, drain_s=0.1) as host, streaming(host, path) as lines:
        ENDS[end](host)
        last = last_event(lines)
        error = last["response"]["error"] if last.get("type") == "response.failed" else last.get("error", last)
        assert error["message"] == WORDS
        assert host.wait(WAIT_S)
    until(lambda: is_idle(bundled.sdk))


def test_a_live_view_ends_with_an_error_event(bundled: Served) -> None:
    with gateway(bundled.router, drain_s=WAIT_S) as host, streaming(host, "/ui/events") as lines:
        host.drain()  # which does not wait for viewers
        assert last_event(lines)["error"]["message"] == WORDS
        assert host.wait(WAIT_S)


def test_a_whole_answer_becomes_a_503(bundled: Served) -> None:
    found: list[httpx.Response] = []
    with gateway(bundled.router, drain_s=0.1) as host:
        url = f"http://{host.address}/v1/completions"
        body = {**STREAMS["/v1/completions"], "stream": False}
        asking = threading.Thread(target=lambda: found.append(httpx.post(url, json=body, timeout=WAIT_S)))
        asking.start()
        until(lambda: bundled.sdk.topology().running_requests == 1)
        host.drain()
        asking.join()
    [answer] = found
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, WORDS)
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")


def test_new_requests_are_rejected_during_the_drain(bundled: Served) -> None:
    with gateway(bundled.router, drain_s=WAIT_S) as host, streaming(host, "/v1/completions") as lines:
        assert httpx.get(f"http://{host.address}/health").status_code == 200
        host.drain()
        until(lambda: httpx.get(f"http://{host.address}/health").status_code == 503)
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/ui/events")):
            late = httpx.request(method, f"http://{host.address}{path}", json={"prompt": "x"})
            assert (late.status_code, late.json()["error"]["message"]) == (503, WORDS)
            assert late.headers["connection"] == "close"
        assert [line for line in lines if line][-1] == "data: [DONE]", "the running one ends complete"
        assert host.wait(WAIT_S)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_router_that_ends_below_the_gateway_says_so(is_streamed: bool) -> None:
    with Cluster(worker={"toy_step_s": 0.02}) as cluster, gateway(cluster.address) as host:
        body = {"prompt": "x", "max_tokens": 2000, "stream": is_streamed}
        with Client(cluster.address) as sdk, httpx.Client(timeout=WAIT_S) as http:
            request = http.build_request("POST", f"http://{host.address}/v1/completions", json=body)
            found: list[str] = []

            def ask() -> None:
                answer = http.send(request)
                found.append(answer.text)

            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: sdk.topology().running_requests == 1)
            cluster.stop()
            asking.join()
    last = [line for line in found[0].splitlines() if line][-1].removeprefix("data: ")
    assert json.loads(last)["error"]["message"] == WORDS


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("error", [not_connected("no server answers at h:1 (refused)"), ShuttingDown()])
def test_the_names_of_tokens_are_asked_of_the_next_router(is_streamed: bool, error: PdserveError) -> None:
    """An answer with logprobs needs them, and its router may have ended after the token."""
    script = Script()
    message = delta("a", 97)
    message.delta.logprobs.add(token_id=97, logprob=-0.5)
    script.says(started(), message, finished())
    with listening(script) as router, gateway(router) as host:
        script.token_errors += [error, not_connected("Socket closed")]
        body = {"prompt": [1], "logprobs": 0, "stream": is_streamed}
        found = httpx.post(f"http://{host.address}/v1/completions", json=body, timeout=WAIT_S)
    assert (found.status_code, script.token_errors) == (200, [])
    assert '"tokens":["a"]' in found.text.replace(" ", "")


def test_grpc_streams_and_viewers_of_a_router_that_ends_get_the_words() -> None:
    with (
        Cluster(worker={"toy_step_s": 0.02}) as cluster,
        Client(cluster.address, retries=Retries(limit=0, resume_s=0.0)) as sdk,
        sdk.stream("x", max_tokens=2000) as stream,
    ):
        next(stream)
        frames = sdk.watch(0.1)
        next(frames)
        ending = threading.Thread(target=cluster.stop)
        ending.start()
        for one in (stream, frames):
            with pytest.raises(ShuttingDown) as caught:
                for _ in one:
                    pass
            assert caught.value.message == WORDS
        ending.join()


def test_a_gateway_that_leaves_its_port_tells_new_connections_why(toy: Served) -> None:
    with gateway(toy.router) as host, socket.create_connection(host.address.split(":"), timeout=WAIT_S) as client:
        client.sendall(b"GET /version")  # the rest is on its way
        until(lambda: bool(host._server._connections.idle))
        asyncio.run_coroutine_threadsafe(host._server.drain(leaves_port=True), host._loop)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
