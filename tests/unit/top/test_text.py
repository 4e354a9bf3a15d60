"""Rows of the terminal: readable without colour, within 80 columns."""

from __future__ import annotations

from itertools import accumulate

import pytest

from pdserve.core.live import LivePhases
from pdserve.top import text
from pdserve.top.text import MAX_ENDED, WINDOW_S, History, percentile
from tests.unit.top.given import ended, frame, request, worker


def phases(*parts: tuple[str, float]) -> LivePhases:
    names, seconds = zip(*parts, strict=True)
    return LivePhases(names, tuple(accumulate(seconds, initial=0.0))[:-1], seconds)


def test_a_bar_has_a_letter_for_each_part_of_the_window() -> None:
    one = request(
        arrived_s=92.0, phases=phases(("queue", 1.0), ("prefill", 2.0), ("transfer_wait", 1.0), ("decode", 4.0))
    )
    assert text.bar(one, 100.0, 10.0, 10) == "  .PPTDDDD"
    assert text.bar(one, 105.0, 10.0, 10) == "TDDDD     "
    assert text.bar(one, 200.0, 10.0, 10) == " " * 10


def test_a_short_phase_stays_visible() -> None:
    one = request(arrived_s=95.0, phases=phases(("prefill", 1.0), ("messages", 0.001), ("decode", 0.001)))
    assert text.bar(one, 100.0, 10.0, 10) == "     PD   "


@pytest.mark.parametrize(
    ("free", "cached", "expected"),
    [(100, 0, "....."), (60, 20, "#:..."), (0, 0, "#####"), (99, 0, "#...."), (0, 100, ":::::")],
)
def test_a_workers_blocks(free: int, cached: int, expected: str) -> None:
    assert text.kv_bar(worker(free_blocks=free, cached_blocks=cached), 5) == expected


def test_states_of_workers() -> None:
    assert text.worker_state(worker()) == "ready"
    assert text.worker_state(worker(is_connected=False, is_drained=True)) == "lost"
    assert text.worker_state(worker(is_draining=True)) == "draining"
    assert text.worker_state(worker(is_draining=True, is_drained=True)) == "drained"


def test_numbers_have_units() -> None:
    assert [text.seconds(value) for value in (None, 0.0012, 0.25, 3.0)] == ["-", "1.2 ms", "250 ms", "3.00 s"]
    assert [text.num_bytes(value) for value in (0, 2048, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]


def test_the_tiles_fit_80_columns() -> None:
    history = History()
    history.ingest(frame(100.0))
    history.ingest(
        frame(
            101.0,
            *[ended(str(n), 100.5, ttft_s=123.456, tpot_s=1.5) for n in range(900)],
            output_tokens=10**6,
            transfer_bytes=10**12,
        )
    )
    tiles = history.tiles()
    assert tiles is not None
    assert all(len(line) <= 80 for line in text.tile_lines(tiles))


# --- the last minute ------------------------------------------------------------------------------------------
# Rates, percentiles and notes of the last minute.


def test_history_is_empty_before_the_first_frame() -> None:
    assert (History().tiles(), History().requests()) == (None, [])


def test_tiles_show_the_last_minute() -> None:
    history = History()
    history.ingest(frame(100.0))
    history.ingest(
        frame(
            110.0,
            ended("a", 109.0, ttft_s=0.1, tpot_s=0.01),
            ended("b", 109.0, "late", ttft_s=3.0, tpot_s=0.03),
            ended("c", 109.0, "rejected", ttft_s=None, tpot_s=None),
            ended("d", 109.0, "cancelled", ttft_s=0.2),
            request("e", output_tokens=40, transfer_bytes=0),
            output_tokens=60,
            transfer_bytes=4096,
        )
    )
    tiles = history.tiles()
    assert tiles is not None
    assert (tiles.requests_per_s, tiles.in_time, tiles.rejected, tiles.running) == (0.4, pytest.approx(1 / 3), 1, 1)
    assert (tiles.ttft_p50_s, tiles.ttft_p99_s, tiles.tpot_p50_s) == (0.1, 3.0, 0.01)
    assert (tiles.tokens_per_s, tiles.transfer_bytes_per_s) == (10.0, 409.6)
    history.ingest(frame(110.0 + WINDOW_S + 1, output_tokens=60))
    after = history.tiles()
    assert after is not None
    assert (after.in_time, after.ttft_p50_s, after.requests_per_s, after.tokens_per_s) == (None, None, 0.0, 0.0)


def test_requests_in_progress_come_first_and_then_the_last_ended() -> None:
    history = History()
    history.ingest(
        frame(1.0, ended("old", 0.5), ended("new", 0.9), request("b", arrived_s=0.8), request("a", arrived_s=0.1))
    )
    assert [one.request_id for one in history.requests()] == ["a", "b", "new", "old"]


def test_memory_is_bounded() -> None:
    history = History()
    for number in range(MAX_ENDED + 50):
        history.ingest(frame(1.0 + number * 1e-3, ended(str(number), 1.0)))
    assert len(history.requests()) == MAX_ENDED
    assert len(history._counts) < MAX_ENDED * 2


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((worker("d0"),), (worker("d0", is_connected=False),), "d0 lost"),
        ((worker("d0", is_connected=False),), (worker("d0"),), "d0 connected"),
        ((worker("d0"),), (worker("d0", is_drained=True),), "d0 drained by an operator"),
        ((worker("d0", is_drained=True),), (worker("d0"),), "d0 resumed by an operator"),
        ((worker("d0", preemptions=1),), (worker("d0", preemptions=4),), "d0 preempted 3 for lack of KV blocks"),
        ((worker("d0"),), (), "d0 gone"),
        ((), (worker("d0"),), "d0 connected"),
    ],
)
def test_changes_of_workers_are_noted(before: tuple[object, ...], after: tuple[object, ...], expected: str) -> None:
    history = History()
    history.ingest(frame(1.0, workers=before))  # type: ignore[arg-type]
    history.ingest(frame(2.0, workers=after))  # type: ignore[arg-type]
    history.ingest(frame(3.0, workers=after))  # type: ignore[arg-type]
    assert [(one.at_s, one.text) for one in history.notes] == [(2.0, expected)]


def test_rejections_are_noted() -> None:
    history = History()
    history.ingest(frame(1.0, ended("a", 0.9, "rejected", why="too late")))
    assert [one.text for one in history.notes] == ["a rejected: too late"]


def test_percentiles_are_nearest_ranks() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
