"""A resumed answer in the router's state: its tokens came from another router."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import FirstToken
from pdserve.core.types import FinishReason, Sampling, Slo, TokenOut
from router.recording.replay import decode_value, encode_value
from router.state.fleet import NOTHING, entry_of
from router.state.interface import FinishRequest, Outcome, RequestArrived, RouterSettings
from tests.unit.router.expected import admit, emit, prefill, reserve
from tests.unit.router.given import Given
from tests.unit.router.router_events import arrival

HELD = (7, 8, 9)


def ended(commands: list[object]) -> FinishRequest:
    return next(one for one in commands if isinstance(one, FinishRequest))


def waited(command: object) -> float:
    return float(command.waited_s)  # type: ignore[attr-defined]


def test_it_is_placed_with_its_tokens_like_one_that_lost_a_worker(given: Given) -> None:
    [reserved] = given.arrives(output_ids=HELD)
    due_s = (len(HELD) - 1) * Slo().tpot_s
    assert replace(reserved, waited_s=0.0) == reserve(output=HELD)  # type: ignore[type-var]
    assert waited(reserved) == pytest.approx(due_s), "its next token is due after one TPOT target"
    [sent] = given.granted()
    assert replace(sent, waited_s=0.0) == prefill(output=HELD)  # type: ignore[type-var]
    assert given.first(100) == [emit(3, 100), admit(100)]


def test_its_usage_counts_all_tokens_and_its_times_only_the_new_ones(given: Given) -> None:
    given.arrives(output_ids=HELD, max_tokens=6)
    given.granted()
    given.now_s = 0.5
    given.first(100)
    given.committed()
    given.now_s = 0.7
    given.tokens(4, [101])
    given.now_s = 0.9
    end = ended(list(given.tokens(5, [102], finish=FinishReason.LENGTH)))
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (100, 6)
    assert (end.timings.ttft_s, end.timings.tpot_s) == (pytest.approx(0.5), pytest.approx(0.2))


def test_it_survives_a_worker_as_any_other(given: Given) -> None:
    given.connect_decode("d1")
    given.arrives(output_ids=HELD)
    given.granted()
    given.first(100)
    lost = given.lost("d0")[-1]
    assert replace(lost, waited_s=0.0) == reserve(2, "d1", (*HELD, 100))  # type: ignore[type-var]


@pytest.mark.parametrize("reason", FinishReason)
def test_only_its_end_is_sent_if_it_has_all_tokens(given: Given, reason: FinishReason) -> None:
    [end] = given.arrives(output_ids=HELD, finish=reason)
    assert isinstance(end, FinishRequest)
    assert (end.reason, end.usage.completion_tokens, end.outcome) == (reason, 3, Outcome.SERVED)
    assert given.state.is_empty


def test_what_its_client_sends_gives_no_precedence(given: Given) -> None:
    """A key admits a call, not its tokens: only a token of this router shows that the answer has begun."""
    cluster = given.state._cluster
    given.arrives(output_ids=HELD)

    def level() -> int:
        return entry_of(cluster.requests["a"], cluster.fleet, cluster.lengths, NOTHING, given.now_s).level[0]

    assert level() == 1
    given.granted()
    given.first(100)
    assert level() == 0


def test_it_is_not_rejected_for_its_targets() -> None:
    impossible = Slo(ttft_s=0.001, tpot_s=0.001)
    for output_ids in ((), HELD):
        given = Given(RouterSettings(policy="goodput"))
        given.connect_decode("d0", max_batch=1)
        given.arrives("before", max_tokens=500)
        given.arrives(slo=impossible, output_ids=output_ids, sampling=Sampling(max_tokens=8))
        assert given.state.knows("a") or not output_ids


def test_its_usage_counts_cached_tokens_of_the_prompt_only(given: Given) -> None:
    given.arrives(output_ids=HELD, max_tokens=5)
    given.granted()
    key = AttemptKey("p0", "a", 1)
    given.submit(FirstToken(key=key, token=TokenOut(token_id=1), cached_tokens=102))
    given.committed()
    end = ended(list(given.tokens(4, [101], finish=FinishReason.LENGTH)))
    assert (end.usage.prompt_tokens, end.usage.cached_prompt_tokens) == (100, 100)


def test_a_recording_has_its_tokens() -> None:
    event = arrival("a", output_ids=HELD, finish=FinishReason.STOP)
    assert decode_value(RequestArrived, encode_value(event)) == event
