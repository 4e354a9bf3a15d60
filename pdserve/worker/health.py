"""gRPC's standard health service. Workers also start without its package, because not every host has it."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, final

from pdserve.wire.health import make_health_servicer

log = logging.getLogger(__name__)


@final
class HealthService:
    """The health of one gRPC service. Without the package, a health check gets UNIMPLEMENTED."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._servicer: Any = None
        if find_spec("grpc_health") is None:
            log.warning("no health service", extra={"reason": "the package grpcio-health-checking is not installed"})
            return
        self._servicer = make_health_servicer()

    def add_to(self, server: Any) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, *, is_serving: bool) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2

            response = health_pb2.HealthCheckResponse
            await self._servicer.set(self._service, response.SERVING if is_serving else response.NOT_SERVING)

    async def shut_down(self) -> None:
        """Reports NOT_SERVING from now on; later calls of `set_serving` have no effect."""
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()
