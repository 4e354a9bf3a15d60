"""Rows of the terminal: readable without colour, within 80 columns."""

from __future__ import annotations

from itertools import accumulate

import pytest

from pdserve.core.live import LivePhases
from pdserve.top import text
from pdserve.top.text import History
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
