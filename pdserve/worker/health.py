"""gRPC's standard health service, if its package is installed, which it is not on the GPU machines."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, final

log = logging.getLogger(__name__)


@final
class Health:
    """The health of one service. Without the package, gRPC answers `Check` as an unknown method."""

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
        """Reports not serving, for good."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()
