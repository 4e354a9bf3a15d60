"""The account of prediction errors, over recordings of simulated runs: their predictions are known exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.prediction import TPOT_ROWS, TTFT_ROWS, read, report, tpot_errors, ttft_errors
from benchmarks.prediction_parts import Account, Parts, RecordedAnswer, account
from pdserve.core.errors import ConfigError
from pdserve.core.types import Role, Slo
from router.recording import replay
from router.state.settings import RouterSettings
from simulator.cluster.world import World
from simulator.model import SimConfig, SimResult, TraceRequest
from simulator.traces.trace_rows import NumberedLine, TraceError
from tests.unit.router.small_worker import shape

SETTLE_S = 4.0


class Requests:
    """Short and long prompts, as in benchmarks.goodput."""

    name, block_tokens = "mixed", 16

    def __init__(self, rate_rps: float) -> None:
        self._rate_rps = rate_rps

    def __iter__(self) -> Iterator[TraceRequest]:
        rng = random.Random(1)
        at_s = 0.0
        while at_s < 160.0 / self._rate_rps:
            tokens = rng.randint(400, 1000) if rng.random() < 0.25 else rng.randint(24, 160)
            yield TraceRequest(arrival_s=at_s, prompt_tokens=tokens, output_tokens=rng.randint(16, 64))
            at_s += rng.expovariate(self._rate_rps)


class Recorder:
    """Records the events and commands of a router."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self.lines = [replay.encode_settings(router.settings)]

    def handle(self, event: Any, now_s: float) -> Any:
        commands = self._router.handle(event, now_s)
        self.lines.append(replay.encode_step(replay.make_step(now_s, event, commands)))
        return commands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)


@cache
def recorded(policy: str = "goodput", prefill: int = 1, rate_rps: float = 8.0) -> tuple[SimResult, list[NumberedLine]]:
    names = [(f"p{n}", Role.PREFILL) for n in range(prefill)] + [(f"d{n}", Role.DECODE) for n in range(2 - prefill)]
    config = SimConfig(
        workers=tuple(shape(name, role) for name, role in names),
        slo=Slo(ttft_s=0.5, tpot_s=0.05),
        router=RouterSettings(policy=policy),
        block_size=16,
        message_s=1e-3,
        noise=0.05,
        report_s=1e-6,  # every step is reported, as by live workers
    )
    world = World(Requests(rate_rps), config)
    (front,) = world.fronts
    recorder = Recorder(front.state)
    front.state = recorder  # type: ignore[assignment]
    return world.run(), list(enumerate(recorder.lines, start=1))


@cache
def told(policy: str = "goodput", prefill: int = 1) -> Account:
    return account(recorded(policy, prefill)[1], "r", SETTLE_S)


def remote() -> list[RecordedAnswer]:
    found = [one for one in told().answers if one.parts is not None]
    assert len(found) > 20
    return found


def test_replayed_predictions_match_the_router() -> None:
    """The answers are those of the run, and their errors are those that it measured itself."""
    result, _ = recorded()
    rows = [row for row in result.requests if row.outcome == "served" and row.arrival_s >= SETTLE_S]
    expected = sorted((row.ttft_s, row.predicted_ttft_s, row.tpot_s, row.predicted_tpot_s) for row in rows)
    found = sorted(
        (one.ttft_s, one.waited_s + one.predicted.ttft_s, one.tpot_s, one.predicted.tpot_s) for one in told().answers
    )
    assert told().otherwise == 0
    assert len(found) == len(expected) > 100
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_a_partly_rejected_burst_is_reproduced() -> None:
    result, lines = recorded(rate_rps=60.0)
    assert any(row.outcome == "rejected" for row in result.requests)
    found = account(lines, "r", 0.0)
    assert (found.uses_recorded_placement, found.otherwise) == (False, 0)
    assert found.left_out == sum(row.outcome not in ("served", "late") for row in result.requests)


def test_exact_predictions_have_no_error() -> None:
    errors = ttft_errors(told().answers)
    assert errors[-1] == pytest.approx(0.0, abs=1e-9)
    assert errors[0] > 0.0
    tpot = tpot_errors(told().answers)
    assert tpot[0] > tpot[-1]
    assert tpot[-1] < 0.05  # the noise of a mean over single steps


@pytest.mark.parametrize("part", Parts._fields)
def test_an_error_in_one_part_is_attributed_to_it(part: str) -> None:
    """The router foretells 80 ms too much of one part of every first token."""
    wrong = []
    for one in remote():
        predicted = one.predicted
        assert predicted.parts is not None
        parts = predicted.parts._replace(**{part: getattr(predicted.parts, part) + 0.08})
        wrong.append(replace(one, predicted=replace(predicted, ttft_s=predicted.ttft_s + 0.08, parts=parts)))
    before, after = ttft_errors(remote()), ttft_errors(wrong)
    singles = dict(zip(("grant_s", "queue_s", "prefill_s", "reply_s"), range(1, 5), strict=True))
    assert after[0] > before[0] + 0.5
    assert after[singles.pop(part)] < 0.1
    assert all(after[index] > 0.5 for index in singles.values())
    assert after[-1] == pytest.approx(0.0, abs=1e-9)


