"""A short storm of killed workers on toy engines; `make kill-storm` runs 1,000 requests of the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kill_storm import StormAnswer, StormRequest, in_storm, judge, requests
from pdserve import InternalError
from pdserve.engine.toy import answer

NUM_REQUESTS = 48
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
def test_answers_are_exact_or_typed_errors_under_kills() -> None:
    asked = [
        StormRequest(prompt=[33 + token % 90 for token in one.prompt], options=one.options)
        for one in requests(NUM_REQUESTS, seed=3, longest=400, max_tokens=MAX_TOKENS, vocabulary=256)
    ]
    calm = [StormAnswer(tokens=answer(one.prompt, MAX_TOKENS, seed=one.options.get("seed"))) for one in asked]
    asked = [replace(one, options={**one.options, "ignore_eos": False}) for one in asked]
    result = in_storm(asked, calm, FLAGS, every_s=EVERY_S, seed=3, at_once=AT_ONCE, kills=KILLS)
    assert result.wrong == []
    assert result.finished + result.errors.total() == NUM_REQUESTS
    assert result.finished >= 0.8 * NUM_REQUESTS, result.errors
    assert result.kills.total() == KILLS
    assert any(count for attempts, count in result.attempts.items() if attempts > 1), (
        "no request was on a killed worker"
    )


def test_the_kill_storm_detects_wrong_tokens_and_untyped_errors() -> None:
    asked = requests(4, seed=1, longest=9, max_tokens=3, vocabulary=99)
    calm = [StormAnswer(tokens=[1, 2, 3]) for _ in asked]
    stormy = [
        StormAnswer(tokens=[1, 2, 3], attempts=2),
        StormAnswer(tokens=[1, 2, 4], attempts=1),
        StormAnswer(tokens=[1, 5], error=InternalError("2 workers died")),
        StormAnswer(tokens=[1], error=TimeoutError()),
    ]
    result = judge(asked, calm, stormy)
    assert (result.finished, result.errors.total()) == (2, 2)
    assert [line.partition(":")[0] for line in result.wrong] == [
        "request 1",
        "request 2 streamed wrong tokens before its error",
        "request 3 ended untyped",
    ]
