"""Frames made from a recording: those that a viewer of the running router would have received."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.core.live import LiveFrame
from pdserve.core.types import Slo
from pdserve.profiles import load_profile
from router.recording import replay
from router.recording.play import MAX_ROWS, play
from router.state.interface import Command, Event, RouterSettings
from simulator.cluster.world import simulate
from simulator.model import SimConfig, SimResult
from simulator.search.layouts import make_workers
from simulator.traces.workloads import make_workload


@pytest.fixture(scope="module")
def recorded() -> tuple[list[str], SimResult]:
    trace = make_workload("chat", rate_rps=20.0, duration_s=3.0, seed=1)
    config = SimConfig(
        workers=make_workers(load_profile("h100-sxm.llama-3.1-8b.bf16"), 1, 1, link="nvlink"),
        slo=Slo(ttft_s=0.5, tpot_s=0.02),
        router=RouterSettings(is_strict=True),
        block_size=trace.block_tokens or 64,
    )
    lines = [replay.encode_settings(config.router)]

    def on_step(now_s: float, event: Event, commands: list[Command]) -> None:
        lines.append(replay.encode_step(replay.make_step(now_s, event, commands)))

    return lines, simulate(trace, config, on_step=on_step)


def ended(frames: Sequence[LiveFrame]) -> dict[str, float]:
    """Request id -> total seconds. Each request is shown once."""
    rows = [one for frame in frames for one in frame.requests if one.ended_s is not None]
    assert len({one.request_id for one in rows}) == len(rows)
    return {one.request_id: one.ended_s - one.arrived_s for one in rows if one.ended_s is not None}


@pytest.mark.parametrize(("period_s", "most_frames"), [(0.25, 2400), (0.05, 2400), (0.05, 10), (100.0, 2400)])
def test_each_request_of_a_recording_is_shown_once(
    recorded: tuple[list[str], SimResult], period_s: float, most_frames: int
) -> None:
    lines, result = recorded
    found = play(lines, period_s, most_frames)
    assert 1 <= len(found.frames) <= most_frames
    times = [one.at_s for one in found.frames]
    assert times == sorted(times)
    shown = ended(found.frames)
    assert len(shown) == len(result.requests) == found.frames[-1].totals.arrived
    assert all(len([one for one in frame.requests if one.ended_s is None]) <= MAX_ROWS for frame in found.frames)
    explained = {one.request_id for one in found.explanations}
    assert explained == set(shown)


def test_a_longer_period_has_fewer_frames(recorded: tuple[list[str], SimResult]) -> None:
    lines, _ = recorded
    fine, coarse = play(lines, 0.1), play(lines, 1.0)
    assert len(fine.frames) > 5 * len(coarse.frames) / 2
    assert coarse.period_s >= 1.0


def test_a_recording_without_events_has_no_frames() -> None:
    assert play([replay.encode_settings(RouterSettings())]).frames == ()


def test_a_broken_recording_is_an_error_with_its_line() -> None:
    with pytest.raises(replay.RecordingError, match="line 2"):
        play([replay.encode_settings(RouterSettings()), '{"now_s": 1}\n', "{}\n"])
    with pytest.raises(replay.RecordingError, match="line 1"):
        play([])
