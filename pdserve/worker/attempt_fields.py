"""What a log record about an attempt says: its request, its trace, and the attributes that the client has set. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from pdserve.core.attempt import Attempt, AttemptKey
from pdserve.telemetry.propagate import trace_id_of


@final
class AttemptFields:
    """Of the attempts on this worker. Used on the engine thread only."""

    def __init__(self) -> None:
        self._fields: dict[AttemptKey, Mapping[str, Any]] = {}

    def add(self, attempt: Attempt, traceparent: str) -> None:
        named = {"trace_id": trace_id_of(traceparent), **attempt.attributes()}
        self._fields[attempt.key] = {name: value for name, value in named.items() if value}

    def remove(self, key: AttemptKey) -> None:
        self._fields.pop(key, None)

    @property
    def keys(self) -> set[AttemptKey]:
        return set(self._fields)

    def of(self, key: AttemptKey) -> dict[str, Any]:
        """Without trace and attributes if the attempt has ended."""
        return {"request_id": key.request_id, "attempt": key.attempt, **self._fields.get(key, {})}
