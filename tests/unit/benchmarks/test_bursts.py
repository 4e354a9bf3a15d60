"""How `python -m benchmarks.bursts` decides where an answer was held up."""

from __future__ import annotations

import pytest

from benchmarks.bursts import BurstAnswer, read_recording, report
from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import FirstToken, TokenRow, TokensArrived
from pdserve.core.types import FinishReason, TokenOut
from router.recording import replay

STEADY = [0.01 + 0.003 * number for number in range(20)]
AT_ONCE = [0.07 + 0.0001 * number for number in range(20)]


@pytest.mark.parametrize(
    ("router_s", "client_s", "bursts", "held_up"),
    [
        (STEADY, STEADY, 0, {}),
        (STEADY, AT_ONCE, 1, {"behind the router": 1}),
        (AT_ONCE, AT_ONCE, 1, {"before the router": 1}),
    ],
)
def test_a_burst_starts_with_the_first_tokens_that_come_together(
    router_s: list[float], client_s: list[float], bursts: int, held_up: dict[str, int]
) -> None:
    told = report([BurstAnswer(router_s=router_s, client_s=client_s, decode_s=0.057)])
    assert (told["bursts"], told["held_up"]) == (bursts, held_up)


def test_an_answer_that_was_decoded_at_once_is_no_burst() -> None:
    assert not BurstAnswer(router_s=AT_ONCE, client_s=AT_ONCE, decode_s=0.003).is_burst


def test_a_recording_has_the_routers_times() -> None:
    first = FirstToken(key=AttemptKey("p0", "a", 1), token=TokenOut(token_id=5))
    row = TokenRow(
        key=AttemptKey("d0", "a", 1),
        output_index=1,
        tokens=(TokenOut(token_id=6), TokenOut(token_id=7)),
        finish=FinishReason.LENGTH,
        decode_s=0.5,
    )
    stranger = TokenRow(key=AttemptKey("d0", "b", 1), output_index=0, tokens=(TokenOut(token_id=6),))
    events = [(1.0, first), (1.5, TokensArrived(worker_id="d0", rows=(row, stranger)))]
    answers = {"a": BurstAnswer()}
    read_recording([replay.encode_step(replay.make_step(at_s, event, [])) for at_s, event in events], answers)
    assert answers == {"a": BurstAnswer(router_s=[1.0, 1.5, 1.5], decode_s=0.5)}
