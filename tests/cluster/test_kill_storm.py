"""A short storm of killed workers on toy engines; `make kill-storm` runs 1,000 requests of the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kill_storm import CLIENTS, in_storm, resumed_work
from benchmarks.kill_storm_calls import (
    By,
    Kind,
    Part,
    StormAnswer,
    StormRequest,
    judge,
    requests,
    same_as,
    same_as_float64,
)
from pdserve import InternalError, Unavailable
from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import FirstToken, TokenRow, TokensArrived
from pdserve.core.types import TokenOut
from pdserve.engine.toy import answer
from router.recording.replay import encode_settings, encode_step, make_step
from router.state.interface import Event, RouterSettings
from tests.cluster.families import BUNDLED
from tests.oracle import Oracle, Verdict
from tests.support.slow import slow_except
from tests.unit.router.router_events import arrival

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
@pytest.mark.parametrize("waits", slow_except([False, True], False))
def test_answers_are_exact_or_typed_errors_under_kills(waits: bool) -> None:
    """If the storm waits for killed workers, it sends no request after the last kill. Otherwise, the first kill is one
    to a router."""
    asked = [
        replace(one, prompt=[33 + token % 90 for token in one.prompt])
        for one in requests(
            MANY_REQUESTS if waits else NUM_REQUESTS,
            seed=3,
            longest=400,
            max_tokens=MAX_TOKENS,
            vocabulary=256,
            by=(By.PLAIN,) if waits else CLIENTS,
        )
    ]
    calm = [whole(answer(one.prompt, MAX_TOKENS, seed=one.options.get("seed"))) for one in asked]
    asked = [replace(one, options={**one.options, "ignore_eos": False}) for one in asked]
    flags, routers = (FLAGS, ()) if waits else ((*FLAGS, "--routers", "2"), ("router-0", "router-1"))
    result = in_storm(
        asked,
        same_as(calm),
        flags,
        every_s=EVERY_S,
        seed=3,
        at_once=AT_ONCE,
        kills=KILLS,
        waits=waits,
        routers=routers,
    )
    assert result.wrong == []
    assert result.finished + result.errors.total() == result.requests
    assert result.requests < MANY_REQUESTS if waits else result.requests == NUM_REQUESTS
    assert result.finished >= 0.8 * result.requests, result.errors
    assert result.kills.total() == KILLS
    assert any(count for attempts, count in result.attempts.items() if attempts > 1), (
        "no request was on a killed worker"
    )


def test_the_kill_storm_detects_wrong_tokens_and_untyped_errors() -> None:
    found = [
        (By.SDK, whole([1, 2, 3], attempts=2, is_resumed=True)),
        (By.SDK, whole([1, 2, 4], attempts=1)),
        (By.PLAIN, whole([1, 5], error=InternalError("2 workers crashed"))),
        (By.PLAIN, whole([1], error=TimeoutError())),
        (By.PLAIN, whole([1], error=Unavailable("d0 has gone"))),
        (By.HTTP, whole([1], error=Unavailable("d1 has gone"))),
        (By.HTTP, whole([1, 2, 3], others=[9], attempts=1)),
        (By.HTTP, StormAnswer(parts={0: Part(token_ids=[1, 2, 3], text="abd")}, attempts=1)),
        (By.SDK, StormAnswer(parts={0: Part(token_ids=[1, 2, 3], text="abc", logprobs=[-0.5])}, attempts=1)),
    ]
    calm = [StormAnswer(parts={0: Part(token_ids=[1, 2, 3], text=None if index < 7 else "abc")}) for index in range(9)]
    asked = [StormRequest(prompt=[1], options={}, by=by) for by, _ in found]
    result = judge(asked, [one for _, one in found], same_as(calm))
    assert (result.finished, result.errors.total()) == (5, 4)
    assert result.errors["http: Unavailable: a worker has gone"] == 1
    assert [line.partition(": ")[0] for line in result.wrong] == [
        "request 1 (sdk, sampled)",
        "request 2 (plain, sampled) before its error",
        "request 3 (plain, sampled) ended untyped",
        "request 5 (http, sampled) failed",
        "request 6 (http, sampled)",
        "request 7 (http, sampled)",
        "request 8 (sdk, sampled)",
    ]
    assert (result.ends[By.SDK, "exact"], result.ends[By.SDK, "resumed"], result.ends[By.PLAIN, "failed"]) == (1, 1, 3)


def test_the_work_of_resumed_answers_is_read_from_recordings(tmp_path: Path) -> None:
    key, row = AttemptKey("p0", "a", 1), TokenRow(key=AttemptKey("d0", "b", 1), output_index=0, tokens=())
    events: list[Event] = [
        arrival("a", prompt=100, output_ids=(7, 8, 9)),
        arrival("b", prompt=40, output_ids=(7,)),
        arrival("new", prompt=100),
        FirstToken(key=AttemptKey("p0", "new", 1), token=TokenOut(token_id=1)),
        FirstToken(key=key, token=TokenOut(token_id=1), cached_tokens=96),
        TokensArrived(worker_id="d0", rows=(replace(row, prefill_s=0.1, cached_tokens=32),)),
    ]
    lines = [encode_settings(RouterSettings()), *(encode_step(make_step(0.0, event, [])) for event in events)]
    recording = tmp_path / "run.jsonl"
    recording.write_text("\n".join([*lines, lines[-1][:9]]))
    assert list(resumed_work(recording)) == [(103, 7), (41, 9)]


def test_each_client_sends_each_kind_of_request() -> None:
    asked = requests(48, seed=1, longest=30, max_tokens=4, vocabulary=99, by=CLIENTS, kinds=tuple(Kind))
    assert {(one.by, one.kind) for one in asked} == {(by, kind) for by in By for kind in Kind}


def whole(token_ids: list[int], others: list[int] | None = None, **facts: Any) -> StormAnswer:
    parts = {0: Part(token_ids=token_ids, text=None)}
    return StormAnswer(parts=parts if others is None else {**parts, 1: Part(token_ids=others)}, **facts)


def test_float64_judges_whole_and_partial_answers() -> None:
    oracle, verdict = Oracle(BUNDLED), Verdict()
    asked = requests(6, seed=2, longest=9, max_tokens=3, vocabulary=99)[::2]  # greedy
    right = [greedy(oracle, one.prompt, 3) for one in asked]
    wrong_of = same_as_float64(asked, oracle, verdict)
    spoilt = [right[0][0], (right[0][1] + 1) % 99, right[0][2]]
    assert "tokens are not those of float64" in wrong_of(0, whole(spoilt))
    assert wrong_of(0, whole(right[0])) == ""
    assert wrong_of(1, whole(right[1][:2])) == "2 tokens of 3"
    assert wrong_of(1, whole(right[1][:2], error=InternalError("2 workers died"))) == ""
    assert wrong_of(2, StormAnswer(error=InternalError("2 workers died"))) == ""
    assert verdict.num_positions == 3 + 3 + 2


def greedy(oracle: Oracle, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle.logits(tokens, len(tokens) - 1)[-1].argmax()))
    return tokens[len(prompt) :]
