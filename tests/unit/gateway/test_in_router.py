"""The gateway in the router's process: what differs from a process of its own."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pdserve import Client
from pdserve.client.retries import Retries
from pdserve.config import GatewayConfig, HttpRouterConfig, RouterConfig, with_gateway
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.gateway.bodies import Bodies
from pdserve.testing import Cluster
from router.service.program import RouterHost
from tests.unit.gateway.conftest import PATIENT, WAIT_S

TOKEN = "operator-token-of-32-characters-"
SLOW: dict[str, Any] = {"toy_step_s": 0.02}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(prefill=0, gateway={}, router=PATIENT, worker=SLOW) as cluster:
        yield cluster


def router_of(cluster: Cluster) -> RouterHost:
    found = cluster._hosts["router"]
    assert isinstance(found, RouterHost)
    return found


def openai_of(cluster: Cluster, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key=token, max_retries=0)


def get(cluster: Cluster, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(cluster.http_address, timeout=WAIT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def stream(client: openai.OpenAI, num_tokens: int) -> Iterator[str | None]:
    chunks = client.completions.create(
        model="toy", prompt="hello", max_tokens=num_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in chunks:
        yield chunk.choices[0].finish_reason


def until(holds: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_answers_are_those_of_the_sdk(cluster: Cluster) -> None:
    with openai_of(cluster) as client, Client(cluster.address) as sdk:
        over_http = client.completions.create(model="toy", prompt="hello", max_tokens=8, temperature=0)
        assert over_http.choices[0].text == sdk.generate("hello", max_tokens=8, temperature=0.0).text
    assert get(cluster, "/health") == (200, b'{"status":"ok"}')


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    with openai_of(cluster) as client, Client(cluster.address) as sdk:
        chunks = client.completions.create(model="toy", prompt="hello", max_tokens=2000, stream=True)
        next(iter(chunks))
        assert sdk.topology().running_requests == 1
        chunks.response.close()
        until(lambda: sdk.topology().running_requests == 0)


def test_the_routers_rejections_reach_http() -> None:
    router = {**PATIENT, "token": TOKEN}
    with Cluster(prefill=0, gateway={}, router=router) as cluster:
        with openai_of(cluster, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai_of(cluster, TOKEN) as client:
            assert [one.id for one in client.models.list()] == ["toy"]
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                client.completions.create(model="toy", prompt="x", max_tokens=10**6)


def test_a_crash_of_a_handler_ends_its_request_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: Any) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(Bodies, "check", crash)
    with openai_of(cluster) as client, pytest.raises(openai.InternalServerError, match="the gateway failed"):
        client.completions.create(model="toy", prompt="x", max_tokens=1)
    monkeypatch.undo()
    with openai_of(cluster) as client:
        assert client.completions.create(model="toy", prompt="x", max_tokens=1).usage is not None
    assert router_of(cluster).is_healthy()


def test_the_end_of_the_http_server_ends_the_process(cluster: Cluster) -> None:
    host, fatal = router_of(cluster), threading.Event()
    host._on_fatal = fatal.set
    gateway = host._gateway
    assert gateway is not None
    assert gateway._server is not None
    host._loop.call_soon_threadsafe(setattr, gateway._server, "should_exit", True)
    assert fatal.wait(WAIT_S)


def test_a_drain_completes_streams_and_rejects_new_requests(cluster: Cluster) -> None:
    host = router_of(cluster)
    with openai_of(cluster) as client:
        reasons = stream(client, 60)
        next(reasons)
        host.drain()
        until(lambda: get(cluster, "/health")[0] == 503)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.completions.create(model="toy", prompt="x", max_tokens=1)
        assert list(reasons)[-1] == "length"
    assert host.wait(WAIT_S)
    assert not is_open(cluster.http_address)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_drain_over_its_time_tells_the_clients(cluster: Cluster, *, is_whole: bool) -> None:
    host = router_of(cluster)
    host.reload({"drain_s": 0.2, "gateway_drain_s": 0.2})

    def ask(client: openai.OpenAI) -> None:
        if is_whole:
            threading.Timer(0.1, host.drain).start()
            client.completions.create(model="toy", prompt="hello", max_tokens=2000, extra_body={"ignore_eos": True})
        else:
            reasons = stream(client, 2000)
            next(reasons)
            host.drain()
            list(reasons)

    with openai_of(cluster) as client, pytest.raises(openai.APIError, match="shutting down"):
        ask(client)
    assert host.wait(WAIT_S)


def test_stop_tells_the_clients_of_both_ports(cluster: Cluster) -> None:
    host = router_of(cluster)
    never = Retries(limit=0, resume_s=0.0)
    with openai_of(cluster) as client, Client(cluster.address, retries=never) as sdk:
        reasons = stream(client, 2000)
        next(reasons)
        over_grpc = sdk.stream("hello", max_tokens=2000, ignore_eos=True)
        next(over_grpc)
        host.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(reasons)
        with pytest.raises(PdserveError, match="shutting down"):
            list(over_grpc)


def test_new_settings_reach_the_gateway(cluster: Cluster) -> None:
    host = router_of(cluster)
    host.reload({"gateway_max_body_bytes": 1024, "max_new_tokens": 7})
    body = json.dumps({"prompt": "x" * 2000})

    def status() -> int:
        connection = http.client.HTTPConnection(cluster.http_address, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        found = connection.getresponse().status
        connection.close()
        return found

    until(lambda: status() == 413)
    with Client(cluster.address) as sdk:
        until(lambda: sdk.model().max_new_tokens == 7)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = with_gateway(
            RouterConfig(model="toy", port=0, cluster_secret="s" * 32), GatewayConfig(router="", port=port)
        )
        with pytest.raises(ConfigError, match=rf"^gateway_port: got {port} \(port in use\)"):
            RouterHost(config).start()


def test_without_http_there_is_no_gateway() -> None:
    config = HttpRouterConfig(model="toy", port=0, cluster_secret="s" * 32)
    host = RouterHost(config)
    host.start()
    assert host.http_address == ""
    host.stop()


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True
