"""A recording that is fed to a new router gives equal commands."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from pdserve.core.attempt import AttemptKey
from pdserve.core.errors import ConfigError
from pdserve.core.protocol import AttemptFailed, Cancel, Refused, TokenRow, TokensArrived
from pdserve.core.types import FinishReason, Sampling, Slo, TokenOut
from router.policy import POLICIES
from router.recording import replay
from router.state.interface import (
    ClientLeft,
    Outcome,
    RequestArrived,
    RouterSettings,
    StopMatched,
    TimePassed,
    WorkerLost,
)
from tests.unit.router.test_random_runs import run, run_with_drains
from tests.unit.router.world import World


def recording(world: World) -> list[str]:
    lines = [replay.encode_settings(world.state.settings)]
    lines += [replay.encode_step(replay.make_step(now_s, event, commands)) for now_s, event, commands in world.log]
    return [line + "\n" for line in lines]


#: Requests, rounds, minimum number of events, and minimum count of each kind of event and end.
TEN_THOUSAND = 1200, 60_000, 10_000, 10
SHORT = 400, 20_000, 3_000, 1
#: A policy has no state that a recording must contain. A policy with rules of its own replays as well.
EVERY_TIME = (RouterSettings().policy, "least-loaded", "round-robin")


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        *(
            pytest.param(name, SHORT, marks=() if name in EVERY_TIME else pytest.mark.slow, id=f"{name}-3000")
            for name in sorted(POLICIES)
        ),
        *(pytest.param(name, TEN_THOUSAND, marks=pytest.mark.slow, id=f"{name}-10000") for name in sorted(POLICIES)),
    ],
)
def test_thousands_of_recorded_events_replay_to_equal_commands(policy: str, size: tuple[int, int, int, int]) -> None:
    requests, stirs, events, least = size
    world = run(7, faults=0.02, policy=policy, requests=requests, stirs=stirs)
    assert len(world.log) > events
    seen = Counter(type(event) for _, event, _ in world.log)
    assert min(seen[kind] for kind in (ClientLeft, WorkerLost, Refused, AttemptFailed, StopMatched)) >= least, seen
    ends = world.state.counters
    assert min(ends[f"outcome_{kind}"] for kind in ("served", "late", "rejected", "expired", "cancelled")) >= least, (
        ends
    )
    assert list(replay.replay(recording(world))) == []


@pytest.mark.parametrize("policy", EVERY_TIME)
def test_recorded_migrations_replay_to_equal_commands(policy: str) -> None:
    world = run_with_drains(0, policy)
    assert world.state.counters["migrated"] > 0
    assert list(replay.replay(recording(world))) == []


def test_a_changed_command_is_found_with_its_step() -> None:
    world = run(3, faults=0.0, policy="least-ttft", requests=5, stirs=300)
    now_s, event, _ = world.log[20]
    world.log[20] = (now_s, event, (Cancel(key=AttemptKey("p0", "r0", 9)),))
    (difference,) = replay.replay(recording(world))
    assert difference.number == 21
    assert difference.step.event == event


def test_other_settings_give_other_commands() -> None:
    world = run(5, faults=0.0, policy="least-ttft")
    lines = recording(world)
    lines[0] = replay.encode_settings(dataclasses.replace(world.state.settings, policy="colocated")) + "\n"
    # Another policy receives messages that do not follow from its commands. A strict router would raise.
    lines[0] = lines[0].replace('"is_strict":true', '"is_strict":false')
    assert next(replay.replay(lines), None) is not None


def test_a_line_that_was_cut_off_ends_the_recording() -> None:
    lines = recording(run(2, faults=0.0, policy="least-ttft", requests=3, stirs=200))
    lines[-1] = lines[-1][: len(lines[-1]) // 2]
    assert list(replay.replay(lines)) == []


@pytest.mark.parametrize("first", ["", "no JSON\n", '{"now_s": 1}\n', '{"settings":{"policy":7}}\n', "[]\n"])
def test_a_file_that_is_no_recording_is_rejected(first: str) -> None:
    with pytest.raises(replay.RecordingError, match="line 1"):
        list(replay.replay([first]))


@pytest.mark.parametrize(
    "damaged", ["no JSON\n", "\n", '{"now_s":1}\n', '{"now_s":1,"event":{"is":"Magic"},"commands":[]}\n', "{"]
)
def test_a_damaged_line_is_named_by_its_number(damaged: str) -> None:
    lines = recording(run(2, faults=0.0, policy="least-ttft", requests=3, stirs=200))
    lines[10] = damaged
    with pytest.raises(replay.RecordingError, match="line 11") as caught:
        list(replay.replay(lines))
    assert caught.value.line == 11


def test_a_recording_of_an_unknown_policy_is_rejected() -> None:
    with pytest.raises(ConfigError, match="round-robin"):
        list(replay.replay(['{"settings":{"policy":"magic"}}\n']))


@pytest.mark.parametrize(
    "item",
    [
        RequestArrived(
            request_id="a",
            num_prompt_tokens=3,
            sampling=Sampling(max_tokens=4, stop=("x",), stop_token_ids=(1, 2), logprobs=0, seed=2**64 - 1),
            slo=Slo(ttft_s=0.5),
            deadline_s=2.5,
            block_hashes=(b"\x00" * 16, b"\xff" * 16),
            cached_blocks={"p0": 2},
        ),
        TokensArrived(
            worker_id="d0",
            rows=(
                TokenRow(
                    key=AttemptKey("d0", "a", 1),
                    output_index=0,
                    tokens=(TokenOut(token_id=1, logprob=-0.5, top=((1, -0.5), (2, -1.0))),),
                    finish=FinishReason.STOP,
                ),
            ),
        ),
        TimePassed(),
    ],
    ids=lambda item: type(item).__name__,
)
def test_events_survive_json(item: replay.Event) -> None:
    line = replay.encode_step(replay.make_step(1.5, item, []))
    assert replay.decode_step(line) == replay.Step(now_s=1.5, event=item, commands=())


def test_every_command_and_event_of_a_long_run_survives_json() -> None:
    world = run(11, faults=0.02, policy="least-ttft")
    for now_s, event, commands in world.log:
        step = replay.decode_step(replay.encode_step(replay.make_step(now_s, event, commands)))
        assert step == replay.Step(now_s=now_s, event=event, commands=commands)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"is": "Unheard"}, ValueError),
        ({"is": "ClientLeft", "request_id": "a", "colour": 1}, ValueError),
        ({"is": "ClientLeft", "request_id": 7}, TypeError),
        ({"is": "ClientLeft"}, TypeError),
        ({"is": "Granted", "key": ["d", "a", "1"]}, TypeError),
        ({"is": "Granted", "key": ["d", "a"]}, ValueError),
        ({"is": "Granted", "key": [None, "a", 1]}, TypeError),
    ],
)
def test_an_invalid_event_is_rejected(data: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        replay.decode(data)


def test_settings_survive_json() -> None:
    settings = RouterSettings(policy="round-robin", max_queue=3, is_strict=True, worker_silence_s=0.5)
    assert replay.decode_settings(replay.encode_settings(settings)) == settings
    assert Outcome("served") is Outcome.SERVED
