"""Who may call, health, reflection, draining, and the process as an operator starts it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pdserve import AsyncClient, Client
from pdserve.build import FULL_VERSION
from pdserve.client.retries import Retries
from pdserve.core.errors import ConfigError, InvalidRequest, NotFound, Unauthenticated, Unavailable
from pdserve.core.installation import VERSION_KEY
from pdserve.engine.toy import answer
from router.recording.replay import decode_step, replay
from router.service.auth import MAX_VERSIONS, POLICY, AuthInterceptor, ClientVersions, authorised
from router.service.program import RouterHost, make_router
from tests.support.cluster_secret import ENVIRONMENT, TEXT
from tests.unit.router_io.conftest import Connect, until
from tests.unit.router_io.processes import Program, Start, spawn

SERVICES = ("pdserve.v1.InferenceService", "pdserve.v1.ClusterService", "grpc.health.v1.Health")


def test_every_method_that_is_served_has_a_policy() -> None:
    import router.service.server  # noqa: F401 - puts the descriptors into the pool

    names = (*SERVICES, "pdserve.v1.RouterGroupService", "grpc.reflection.v1alpha.ServerReflection")
    served = {
        f"/{service}/{method.name}" for service in names for method in Default().FindServiceByName(service).methods
    }
    assert set(POLICY) == served


async def test_every_method_that_reflection_lists_is_implemented(connect: Connect) -> None:
    front = await connect()
    for service in SERVICES:
        for method in Default().FindServiceByName(service).methods:
            name = f"/{service}/{method.name}"
            call: Any = (
                front.channel.unary_stream(name)(b"")
                if method.server_streaming
                else front.channel.unary_unary(name)(b"")
            )
            code = None
            try:
                await (call.read() if method.server_streaming else call)
            except grpc.aio.AioRpcError as error:
                code = error.code()
            call.cancel()
            assert code is not grpc.StatusCode.UNIMPLEMENTED, name


async def test_health_lists_every_service(connect: Connect) -> None:
    front = await connect()
    found = await health_pb2_grpc.HealthStub(front.channel).List(health_pb2.HealthListRequest())
    assert set(found.statuses) == {"", *SERVICES[:2]}
    for name, one in found.statuses.items():
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(one.status) == await front.health(name)


def test_a_method_without_a_policy_is_refused() -> None:
    with pytest.raises(NotFound):
        authorised("/pdserve.v1.ClusterService/Explode", (), "", None)


@pytest.mark.parametrize("given", [None, "wrong", "right", "rightx", "Right"])
async def test_calls_need_the_token_and_health_does_not(connect: Connect, decode: Program, given: str | None) -> None:
    front = await connect(decode, token="right")
    async with AsyncClient(front.server.address, token=given, retries=Retries(limit=0)) as client:
        if given == "right":
            assert (await client.generate("hello", max_tokens=3, temperature=0)).text
            assert (await client.topology()).router_id == "router-0"
        else:
            for call in (client.generate("hello"), client.topology(), client.model(), client.tokenize("x")):
                with pytest.raises(Unauthenticated):
                    await call
    assert await front.health() == "SERVING"


async def test_health_watch_reports_every_change(connect: Connect, start: Start) -> None:
    decode = start("decode_worker", "--model=toy", "--worker-id=watched")
    front = await connect()
    watch = health_pb2_grpc.HealthStub(front.channel).Watch(
        health_pb2.HealthCheckRequest(service="pdserve.v1.InferenceService")
    )
    seen = [(await watch.read()).status]
    front.server._workers.dial([decode.address])
    seen.append((await watch.read()).status)
    decode.kill()
    seen.append((await watch.read()).status)
    names = [health_pb2.HealthCheckResponse.ServingStatus.Name(one) for one in seen]
    assert names == ["NOT_SERVING", "SERVING", "NOT_SERVING"]
    watch.cancel()


async def test_health_fails_while_all_decode_workers_are_drained(
    connect: Connect, decode: Program, caplog: pytest.LogCaptureFixture
) -> None:
    front = await connect(decode)
    service = "pdserve.v1.InferenceService"
    watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest(service=service))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    [worker] = (await front.client.topology()).workers
    with caplog.at_level("WARNING", logger="router.service.server"):
        await front.client.drain(worker.worker_id)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await front.client.undrain(worker.worker_id)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    assert [one.message for one in caplog.records if "drained" in one.message] == [
        "all decode workers are drained; `pdserve undrain WORKER` lets one serve again"
    ]


async def test_reflection_lists_the_services(connect: Connect) -> None:
    front = await connect()

    def listed() -> list[str]:
        with grpc.insecure_channel(front.server.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert set(SERVICES) <= set(await asyncio.to_thread(listed))


async def test_draining_finishes_running_requests(connect: Connect, slow_decode: Program) -> None:
    front = await connect(slow_decode)
    watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    running = asyncio.create_task(front.client.generate("hello", max_tokens=40, temperature=0))
    await until(lambda: front.server.runtime.num_calls == 1)
    draining = asyncio.create_task(front.server.drain())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(Unavailable) as caught:
        await front.client.generate("late")
    assert "shutting down" in caught.value.message
    done = await running
    assert done.text.encode() == bytes(answer(list(b"hello"), 40))
    await draining
    assert not front.server.is_healthy


async def test_a_router_with_a_failed_state_ends(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    crashes: list[BaseException] = []
    front.server._on_crash = crashes.append
    with pytest.raises(KeyError):
        front.server.runtime.submit("no event at all")  # type: ignore[arg-type]
    assert [type(one) for one in crashes] == [KeyError]
    assert not front.server.is_healthy

    async def is_not_serving() -> bool:
        return {await front.health(name) for name in ("", "pdserve.v1.InferenceService")} == {"NOT_SERVING"}

    await until(is_not_serving)


async def test_a_port_in_use_is_a_config_error(connect: Connect) -> None:
    front = await connect()
    port = int(front.server.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError) as caught:
        await connect(port=port)
    assert caught.value.field == "port"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--model=/nowhere/at/all"], "model"),
        (["--model=toy", "--host=0.0.0.0"], "host"),
        (["--model=toy", "--policy=dice"], "policy"),
        (["--model=toy", "--record=/nowhere/at/all"], "record"),
    ],
)
def test_a_wrong_flag_ends_the_process_with_its_name(flags: list[str], word: str) -> None:
    command = [sys.executable, "-m", "router", "--port=0", *flags]
    env = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"router: {word}: got")
    assert done.stdout == ""


def test_a_port_in_use_ends_the_process_with_its_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = spawn("router", "--model=toy", f"--port={port}")
        assert process.wait(60) == 2
        assert process.stdout is not None
        process.stdout.close()


def wait_for_workers(client: Client, count: int) -> None:
    deadline_s = time.monotonic() + 60.0
    while sum(one.is_connected for one in client.topology().workers) < count:
        assert time.monotonic() < deadline_s, "the workers were not attached in time"
        time.sleep(0.01)


def test_a_router_process_serves_records_and_drains_on_sigterm(
    start: Start, decode: Program, prefill: Program, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    router = start(
        "router", "--model=toy", "--port=0", f"--workers={decode.address},{prefill.address}", f"--record={record}"
    )
    prompt = "through three processes, with a prompt of more than sixteen tokens"
    with Client(router.address) as client:
        wait_for_workers(client, 2)  # the line is printed when the router listens, before workers are attached
        done = client.generate(prompt, max_tokens=10, temperature=0)
    assert done.text.encode() == bytes(answer(list(prompt.encode()), 10))
    assert done.timings.path == "remote"
    router.process.send_signal(signal.SIGTERM)
    assert router.process.wait(60) == 0
    lines = record.read_text().splitlines()
    assert list(replay(lines)) == []
    kinds = {type(decode_step(line).event).__name__ for line in lines[1:]}
    assert {"WorkerConnected", "RequestArrived", "FirstToken", "TokensArrived", "RouterClosing"} <= kinds
    assert prompt not in record.read_text()


def test_a_host_runs_a_router_on_its_own_thread(decode: Program) -> None:
    from pdserve.config import RouterConfig

    host: RouterHost = make_router(RouterConfig(model="toy", port=0, workers=(decode.address,), cluster_secret=TEXT))
    try:
        address = host.start()
        assert host.is_healthy()
        with Client(address) as client:
            wait_for_workers(client, 1)
            assert client.generate("hello", max_tokens=5, temperature=0).text.encode() == bytes(
                answer(list(b"hello"), 5)
            )
        host.drain()
        assert host.wait(60)
        assert not host.is_healthy()
    finally:
        host.stop()


def test_a_router_process_never_loads_torch() -> None:
    code = (
        "import sys, router.__main__, router.service.program\n"
        "from pdserve.config import RouterConfig\n"
        "router.service.program.make_router(RouterConfig(model='toy', port=0, cluster_secret='only for this test'))\n"
        "assert not {'torch', 'ray', 'numpy', 'redis', 'opentelemetry'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_calls_without_a_token_use_up_no_versions(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(details: Any) -> None: ...

    interceptor = AuthInterceptor("")
    for method, version in (
        ("/grpc.health.v1.Health/Check", "9.9.8"),
        ("/pdserve.v1.InferenceService/GetModel", "9.9.9"),
    ):
        call = SimpleNamespace(method=method, invocation_metadata=((VERSION_KEY, version),))
        await interceptor.intercept_service(serve, call)
    assert [one.__dict__["client_version"] for one in caplog.records] == ["9.9.9"]


def test_each_version_of_a_client_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such a client is served. The number of versions that are told apart has a bound."""
    versions = ClientVersions()
    other = (("authorization", "Bearer x"), (VERSION_KEY, "9.9.9+" + "x" * 1000))
    for metadata in (None, (), ((VERSION_KEY, FULL_VERSION),), ((VERSION_KEY, b"9"),), other, other):
        versions.note(metadata)
    assert [one.__dict__["client_version"] for one in caplog.records] == ["b'9'", f"9.9.9+{'x' * 26}"]
    for number in range(3 * MAX_VERSIONS):
        versions.note(((VERSION_KEY, f"9.9.{number}"),))
    assert len(caplog.records) < MAX_VERSIONS


