"""Sets the router's gauges once a second, and the counters whose totals other modules keep."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, final

from pdserve.core.types import Role
from pdserve.telemetry import metric_names
from router.connections import num_connections
from router.measure import Measure
from router.quotas import Quotas
from router.state import RouterState
from router.workers import Workers

EVERY_S: Final = 1.0
DROPPED: Final = ("late", "illegal")  # of RouterState.counters


@final
class Gauges:
    def __init__(
        self, measure: Measure, state: RouterState, workers: Workers, quotas: Quotas, port: Callable[[], int]
    ) -> None:
        self._measure, self._state, self._workers, self._quotas, self._port = measure, state, workers, quotas, port
        self._counted: Counter[str] = Counter()

    async def run(self) -> None:
        while self._measure.metrics.is_on:
            await self._set()
            await asyncio.sleep(EVERY_S)

    async def _set(self) -> None:
        metrics, state = self._measure.metrics, self._state
        self._measure.population(state.num_queued, state.num_running)
        self._measure.answers_running(self._quotas.all_running())
        for role in Role:
            attached = sum(one is role for one in self._workers.roles.values())
            metrics.set(metric_names.WORKERS, attached, role=role.value)
        metrics.set(metric_names.UNREGISTERED_WORKERS, self._workers.num_unregistered)
        metrics.set(metric_names.CONNECTIONS, await asyncio.to_thread(num_connections, self._port()))
        totals = {kind: state.counters[kind] for kind in DROPPED} | {"invalid": self._workers.num_invalid}
        for kind, total in totals.items():
            metrics.add(metric_names.DROPPED_MESSAGES, total - self._counted[kind], kind=kind)
            self._counted[kind] = total
