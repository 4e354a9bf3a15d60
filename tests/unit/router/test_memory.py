"""A router's memory does not grow with the number of ended requests."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import pytest

from pdserve.core.types import FinishReason
from router.state.interface import RouterSettings
from tests.unit.router.given import Given

WARM_UP = 600  # more than any window of recent requests
COUNTERS_BYTES = 512  # counters and serial numbers gain digits


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (str, (value.__qualname__,)) if isinstance(value, FunctionType) else NotImplemented


def size_of(value: object) -> int:
    """The size of all objects that can be reached, each counted once."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.tell()


def serve(given: Given, first: int, count: int, end: str) -> None:
    """Serves requests one after the other on p0 and d0, within their deadlines."""
    for number in range(first, first + count):
        name = f"request-{number:08d}"
        given.now_s += 0.01
        given.heard("p0")
        given.heard("d0")
        given.arrives(name, deadline_s=600.0)
        given.granted(request_id=name)
        given.first(100, request_id=name)
        given.committed(request_id=name)
        if end == "finished":
            given.tokens(1, [101], finish=FinishReason.STOP, request_id=name)
        else:
            given.leaves(name)
        given.released("p0", request_id=name)
        given.released("d0", request_id=name)


@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_ended_requests_take_no_memory(end: str) -> None:
    given = Given(RouterSettings(policy="round-robin", is_strict=True, explain_capacity=0))
    given.connect_prefill("p0")
    given.connect_decode("d0")
    serve(given, 0, WARM_UP, end)
    before = size_of(given.state)
    serve(given, WARM_UP, WARM_UP, end)
    assert given.state.is_empty
    assert size_of(given.state) < before + COUNTERS_BYTES
