"""Real workers over the toy engine, as processes; routers on the test's own event loop or as processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import AsyncClient
from pdserve.client.retries import Retries
from pdserve.config import RouterConfig
from pdserve.owned_folder import OwnedFolder
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from router.service.server import RouterServer
from tests.support.cluster_secret import TEXT
from tests.unit.router_io.processes import Program, Start, programs

SLOW_STEP_S = 0.02
PATIENT: dict[str, Any] = {"slo_ttft_s": 100.0, "slo_tpot_s": 10.0}  # targets that a busy machine meets


@pytest.fixture(scope="package")
def start_for_package() -> Iterator[Start]:
    with programs() as start:
        yield start


@pytest.fixture
def start() -> Iterator[Start]:
    with programs() as start:
        yield start


@pytest.fixture(scope="package")
def decode(start_for_package: Start) -> Program:
    return start_for_package("decode_worker", "--model=toy", "--worker-id=d0", "--heartbeat-s=0.05")


@pytest.fixture(scope="package")
def prefill(start_for_package: Start) -> Program:
    return start_for_package("prefill_worker", "--model=toy", "--worker-id=p0", "--heartbeat-s=0.05")


@pytest.fixture(scope="package")
def slow_decode(start_for_package: Start) -> Program:
    """Each step takes SLOW_STEP_S, so that a test can act in the middle of an answer."""
    return start_for_package(
        "decode_worker", "--model=toy", "--worker-id=d1", "--heartbeat-s=0.05", f"--toy-step-s={SLOW_STEP_S}"
    )


@dataclass
class Front:
    """A router, and the client of a test."""

    server: RouterServer
    client: AsyncClient
    channel: grpc.aio.Channel
    stub: Any
    cluster: Any

    @property
    def num_workers(self) -> int:
        return sum(one.is_connected for one in self.server.runtime.state.snapshot().workers)

    async def health(self, service: str = "pdserve.v1.InferenceService") -> str:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def topology(self) -> cluster_pb2.GetTopologyResponse:
        return await self.cluster.GetTopology(cluster_pb2.GetTopologyRequest())

    async def all_free(self) -> bool:
        """No worker has a referenced block, and the router has no request."""
        topology = await self.topology()
        is_free = all(one.load.running == 0 and one.load.waiting == 0 for one in topology.workers)
        return is_free and self.server.runtime.state.is_empty


Connect = Callable[..., Awaitable[Front]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Starts a router on this loop; returns once as many workers as it was given are attached."""
    fronts: list[Front] = []

    async def start_router(*workers: Program, metrics: Metrics | None = None, **settings: Any) -> Front:
        addresses = tuple(one.address for one in workers)
        settings = {"model": "toy", "port": 0, "cluster_secret": TEXT, "workers": addresses, **settings}
        server = RouterServer(RouterConfig(**settings), metrics=metrics)
        address = await server.start()
        channel = grpc.aio.insecure_channel(address)
        front = Front(
            server,
            AsyncClient(address, token=settings.get("token"), retries=Retries(limit=0)),
            channel,
            inference_pb2_grpc.InferenceServiceStub(channel),
            cluster_pb2_grpc.ClusterServiceStub(channel),
        )
        fronts.append(front)
        await until(lambda: front.num_workers >= len(workers))
        return front

    yield start_router
    for front in fronts:
        await front.client.close()
        await front.channel.close()
        await front.server.stop()
        front.server.runtime.state.check()


ConnectTwo = Callable[..., Awaitable[list[Front]]]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = OwnedFolder.for_socket("test", "router-0.sock")
    yield made.path
    made.remove()


@pytest.fixture
async def connect_two(connect: Connect, folder: Path) -> ConnectTwo:
    async def start(*workers: Program, **settings: Any) -> list[Front]:
        return [
            await connect(
                *workers,
                **{
                    "group": str(folder),
                    "member": one,
                    "members": 2,
                    "router_id": f"router-{one}",
                    **PATIENT,
                    **settings,
                },
            )
            for one in range(2)
        ]

    return start


async def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Waits for a condition, plain or async."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = holds()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
