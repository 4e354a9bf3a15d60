"""A router or a gateway whose start fails leaves nothing open: no thread, descriptor or port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pdserve.config import GatewayConfig, RouterConfig, with_gateway
from pdserve.gateway import server as gateway_server
from pdserve.gateway.server import GatewayHost
from pdserve.telemetry.metrics import MetricsServer
from router.service.program import RouterHost
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
