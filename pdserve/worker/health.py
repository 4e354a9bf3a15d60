"""gRPC's standard health service, where its package is installed; the GPU machines of this project lack it."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, final

log = logging.getLogger(__name__)


@final
class Health:
    """Of one service. Without the package `Check` is an unknown method, and whoever asks is told so by gRPC."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._servicer: Any = None
        if find_spec("grpc_health") is None:
            log.warning("no health service", extra={"reason": "the package grpcio-health-checking is not installed"})
            return
        from grpc_health.v1 import health

        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in its stubs

    def add_to(self, server: Any) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def say(self, *, is_serving: bool) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2

            words = health_pb2.HealthCheckResponse
            await self._servicer.set(self._service, words.SERVING if is_serving else words.NOT_SERVING)

    async def leave(self) -> None:
        """Not serving, and no word will change that."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()
