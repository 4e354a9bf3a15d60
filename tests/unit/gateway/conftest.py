"""A cluster in this process, a gateway in front of it, and OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve import Client
from pdserve.config import GatewayConfig
from pdserve.gateway import storage
from pdserve.gateway.server import GatewayHost
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.testing import Cluster
from tests.support.tooled_model import BUNDLED, make_tooled_model

WAIT_S = 60.0
PATIENT_S = 120.0  # a busy machine is no failure
# Requests must not be late because other tests use the cores.
PATIENT = {"slo_ttft_s": 120.0, "slo_tpot_s": 20.0}


@dataclass(frozen=True)
class Served:
    router: str  # HOST:PORT
    address: str  # Of the gateway.
    openai: openai.OpenAI
    sdk: Client
    model: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def post(self, path: str, body: object) -> tuple[int, str]:
        """Status and text of an answer to a body that OpenAI's client would not send."""
        connection = http.client.HTTPConnection(self.address, timeout=60.0)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@contextmanager
def gateway(router: str, **settings: Any) -> Iterator[GatewayHost]:
    host = GatewayHost(GatewayConfig(router=router, port=0, **settings))
    host.start()
    try:
        yield host
    finally:
        host.stop()


@contextmanager
def serve(
    *,
    router: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    model: str = "toy",
    token: str | None = None,
    prefill: int = 1,
    in_router: bool = False,
    **settings: Any,
) -> Iterator[Served]:
    """Serves with these settings of the gateway."""
    both = {"model": model}
    with (
        Cluster(
            prefill=prefill,
            router={**PATIENT, **both, "token": token or "", **(router or {})},
            worker={**both, **(worker or {})},
            gateway=settings if in_router else None,
        ) as cluster,
        nullcontext() if in_router else gateway(cluster.address, **settings) as host,
        Client(cluster.address, token=token) as sdk,
    ):
        address = cluster.http_address if host is None else host.address
        with openai.OpenAI(base_url=f"http://{address}/v1", api_key=token or "none", max_retries=0) as client:
            yield Served(cluster.address, address, client, sdk, Path(model).name)


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@contextmanager
def serve_stored(redis: EmbeddedRedis, **settings: Any) -> Iterator[Served]:
    """Serves the bundled model, and stores in this Redis, for which calls wait patiently."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "TIMEOUT_S", PATIENT_S)
        with serve(model=str(BUNDLED), worker={"deterministic": "on"}, redis=redis.url, **settings) as served:
            yield served


def record_calls(store: Any, script: str) -> list[bytes]:
    """The first words of the answers of a store's script from now on. The list grows with each call."""
    told: list[bytes] = []
    run = getattr(store, script)

    async def call(*arguments: Any) -> Any:
        found = await run(*arguments)
        told.append(found[0])
        return found

    setattr(store, script, call)
    return told


@pytest.fixture(scope="package")
def bundled() -> Iterator[Served]:
    """The bundled model, which has a chat template, in deterministic mode: equal requests have equal answers. There is
    one worker, so that a prompt which was asked for before is cached where it runs."""
    with serve(model=str(BUNDLED), worker={"deterministic": "on"}, prefill=0) as served:
        yield served


@pytest.fixture(scope="package")
def toy() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def raw() -> Iterator[Callable[[str], socket.socket]]:
    """Opens connections to HOST:PORT."""
    opened: list[socket.socket] = []

    def connect(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        one = socket.create_connection((host, int(port)), timeout=WAIT_S)
        opened.append(one)
        return one

    yield connect
    for one in opened:
        one.close()


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes or resets the connection."""
    found = bytearray()
    while True:
        try:
            data = connection.recv(65_536)
        except ConnectionResetError:
            return bytes(found)
        if not data:
            return bytes(found)
        found += data


def until(holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "the condition did not hold in time"
        time.sleep(0.01)


def is_idle(sdk: Client) -> bool:
    seen = sdk.topology()
    return (
        seen.queued_requests == 0
        and seen.running_requests == 0
        and all(
            one.running == 0 and one.waiting == 0 and one.free_blocks + one.evictable_blocks == one.num_blocks
            for one in seen.workers
        )
    )


@pytest.fixture(scope="package")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model with a chat template that shows tools."""
    folder = make_tooled_model(tmp_path_factory.mktemp("models"))
    with serve(model=str(folder), worker={"deterministic": "on"}) as served:
        yield served
