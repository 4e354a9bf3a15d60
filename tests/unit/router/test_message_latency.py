"""The predicted latency of messages is the typical one, whatever the outliers are."""

from __future__ import annotations

import pytest

from pdserve.core.types import FinishReason
from router.state.interface import RouterSettings
from router.state.load import REMEMBERED, MessageLatency
from tests.unit.router.given import Given

COMPUTED_S = 0.21  # In the events of Given: the time in the worker's queue and in prefill.


def leg(*seconds: float) -> MessageLatency:
    found = MessageLatency()
    for one in seconds:
        found.observe(one)
    return found


def test_without_observations_the_latency_is_zero() -> None:
    assert MessageLatency().typical_s == 0.0


def test_the_median_is_typical() -> None:
    assert leg(3.0).typical_s == 3.0
    assert leg(3.0, 1.0).typical_s == 2.0
    assert leg(3.0, 1.0, 50.0).typical_s == 3.0


def test_rare_outliers_do_not_count() -> None:
    assert leg(*[5.0 if i % 10 == 9 else 0.002 for i in range(200)]).typical_s == 0.002


def test_a_latency_is_never_negative() -> None:
    assert leg(-0.3, -0.1, -0.2).typical_s == 0.0


def test_the_latency_follows_a_change() -> None:
    assert leg(*[0.002] * 500, *[0.008] * (REMEMBERED // 2 + 1)).typical_s == 0.008


@pytest.fixture
def given() -> Given:
    return Given(RouterSettings(policy="goodput", is_strict=True))


def predicted_s(given: Given, request_id: str) -> float:
    found = given.state.explain(request_id)
    assert found is not None
    return found.decision.candidates[0].ttft_s


def test_a_remote_prediction_includes_grant_and_reply(given: Given) -> None:
    given.connect_prefill("p0")
    given.connect_decode("d0")
    before_s = None
    for number in range(20):
        name, late_s = f"r{number}", 3.0 if number % 7 == 6 else 0.0
        given.at(given.now_s + 1.0)
        given.arrives(name)
        before_s = predicted_s(given, name) if before_s is None else before_s
        given.now_s += 0.02 + late_s
        given.granted(request_id=name)
        given.now_s += COMPUTED_S + 0.01 + late_s
        given.first(request_id=name, finish=FinishReason.STOP)
        given.released("p0", request_id=name)
        given.released("d0", request_id=name)
    given.arrives("last")
    assert before_s is not None
    assert predicted_s(given, "last") == pytest.approx(before_s + 0.02 + 0.01)


def test_a_local_prediction_includes_both_messages(given: Given) -> None:
    given.connect_decode("d0")
    before_s = None
    for number in range(20):
        name, late_s = f"r{number}", 3.0 if number % 7 == 6 else 0.0
        given.at(given.now_s + 1.0)
        given.arrives(name)
        before_s = predicted_s(given, name) if before_s is None else before_s
        given.now_s += 0.5 + late_s
        given.seated(request_id=name)  # The worker sends this message later, while it prefills.
        given.tokens(0, [100], request_id=name, finish=FinishReason.STOP)
        given.released("d0", request_id=name)
    given.arrives("last")
    assert before_s is not None
    assert predicted_s(given, "last") == pytest.approx(before_s + 0.5)
