"""A short storm of killed workers on toy engines; `make kill-storm` runs 1,000 requests of the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kill_storm import StormAnswer, StormRequest, in_storm, judge, requests, same_as, same_as_float64
from pdserve import InternalError
from pdserve.engine.toy import answer
from tests.cluster.families import BUNDLED
from tests.oracle import Oracle, Verdict

NUM_REQUESTS = 48
MANY_REQUESTS = 960  # more than are sent until the last kill, also where workers start slowly
MAX_TOKENS = 96
AT_ONCE = 12
# Each request takes at least a second: the storm lasts for two kills, and longer on a slow machine.
EVERY_S = 1.2
KILLS = 2
FLAGS = (
    *("--model", "toy", "--prefill", "2", "--decode", "2", "--set", "worker.toy_step_s=0.01"),
    *("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("waits", [False, True])
def test_answers_are_exact_or_typed_errors_under_kills(waits: bool) -> None:
    """If the storm waits for killed workers, it sends no request after the last kill."""
    asked = [
        StormRequest(prompt=[33 + token % 90 for token in one.prompt], options=one.options)
        for one in requests(
            MANY_REQUESTS if waits else NUM_REQUESTS, seed=3, longest=400, max_tokens=MAX_TOKENS, vocabulary=256
        )
    ]
    calm = [StormAnswer(tokens=answer(one.prompt, MAX_TOKENS, seed=one.options.get("seed"))) for one in asked]
    asked = [replace(one, options={**one.options, "ignore_eos": False}) for one in asked]
    result = in_storm(asked, same_as(calm), FLAGS, every_s=EVERY_S, seed=3, at_once=AT_ONCE, kills=KILLS, waits=waits)
    assert result.wrong == []
    assert result.finished + result.errors.total() == result.requests
    assert result.requests < MANY_REQUESTS if waits else result.requests == NUM_REQUESTS
    assert result.finished >= 0.8 * result.requests, result.errors
    assert result.kills.total() == KILLS
    assert any(count for attempts, count in result.attempts.items() if attempts > 1), (
        "no request was on a killed worker"
    )


def test_the_kill_storm_detects_wrong_tokens_and_untyped_errors() -> None:
    calm = [StormAnswer(tokens=[1, 2, 3]) for _ in range(4)]
    stormy = [
        StormAnswer(tokens=[1, 2, 3], attempts=2),
        StormAnswer(tokens=[1, 2, 4], attempts=1),
        StormAnswer(tokens=[1, 5], error=InternalError("2 workers died")),
        StormAnswer(tokens=[1], error=TimeoutError()),
    ]
    result = judge(stormy, same_as(calm))
    assert (result.finished, result.errors.total()) == (2, 2)
    assert [line.partition(":")[0] for line in result.wrong] == [
        "request 1",
        "request 2 before its error",
        "request 3 ended untyped",
    ]


def test_float64_judges_whole_and_partial_answers() -> None:
    oracle, verdict = Oracle(BUNDLED), Verdict()
    asked = requests(6, seed=2, longest=9, max_tokens=3, vocabulary=99)[::2]  # greedy
    right = [greedy(oracle, one.prompt, 3) for one in asked]
    wrong_of = same_as_float64(asked, oracle, verdict)
    spoilt = [right[0][0], (right[0][1] + 1) % 99, right[0][2]]
    assert "tokens are not those of float64" in wrong_of(0, StormAnswer(tokens=spoilt))
    assert wrong_of(0, StormAnswer(tokens=right[0])) == ""
    assert wrong_of(1, StormAnswer(tokens=right[1][:2])) == "2 tokens of 3"
    assert wrong_of(1, StormAnswer(tokens=right[1][:2], error=InternalError("2 workers died"))) == ""
    assert wrong_of(2, StormAnswer(error=InternalError("2 workers died"))) == ""
    assert verdict.num_positions == 3 + 3 + 2


def greedy(oracle: Oracle, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle.logits(tokens, len(tokens) - 1)[-1].argmax()))
    return tokens[len(prompt) :]
