"""Spans and log fields of the attempts on a worker. Runs on the engine thread only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.core.phases import Phase
from pdserve.telemetry import names
from pdserve.worker.context import ProgramContext

NO_ATTRIBUTES: Final[Mapping[str, str | int | float | bool]] = {}


@dataclass(frozen=True, slots=True)
class _Trace:
    traceparent: str
    attributes: Mapping[str, Any]  # of the request, as far as the client has set them


@final
class AttemptTraces:
    def __init__(self, context: ProgramContext) -> None:
        self._context = context
        self._traces: dict[AttemptKey, _Trace] = {}

    def add(self, attempt: Attempt, traceparent: str) -> None:
        attributes = {name: value for name, value in attempt.attributes().items() if value}
        self._traces[attempt.key] = _Trace(traceparent, attributes)

    def remove(self, key: AttemptKey) -> None:
        self._traces.pop(key, None)

    @property
    def keys(self) -> set[AttemptKey]:
        return set(self._traces)

    def log_fields(self, key: AttemptKey) -> dict[str, Any]:
        """The attempt's name, and the attributes of its request if they are known."""
        trace = self._traces.get(key)
        fields = {"request_id": key.request_id, "attempt": key.attempt}
        return fields if trace is None else {**fields, **trace.attributes}

    def record(
        self,
        phase: Phase,
        key: AttemptKey,
        duration_s: float,
        attributes: Mapping[str, str | int | float | bool] = NO_ATTRIBUTES,
        *,
        ended_ago_s: float = 0.0,
    ) -> None:
        """Records a span. Call it only for durations that are reported to the router, which then records none."""
        trace = self._traces.get(key)
        context = self._context
        if trace is None or not context.tracing.is_on or duration_s <= 0.0:
            return
        common: dict[str, str | int | float | bool] = {
            names.REQUEST_ID: key.request_id,
            names.ATTEMPT: key.attempt,
            names.WORKER_ID: context.config.worker_id,
            names.WORKER_ROLE: context.role.value,
            **{names.REQUEST_ATTRIBUTES[one]: value for one, value in trace.attributes.items()},
        }
        end_ns = time.time_ns() - int(ended_ago_s * 1e9)
        context.tracing.record(
            names.PHASE_SPANS[phase], trace.traceparent, duration_s, {**common, **attributes}, end_ns
        )
