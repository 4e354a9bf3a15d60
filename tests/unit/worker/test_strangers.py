"""Callers of a worker that do not know the cluster's secret: rejected before a message is read, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.program import make_host
from pdserve.config import WorkerConfig
from pdserve.core.access.proof import ClusterSecret, Identity
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import peer_pb2, peer_pb2_grpc, transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.wire import peers
from tests.support.cluster_secret import ROUTER, SECRET
from tests.support.cluster_secret import attach as proven_attach

PROMPT = list(range(10, 31))
STRANGER = Identity.of(ClusterSecret("a guess of the secret"), "router", "router-0", "1")
PREFILL = Identity.of(SECRET, "worker", "p0", "1")
LOCAL = (("grpc.use_local_subchannel_pool", 1),)
Attack = Callable[[Any, str], Awaitable[Any]]


async def no_proof(channel: Any, address: str) -> Any:
    """Sends its messages without waiting for an answer. grpc's own thread writes them, because with grpc.aio a write
    after the rejection replaces the status with INTERNAL."""
    messages = [
        worker_pb2.AttachRequest(hello=worker_pb2.RouterHello(router_id="stranger")),
        worker_pb2.AttachRequest(drain=worker_pb2.DrainWorker()),
    ]

    def call() -> Any:
        with grpc.insecure_channel(address, options=LOCAL) as blocking:
            return next(worker_pb2_grpc.WorkerServiceStub(blocking).Attach(iter(messages)))

    return await asyncio.to_thread(call)


async def garbage(channel: Any, address: str) -> Any:
    proof = ((peers.PROOF_KEY, b"\xff" * 64),)
    return await worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=proof).read()


async def oversized(channel: Any, address: str) -> Any:
    proof = ((peers.PROOF_KEY, peer_pb2.CallProof(caller="x" * 4000).SerializeToString()),)
    return await worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=proof).read()


async def wrong_secret(channel: Any, address: str) -> Any:
    """Takes the challenge, and makes a proof with a guessed secret."""
    introduction = peers.introduce(STRANGER, peers.ATTACH, address)
    request = peer_pb2.GetChallengeRequest(target=address, nonce=introduction.nonce)
    challenge = (await peer_pb2_grpc.PeerServiceStub(channel).GetChallenge(request)).challenge
    mac = STRANGER.secret.mac("greeting", address, challenge, introduction.nonce)
    made = introduction.greeted(challenge, mac)
    proof = peer_pb2.CallProof(
        role=made.role,
        caller=made.caller,
        target=made.target,
        challenge=made.challenge,
        nonce=made.nonce,
        mac=made.mac,
    )
    return await (
        worker_pb2_grpc.WorkerServiceStub(channel)
        .Attach(metadata=((peers.PROOF_KEY, proof.SerializeToString()),))
        .read()
    )


async def replay(channel: Any, address: str) -> Any:
    proof = await peers.prove(channel, peers.introduce(ROUTER, peers.ATTACH, address))
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    first = stub.Attach(metadata=proof)
    await first.initial_metadata()  # It was accepted.
    first.cancel()
    return await stub.Attach(metadata=proof).read()


async def another_method(channel: Any, address: str) -> Any:
    proof = await peers.prove(channel, peers.introduce(ROUTER, peers.ATTACH, address))
    return await transfer_pb2_grpc.TransferServiceStub(channel).Open(transfer_pb2.OpenRequest(), metadata=proof)


async def open_without_proof(channel: Any, address: str) -> Any:
    request = transfer_pb2.OpenRequest(sender_id="p0", sender_incarnation="1")
    return await transfer_pb2_grpc.TransferServiceStub(channel).Open(request)


async def open_as_a_router(channel: Any, address: str) -> Any:
    proof = await peers.prove(channel, peers.introduce(ROUTER, peers.OPEN, address))
    return await transfer_pb2_grpc.TransferServiceStub(channel).Open(transfer_pb2.OpenRequest(), metadata=proof)


async def attach_as_a_worker(channel: Any, address: str) -> Any:
    return await proven_attach(channel, address, PREFILL)


async def wrong_address(channel: Any, address: str) -> Any:
    return await peers.prove(channel, peers.introduce(ROUTER, peers.ATTACH, "10.0.0.7:1"))


@pytest.mark.parametrize(
    "attack",
    [
        no_proof,
        garbage,
        oversized,
        wrong_secret,
        replay,
        another_method,
        open_without_proof,
        open_as_a_router,
        attach_as_a_worker,
        wrong_address,
    ],
    ids=lambda value: value.__name__,
)
async def test_a_stranger_is_rejected_and_counted(start: Any, attach: Any, ask: Any, attack: Attack) -> None:
    d = start(Role.DECODE)
    metrics = d.host._metrics = Metrics("worker")
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        with pytest.raises((grpc.RpcError, Unauthenticated)) as caught:
            await asyncio.wait_for(attack(channel, d.address), 60)
    error = caught.value
    assert isinstance(error, Unauthenticated) or error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert f'{metric_names.REJECTED_CALLS.name}{{reason="UNAUTHENTICATED"}} 1.0' in metrics.text()
    assert not await d.on_engine(lambda program: program.is_draining)
    router = await attach(d)  # And the cluster continues.
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)


async def test_an_undeclared_call_is_rejected(start: Any) -> None:
    d = start(Role.DECODE)
    metrics = d.host._metrics = Metrics("worker")
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/pdserve.v1.WorkerService/Format")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert f'{metric_names.REJECTED_CALLS.name}{{reason="UNKNOWN_METHOD"}} 1.0' in metrics.text()


async def test_health_needs_no_proof(start: Any) -> None:
    d = start(Role.DECODE)
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        answered = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
    assert answered.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_rejected_caller_gets_the_reason(start: Any) -> None:
    d = start(Role.DECODE)
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        with pytest.raises(Unauthenticated, match="caller is a worker; only a router may call"):
            await proven_attach(channel, d.address, PREFILL)


async def test_a_caller_does_not_trust_a_server_with_another_secret(start: Any) -> None:
    d = start(Role.DECODE, cluster_secret="not the one of the tests")
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        with pytest.raises(Unauthenticated, match="did not prove that it knows the cluster's secret"):
            await peers.prove(channel, peers.introduce(ROUTER, peers.ATTACH, d.address))


@pytest.mark.parametrize("secret", ["", "too short"])
def test_a_worker_without_a_secret_does_not_start(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster_secret: got .* set PDSERVE_CLUSTER_SECRET"):
        make_host(WorkerConfig(model="toy", worker_id="d", cluster_secret=secret))


def test_every_method_of_our_services_on_a_worker_has_a_policy() -> None:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in (
            (worker_pb2, "WorkerService"),
            (transfer_pb2, "TransferService"),
            (peer_pb2, "PeerService"),
        )
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods <= set(peers.POLICY)
    assert {method for method in methods if peers.POLICY[method] == peers.ANYONE} == {
        "/pdserve.v1.PeerService/GetChallenge"
    }


async def test_a_sender_is_identified_by_its_proof(start: Any) -> None:
    d = start(Role.DECODE)
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        proof = await peers.prove(channel, peers.introduce(PREFILL, peers.OPEN, d.address))
        request = transfer_pb2.OpenRequest(sender_id="p1", sender_incarnation="1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await transfer_pb2_grpc.TransferServiceStub(channel).Open(request, metadata=proof)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert caught.value.details() == "sender_id: got 'p1', expected the worker that makes the call, 'p0/1'"
