"""No duration is negative if a clock goes back."""

from __future__ import annotations

import time

from pdserve.clock import steady


def test_a_clock_that_goes_back_continues() -> None:
    times = [100.0, 103.0, 50.0, 51.0, 50.5, 60.0]
    clock = steady(iter([times[0], *times]).__next__)
    assert [clock() for _ in times] == [100.0, 103.0, 103.0, 104.0, 104.0, 113.5]


def test_only_clocks_that_may_go_back_are_corrected() -> None:
    clock = steady(lambda: 1.0)
    assert steady(clock) is clock
    assert steady(time.monotonic) is time.monotonic
