"""A RouterState driven by hand: short methods for events, whole values for commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.state.interface import RouterSettings
from tests.unit.router.given import Given


@pytest.fixture
def given() -> Iterator[Given]:
    """One strict router, prefill worker p0 and decode worker d0; everything remote. Invariants hold at the end."""
    one = Given(RouterSettings(policy="round-robin", is_strict=True, worker_silence_s=5.0))
    one.connect_prefill("p0")
    one.connect_decode("d0")
    yield one
    one.state.check()
