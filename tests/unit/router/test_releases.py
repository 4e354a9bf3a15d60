"""When the answers of ended requests no longer count as in progress."""

from __future__ import annotations

import pytest

from pdserve.core.access.key_file import Tenant
from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import Load, Released
from router.service.tenants import AnswerClaim, PendingReleases, Quotas
from router.state.interface import Event, StopMatched, TimePassed, WorkerForgotten, WorkerLost

LOAD = Load(worker_id="d0", free_blocks=1)
ACME = Tenant(name="acme", max_concurrent=9)


def claim(quotas: Quotas) -> AnswerClaim:
    call = quotas.open(ACME, 0.0)
    call.admit(1, [1], 0.0)
    return call.take()


def released(request_id: str) -> Event:
    return Released(key=AttemptKey("d0", request_id, 1))


@pytest.mark.parametrize(
    ("event", "running"),
    [
        (released("a"), 2),
        (released("b"), 3),
        (TimePassed(), 1),
        (StopMatched(request_id="a", num_output_tokens=1), 3),
        (LOAD, 1),
        (WorkerLost(worker_id="d0"), 1),
        (WorkerForgotten(worker_id="d0"), 1),
    ],
    ids=lambda one: type(one).__name__,
)
def test_forgotten_requests_are_released(event: Event, running: int) -> None:
    quotas, known = Quotas(), {"a", "b", "c"}
    releases = PendingReleases(known.__contains__)
    claims = {name: claim(quotas) for name in "abc"}
    for name in "abc":
        releases.ended(name, claims[name], 1.0)
    assert quotas.running("acme") == 3
    releases.after(event, 2.0)
    assert quotas.running("acme") == 3, "all are still known"
    known -= {"a", "c"}
    releases.after(event, 2.0)
    assert quotas.running("acme") == running
    known.clear()
    releases.after(LOAD, 3.0)
    assert quotas.running("acme") == 0


def test_a_request_that_no_worker_has_seen_is_free_at_its_end() -> None:
    quotas = Quotas()
    PendingReleases(lambda request_id: False).ended("a", claim(quotas), 1.0)
    assert quotas.running("acme") == 0


def test_reusing_an_id_releases_the_earlier_answer() -> None:
    """The state forgot the first request at an event that frees nothing here, and the client reused its id."""
    quotas, known = Quotas(), {"a"}
    releases = PendingReleases(known.__contains__)
    releases.ended("a", claim(quotas), 1.0)
    retried = claim(quotas)
    releases.after(LOAD, 2.0)
    assert quotas.running("acme") == 2
    releases.ended("a", retried, 3.0)
    assert quotas.running("acme") == 1
    known.clear()
    releases.after(LOAD, 4.0)
    assert quotas.running("acme") == 0