async def test_a_client_of_another_version_is_served(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve.client.connect.FULL_VERSION", "9.9.9+abc")
    front = await connect(decode)
    assert (await front.client.model()).version == FULL_VERSION
    assert (await front.client.generate("hi", max_tokens=2)).usage.completion_tokens == 2
    [seen] = [one for one in caplog.records if one.message.startswith("a client has another version")]
    assert seen.__dict__["client_version"] == "9.9.9+abc"


async def test_a_running_router_takes_new_limits(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    live = {"slo_ttft_s": 77.0, "slo_tpot_s": 7.0, "max_new_tokens": 3, "max_held_bytes": 1024}
    front.server.reload({**live, "trace_share": 0.5, "drain_s": 1.0})
    assert (await front.client.model()).max_new_tokens == 3
    done = await front.client.generate("hi", max_tokens=3, request_id="after")
    assert done.usage.completion_tokens == 3
    explained = await front.client.explain("after")
    assert (explained.slo_ttft_s, explained.slo_tpot_s) == (77.0, 7.0)
    with pytest.raises(InvalidRequest, match="max_tokens: got 4"):
        await front.client.generate("hi", max_tokens=4)
    server = front.server
    assert (server._held.limit, server._tracing.share, server._config.drain_s) == (1024, 0.5, 1.0)
