"""Two revisions of the weights run side by side: pairs have equal weights, and an answer stays within its own."""

from __future__ import annotations

import pytest

from pdserve.core.errors import Unavailable
from pdserve.core.protocol import Reserve
from pdserve.core.types import Role
from router.recording import replay
from router.state.fleet import shares_of
from router.state.interface import Command, DrainRequested, EmitTokens, FailRequest, RouterSettings
from router.state.view import WorkerView
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival, hello


@pytest.fixture
def given() -> Given:
    """p0 and d0 have the weights a, p1 and d1 have b."""
    given = Given(RouterSettings(local_max_uncached_tokens=0, is_strict=True))
    for number, weights in enumerate("ab"):
        given.connect_prefill(f"p{number}", weights=weights)
        given.connect_decode(f"d{number}", weights=weights)
    return given


def placed(commands: list[Command]) -> list[str]:
    return [one.worker_id for one in commands if isinstance(one, Reserve)]


def begun(given: Given, weights: str) -> str:
    """A request that decodes, with one token; its decode worker."""
    [decode] = placed(given.arrives(weights=weights, max_tokens=200))
    prefill = "p" + decode[1:]
    given.granted(worker_id=decode)
    given.first(worker_id=prefill)
    given.committed(worker_id=decode)
    return decode


def test_pairs_have_equal_weights(given: Given) -> None:
    seen = set()
    for number in range(8):
        given.arrives(name := f"a{number}", prompt=40, weights="ab"[number % 2])
        found = given.state.explain(name)
        assert found is not None
        seen |= {(one.prefill_worker, one.decode_worker) for one in found.decision.candidates}
    assert seen >= {("p0", "d0"), ("p1", "d1")}
    assert seen <= {("p0", "d0"), ("p1", "d1"), ("", "d0"), ("", "d1")}


def test_a_new_request_gets_the_weights_that_it_should_have(given: Given) -> None:
    assert placed(given.arrives("a", weights="a")) == ["d0"]
    assert placed(given.arrives("b", weights="b")) == ["d1"]


def test_a_request_without_tokens_goes_to_other_weights_if_its_own_have_no_room(given: Given) -> None:
    given.arrives("big", prompt=500, weights="a")
    given.arrives("next", prompt=500, weights="a")
    found = given.state.explain("next")
    assert found is not None
    assert found.decision.decode_worker == "d1"


def test_the_answers_of_one_call_wait_for_their_weights(given: Given) -> None:
    given.arrives("big", prompt=500, weights="a")
    assert placed(given.arrives("next", prompt=500, weights="a", keeps_weights=True)) == []
    assert placed(given.arrives("other", prompt=500, weights="b")) == ["d1"], "later requests overtake it"


def test_the_first_tokens_name_the_weights(given: Given) -> None:
    given.arrives(weights="b")
    given.granted(worker_id="d1")
    [emitted] = [one for one in given.first(worker_id="p1") if isinstance(one, EmitTokens)]
    assert emitted.weights == "b"
    given.committed(worker_id="d1")
    [more] = [one for one in given.tokens(1, [101], worker_id="d1") if isinstance(one, EmitTokens)]
    assert more.weights == ""


def test_recovery_stays_within_the_weights(given: Given) -> None:
    assert begun(given, "a") == "d0"
    assert placed(given.lost("d0")) == [], "d1 has other weights"
    assert placed(given.at(1.0)) == []
    given.connect_decode("d2", weights="a")
    assert placed(given.at(2.0)) == ["d2"]


def test_an_answer_whose_weights_are_gone_fails(given: Given) -> None:
    assert begun(given, "a") == "d0"
    given.lost("d0")
    commands = given.connect_decode("d0", generation=2, weights="b") + given.at(1.0)
    [error] = [one for one in commands if isinstance(one, FailRequest)]
    assert isinstance(error.to_error(), Unavailable)
    assert "weights" in error.to_error().message
    assert placed(commands) == []


def test_a_request_without_tokens_does_not_need_its_first_weights(given: Given) -> None:
    assert placed(given.arrives(weights="a")) == ["d0"]
    assert placed(given.lost("d0")) == ["d1"]


def test_a_drained_answer_moves_within_its_weights(given: Given) -> None:
    assert begun(given, "a") == "d0"
    assert placed(given.submit(DrainRequested(worker_id="d0")) + given.at(8.0)) == [], "d1 has other weights"
    given.connect_decode("d2", weights="a")
    assert placed(given.tokens(1, [101]) + given.at(12.0)) == ["d2"]


def test_a_resumed_answer_continues_with_its_weights(given: Given) -> None:
    for weights, worker in (("a", "d0"), ("b", "d1")):
        assert placed(given.arrives(f"r{weights}", weights=weights, output_ids=(100, 101))) == [worker]
    commands = given.arrives("gone", weights="c", output_ids=(100, 101))
    assert [one.to_error() for one in commands if isinstance(one, FailRequest)] != []


def test_new_requests_are_shared_by_the_weaker_pool(given: Given) -> None:
    given.connect_decode("d2", weights="a")
    given.connect_decode("d3", weights="a")
    given.connect_prefill("p2", weights="a")
    seen = []
    for number in range(12):
        seen.append(given.state.next_weights)
        given.arrives(f"s{number}", prompt=4, weights=seen[-1])
    assert seen.count("b") == 3, "a quarter of the decode workers, a third of the prefill workers"


@pytest.mark.parametrize(
    ("prefills", "decodes", "shares"),
    [
        ("ab", "ab", {"a": 0.5, "b": 0.5}),
        ("aab", "ab", {"a": 0.5, "b": 1 / 3}),
        ("aa", "aa", {"a": 1.0}),
        ("", "aab", {"a": 2 / 3, "b": 1 / 3}),
        ("b", "a", {"a": 1.0}),  # a computes its prompts itself
        ("bb", "ab", {"b": 0.5}),
        ("ab", "", {}),
        ("", "", {}),
    ],
)
def test_shares(prefills: str, decodes: str, shares: dict[str, float]) -> None:
    pools = [
        [WorkerView(hello(f"{role.value}{at}", role, weights=one), 0.0) for at, one in enumerate(names)]
        for role, names in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    ]
    assert shares_of(*pools) == shares


def test_recordings_without_weights_stay_as_they_were() -> None:
    for event in (arrival("a"), hello("d0", Role.DECODE)):
        assert "weights" not in str(replay.encode(event))
    event = arrival("a", weights="a", keeps_weights=True)
    assert replay.decode(replay.encode(event)) == event
