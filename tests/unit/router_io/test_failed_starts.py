"""A router or a gateway whose start fails leaves nothing open: no thread, descriptor or port."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.config import GatewayConfig, RouterConfig, with_gateway
from pdserve.gateway import server as gateway_server
from pdserve.gateway.server import GatewayHost
from pdserve.telemetry.metrics import MetricsServer
from router.service import program
from router.service import server as router_server
from router.service.program import RouterHost
from router.service.server import RouterServer
from tests.support.cluster_secret import TEXT
from tests.support.failed_starts import Injected, Open, calls_of, fail_in, name_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_error_while_a_router_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call of each function. It has a port of metrics, a recording, and counts that routers share."""
    tmp_path.chmod(0o700)
    serve = MetricsServer.serve_forever
    monkeypatch.setattr(MetricsServer, "serve_forever", lambda self: serve(self, 0.005))  # so that it ends soon
    config = RouterConfig(
        model="toy",
        cluster_secret=TEXT,
        port=0,
        metrics_port=free_port(),
        record=str(tmp_path / "record"),
        group=str(tmp_path),
    )
    made, codes = calls_of(lambda: RouterHost(config))
    made.stop()
    del made
    before, num_raised = Open(), 0
    for code in codes:
        try:
            fail_in(code, lambda: RouterHost(config)).stop()
        except Injected:
            num_raised += 1
        before.until_nothing_is_left(name_of(code))
    assert num_raised > 50


def test_a_router_without_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("too many open files")

    before = Open()
    monkeypatch.setattr(program, "asyncio", SimpleNamespace(new_event_loop=fail))
    with pytest.raises(OSError, match="too many"):
        RouterHost(RouterConfig(model="toy", cluster_secret=TEXT, port=0, metrics_port=free_port()))
    before.until_nothing_is_left("new_event_loop")


async def test_a_router_ends_each_part_also_if_all_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(router_server, "WORKERS_S", 0.0)  # it has none
    server = RouterServer(RouterConfig(model="toy", cluster_secret=TEXT, port=0, group=str(tmp_path)))
    await server.start()
    done: list[str] = []

    def failing(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def end(*arguments: Any) -> Any:
            result = act(*arguments)
            return finish(result) if inspect.isawaitable(result) else fail()

        async def finish(result: Awaitable[Any]) -> None:
            await result
            fail()

        def fail() -> None:
            done.append(name)
            raise Injected

        return end

    steps = [
        "_runtime.submit",
        "_health.enter_graceful_shutdown",
        "_watching.close",
        "_local.stop",
        "_group.close",
        "_runtime.close",
        "gate.close",
        "_workers.close",
        "_admission.close",
        "_grammars.close",
    ]
    tasks = list(server._tasks)
    with monkeypatch.context() as patched:
        for step in steps:
            part, method = step.split(".")
            owner = getattr(server, part)
            patched.setattr(owner, method, failing(step, getattr(owner, method)))
        patched.setattr(server, "close", failing("close", server.close))
        with pytest.raises(Injected):
            await server.stop()
    assert done == [*steps, "close"]
    assert tasks
    assert all(one.done() for one in tasks)
    assert server._shared_counts is not None
    assert server._shared_counts.is_closed


@pytest.mark.parametrize("step", ["set_options", "Gateway", "_uvicorn_config", "Arrivals"])
def test_an_error_while_a_gateway_starts(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Open()
    port = free_port()

    def fail(*arguments: Any, **named: Any) -> Any:
        raise Injected

    monkeypatch.setattr(gateway_server, step, fail)
    host = GatewayHost(GatewayConfig(router="127.0.0.1:1", port=port, metrics_port=free_port()))
    with pytest.raises(Injected):
        host.start()
    before.until_nothing_is_left(step)


def test_a_gateway_that_cannot_end_leaves_its_router_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router ends its own parts also then."""
    config = RouterConfig(model="toy", cluster_secret=TEXT, port=0)
    host = RouterHost(with_gateway(config, GatewayConfig(router="", port=0)))
    router_host, port = host.start().rsplit(":", 1)
    gateway = host._gateway
    assert gateway is not None
    stop = gateway.stop

    async def fail() -> None:
        await stop()
        raise Injected

    monkeypatch.setattr(gateway, "stop", fail)
    host.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((router_host, int(port)))
