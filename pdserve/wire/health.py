"""gRPC's standard health service with all its methods: the package's servicer lacks List. No import of the package,
because not every host has it."""

from __future__ import annotations

from typing import Any


def make_health_servicer() -> Any:
    """Raises ImportError without the package grpcio-health-checking."""
    from grpc_health.v1 import health, health_pb2

    class HealthServicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]  # missing in its stubs
        def __init__(self) -> None:
            super().__init__()
            self._services = {health.OVERALL_HEALTH}

        async def set(self, service: str, status: Any) -> None:
            self._services.add(service)
            await super().set(service, status)

        async def List(self, request: Any, context: Any) -> Any:
            """The status of each service, as Check returns it."""
            check = health_pb2.HealthCheckRequest
            return health_pb2.HealthListResponse(
                statuses={name: await self.Check(check(service=name), context) for name in sorted(self._services)}
            )

    return HealthServicer()
