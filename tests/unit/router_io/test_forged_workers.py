"""A forged worker in a router's list or in Redis receives no prompt and cannot forge a token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import redis.asyncio

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import peer_pb2, peer_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.service.server import RouterServer
from tests.support.cluster_secret import SECRET
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start

PROMPT = "a private matter"


class Forged(worker_pb2_grpc.WorkerServiceServicer, peer_pb2_grpc.PeerServiceServicer):
    """Stores all messages that it receives. `victim` is a real worker, to which it forwards the caller's proof if it
    can."""

    def __init__(self, victim: str = "") -> None:
        self.heard: list[Any] = []
        self.num_dialled = 0
        self._victim = victim

    async def GetChallenge(self, request: peer_pb2.GetChallengeRequest, context: Any) -> peer_pb2.GetChallengeResponse:
        self.num_dialled += 1
        if not self._victim:
            return peer_pb2.GetChallengeResponse(challenge=b"c" * 16, mac=b"m" * 32)
        async with grpc.aio.insecure_channel(self._victim) as channel:
            ask = peer_pb2_grpc.PeerServiceStub(channel).GetChallenge
            for target in (request.target, self._victim):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    found = await ask(peer_pb2.GetChallengeRequest(target=target, nonce=request.nonce))
        return found

    async def Attach(self, request_iterator: Any, context: Any) -> None:
        self.num_dialled += 1
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self.heard.append(message)
            hello = worker_pb2.WorkerHello(worker_id="d9", incarnation="1", role=worker_pb2.ROLE_DECODE, model="toy")
            await context.write(worker_pb2.AttachResponse(hello=hello))


class Old(Forged):
    """Knows nothing of proofs."""

    async def GetChallenge(self, request: Any, context: Any) -> Any:
        self.num_dialled += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


@pytest.fixture(scope="module")
def registry() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture
async def forge() -> AsyncIterator[Callable[..., Any]]:
    """forge(servicer) serves it; returns its address."""
    servers: list[Any] = []

    async def begin(servicer: Any) -> str:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        await server.stop(None)


async def unproven(front: Any, metrics: Metrics, at_least: int) -> None:
    def count() -> float:
        [line] = [
            one for one in metrics.text().splitlines() if one.startswith(metric_names.UNPROVEN_WORKERS.name + " ")
        ]
        return float(line.rpartition(" ")[2])

    await until(lambda: count() >= at_least)


@pytest.mark.parametrize("kind", ["liar", "relay", "old"])
async def test_a_forged_worker_in_redis_gets_no_prompt(
    connect: Connect, start: Start, registry: EmbeddedRedis, forge: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack of the review: `d9` is written into Redis as a decode worker."""
    cluster = f"c-{kind}"
    monkeypatch.setenv("PDSERVE_REDIS", registry.url)
    real = start("decode_worker", "--model=toy", "--worker-id=d0", f"--cluster={cluster}")
    forged = {"liar": Forged, "relay": lambda: Forged(real.address), "old": Old}[kind]()
    address = await forge(forged)
    async with redis.asyncio.Redis.from_url(registry.url) as client:
        await client.sadd(f"{{pd:{cluster}}}:workers", "d9")
        facts = json.dumps({"role": "decode", "endpoint": address})
        await client.hset(f"{{pd:{cluster}}}:worker:d9", mapping={"incarnation": "1", "facts": facts})
    metrics = Metrics("router")
    front = await connect(redis=registry.url, cluster=cluster, metrics=metrics)
    await until(lambda: front.num_workers == 1)
    await unproven(front, metrics, 2)
    for _ in range(6):
        done = await front.client.generate(PROMPT, max_tokens=6, temperature=0)
        assert done.text.encode() == bytes(answer(list(PROMPT.encode()), 6))
    assert [one.worker_id for one in (await front.topology()).workers] == ["d0"]
    assert forged.num_dialled >= 2
    assert forged.heard == []


async def test_a_worker_of_another_cluster_gets_nothing(connect: Connect, forge: Any) -> None:
    forged, metrics = Forged(), Metrics("router")
    front = await connect(workers=(await forge(forged),), metrics=metrics)
    await unproven(front, metrics, 2)
    assert (front.num_workers, forged.heard) == (0, [])


async def test_a_router_with_another_secret_gets_no_worker(connect: Connect, decode: Program) -> None:
    metrics = Metrics("router")
    front = await connect(workers=(decode.address,), cluster_secret="not the workers' one", metrics=metrics)
    await unproven(front, metrics, 2)
    assert front.num_workers == 0


async def test_a_worker_in_the_list_may_be_called_localhost(connect: Connect, decode: Program) -> None:
    front = await connect(workers=(decode.address.replace("127.0.0.1", "localhost"),))
    await until(lambda: front.num_workers == 1)


async def test_a_router_without_a_secret_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"cluster_secret: got nothing, .*set PDSERVE_CLUSTER_SECRET"):
        RouterServer(RouterConfig(model="toy", port=0))


async def test_no_message_is_sent_before_the_answer_to_the_call(forge: Any, connect: Connect, decode: Program) -> None:
    """A false worker that has passed the greeting, as by taking over the port right after it, still learns nothing."""

    class TookOver(Forged):
        async def GetChallenge(self, request: Any, context: Any) -> Any:
            self.num_dialled += 1
            mac = SECRET.mac("greeting", request.target, b"c" * 16, request.nonce)
            return peer_pb2.GetChallengeResponse(challenge=b"c" * 16, mac=mac)

        async def Attach(self, request_iterator: Any, context: Any) -> None:
            await context.send_initial_metadata((("pdserve-answer-bin", b"m" * 32),))
            await super().Attach(request_iterator, context)

    forged, metrics = TookOver(), Metrics("router")
    await connect(workers=(await forge(forged),), metrics=metrics)
    await unproven(None, metrics, 2)
    assert forged.heard == []