def test_an_error_in_gaps_or_steps_is_attributed_to_them() -> None:
    late = [
        replace(one, predicted=replace(one.predicted, first_gap_s=one.predicted.first_gap_s + 0.2))
        for one in told().answers
    ]
    slow = [replace(one, predicted=replace(one.predicted, step_s=2.0 * one.predicted.step_s)) for one in told().answers]
    row = {one.name: index for index, one in enumerate(TPOT_ROWS)}
    gap, steps = row["true length and first gap"], row["true length and decode rows of each step"]
    assert tpot_errors(late)[gap] == tpot_errors(told().answers)[gap]
    assert tpot_errors(late)[steps] > 0.5
    assert tpot_errors(slow)[steps] == tpot_errors(told().answers)[steps]
    assert tpot_errors(slow)[gap] > 0.5


def test_answers_that_overlap_a_prefill_are_counted_separately() -> None:
    met = [one for one in told().answers if one.meets_prompt]
    free = [one for one in told().answers if not one.meets_prompt]
    assert min(len(met), len(free)) > 5
    assert all(one.mixed_s == one.rows_s for one in free)
    assert median(one.mixed_s - one.rows_s for one in met) > 0.0


def test_the_report_has_every_row_in_order() -> None:
    text = report([told(), told()])
    assert f"Of 2 recorded runs {2 * len(told().answers)} requests" in text
    for rows in (TTFT_ROWS, TPOT_ROWS):
        places = [text.index(f"| {row.name} |") for row in rows[1:]]
        assert places == sorted(places)
    assert "; 0 more had no whole answer" in text
    assert "other rules" not in text


@pytest.mark.parametrize(("policy", "prefill"), [("round-robin", 1), ("colocated", 0)])
def test_a_run_of_another_policy_is_priced_as_it_was_placed(policy: str, prefill: int) -> None:
    found = told(policy, prefill)
    assert (found.uses_recorded_placement, found.otherwise) == (False, 0)
    assert all((one.parts is not None) is bool(prefill) for one in found.answers)


def test_a_recording_of_other_rules_keeps_its_placements() -> None:
    """The recording names goodput, but round-robin made it. A router with goodput decides differently, which is
    reported."""
    lines = recorded("round-robin")[1]
    claimed = [(1, replay.encode_settings(RouterSettings(policy="goodput"))), *lines[1:]]
    found = account(claimed, "r", SETTLE_S)
    assert (found.uses_recorded_placement, found.otherwise) == (True, 0)
    for one, other in zip(found.answers, told("round-robin").answers, strict=True):
        assert one.predicted.ttft_s == pytest.approx(other.predicted.ttft_s)
        assert one.predicted.tpot_s == pytest.approx(other.predicted.tpot_s)
        assert replace(one, predicted=other.predicted) == other
    assert "Recorded by other rules" in report([found])


def test_a_run_without_remote_requests_says_so() -> None:
    found = told("goodput", 0)
    assert ttft_errors(found.answers) == []
    text = report([found])
    assert "TTFT of remote requests (none)" in text
    assert "| true prefill | none |" in text
    assert "| all four | none | | |" in text


def test_a_cut_last_line_ends_the_recording() -> None:
    lines = recorded()[1]
    number, text = lines[-1]
    whole = account(lines[:-1], "r", SETTLE_S)
    assert account([*lines[:-1], (number, text[:-9])], "r", SETTLE_S) == whole


def test_differing_commands_are_counted() -> None:
    """The recorded router sent a token to the client twice; this one does not."""
    lines = list(recorded()[1])
    index = next(index for index, (_, text) in enumerate(lines) if '"is":"EmitTokens"' in text)
    step = replay.decode_step(lines[index][1])
    lines[index] = (index + 1, replay.encode_step(replace(step, commands=step.commands * 2)))
    found = account(lines, "r", SETTLE_S)
    assert found.otherwise == 1
    assert "1 steps came out otherwise" in report([found])


def test_an_invalid_recording_names_its_line(tmp_path: Path) -> None:
    lines = [text for _, text in recorded()[1]]
    for name, text, line, column in (
        ("empty", "", 1, "settings"),
        ("trace", '{"timestamp": 1}\n', 1, "settings"),
        ("binary", "\x00\x01", 1, "settings"),
        ("torn", "\n".join([*lines[:7], lines[7][:20], *lines[8:]]), 8, "step"),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text)
        with pytest.raises(TraceError, match=f"{name}.jsonl, line {line}") as caught:
            read(str(path), 0.0)
        assert caught.value.column == column


def test_an_empty_result_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(recorded()[1][0][1] + "\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl, expected a whole answer of 3 tokens"):
        read(str(path), 60.0)
    with pytest.raises(ConfigError, match="a file that can be read"):
        read(str(tmp_path / "missing.jsonl"), 60.0)
    with pytest.raises(ConfigError, match="asked for 1000 s or more after its first request"):
        account(recorded()[1], "r", 1000.0)
