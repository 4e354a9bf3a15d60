"""Requests with a LoRA adapter run only on workers that have it."""

from __future__ import annotations

import pytest

from pdserve.core.attempt import RefusalReason
from pdserve.core.errors import Unavailable
from pdserve.core.protocol import Reserve
from pdserve.core.types import Role
from router.recording import replay
from router.state.interface import AdaptersChanged, Command, FailRequest, RouterSettings
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival, hello

ADAPTER = {"adapter": "f1", "adapter_name": "sql"}


@pytest.fixture
def given() -> Given:
    """p0 and d0 have the adapter, p1 and d1 do not."""
    given = Given(RouterSettings(local_max_uncached_tokens=0, is_strict=True))
    for number, adapters in enumerate((("f0", "f1"), ())):
        given.connect_prefill(f"p{number}", adapters=adapters)
        given.connect_decode(f"d{number}", adapters=adapters)
    return given


def placed(commands: list[Command]) -> list[str]:
    return [one.worker_id for one in commands if isinstance(one, Reserve)]


def failure(commands: list[Command]) -> FailRequest:
    [error] = [one for one in commands if isinstance(one, FailRequest)]
    return error


def test_only_workers_with_the_adapter_are_candidates(given: Given) -> None:
    workers = set()
    for number in range(4):
        request_id = f"a{number}"
        given.arrives(request_id, prompt=40, max_tokens=2, **ADAPTER)
        found = given.state.explain(request_id)
        assert found is not None
        assert found.adapter == "sql"
        workers |= {name for one in found.decision.candidates for name in (one.prefill_worker, one.decode_worker)}
    assert workers - {""} == {"p0", "d0"}


def test_requests_without_an_adapter_use_all_workers(given: Given) -> None:
    assert {worker for number in range(4) for worker in placed(given.arrives(f"b{number}"))} == {"d0", "d1"}


def test_a_full_worker_with_the_adapter_holds_no_other_request(given: Given) -> None:
    given.arrives("big", prompt=500, **ADAPTER)
    assert placed(given.arrives("a", prompt=500, **ADAPTER)) == [], "d0 is full"
    assert placed(given.arrives("b", prompt=500)) == ["d1"]


def test_a_request_waits_for_a_worker_that_may_get_the_adapter(given: Given) -> None:
    given.lost("d0")
    assert placed(given.arrives("a", **ADAPTER)) == []
    given.submit(AdaptersChanged(worker_id="d1", adapters=("f1",)))
    assert placed(given.at(1.0)) == ["d1"]


def test_an_adapter_that_no_worker_has_is_unavailable(given: Given) -> None:
    error = failure(given.arrives("a", adapter="f9", adapter_name="gone"))
    assert isinstance(error.to_error(), Unavailable)
    assert "gone" in error.to_error().message


def test_a_waiting_request_ends_when_its_adapter_is_freed(given: Given) -> None:
    given.lost("d0")
    given.arrives("a", **ADAPTER)
    given.submit(AdaptersChanged(worker_id="p0", adapters=()))
    given.connect_decode("d0", generation=2)
    assert isinstance(failure(given.at(1.0)).to_error(), Unavailable)


def test_recovery_stays_on_workers_with_the_adapter(given: Given) -> None:
    given.connect_decode("d2", adapters=("f1",))
    [first] = placed(given.arrives("a", **ADAPTER))
    other = {"d0": "d2", "d2": "d0"}[first]
    assert placed(given.lost(first)) == [other]
    assert placed(given.lost(other)) == [], "d1 has no adapter"
    given.connect_decode(first, generation=2)
    assert placed(given.at(1.0)) == []
    given.submit(AdaptersChanged(worker_id=first, adapters=("f1",)))
    assert placed(given.at(2.0)) == [first]


def test_a_worker_that_lacks_the_adapter_is_not_asked_again(given: Given) -> None:
    assert placed(given.arrives("a", **ADAPTER)) == ["d0"]
    given.connect_decode("d2", adapters=("f1",))
    assert placed(given.refused("d0", reason=RefusalReason.NO_ADAPTER)) == ["d2"]
    assert {worker for number in range(3) for worker in placed(given.arrives(f"b{number}"))} == {"d0", "d1", "d2"}


def test_events_about_adapters_can_be_recorded(given: Given) -> None:
    event = AdaptersChanged(worker_id="d0", adapters=("f1",))
    assert replay.decode(replay.encode(event)) == event
    for other in (arrival("a"), hello("d0", Role.DECODE)):
        assert "adapter" not in str(replay.encode(other)), "recordings without adapters stay as they were"


def test_many_requests_for_a_full_worker_with_the_adapter_hold_no_other_request(given: Given) -> None:
    given.arrives("big", prompt=500, **ADAPTER)
    for number in range(8):
        assert placed(given.arrives(f"a{number}", prompt=500, **ADAPTER)) == []
    assert placed(given.arrives("b", prompt=500)) == ["d1"]
