from __future__ import annotations

import math
import os
import select
import threading

import pytest

from pdserve.core.durations import DAY_S, backoff_s, check_duration, clamped_s
from pdserve.core.errors import InvalidRequest

NO_DURATIONS = [math.nan, math.inf, -math.inf, -1e-9, 86_400.1, 1e300]


@pytest.mark.parametrize("seconds", NO_DURATIONS)
def test_an_invalid_duration_is_rejected(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^deadline_s: got .*, expected between 0 and 86400 seconds$"):
        check_duration("deadline_s", seconds)


@pytest.mark.parametrize("seconds", [0, 0.0, 1e-9, 600, DAY_S])
def test_valid_durations_are_accepted(seconds: float) -> None:
    check_duration("deadline_s", seconds)


@pytest.mark.parametrize(
    ("wait_s", "clamped"),
    [(-1.0, 0.0), (-math.inf, 0.0), (0.5, 0.5), (3e6, DAY_S), (math.inf, DAY_S), (math.nan, DAY_S)],
)
def test_a_wait_is_clamped(wait_s: float, clamped: float) -> None:
    assert clamped_s(wait_s) == clamped


def test_the_longest_wait_suits_every_timer() -> None:
    """Each timer returns at once here, and would raise OverflowError if the wait were too long."""
    done = threading.Event()
    done.set()
    assert done.wait(DAY_S)
    poll = select.poll()
    reader, writer = os.pipe()
    poll.register(writer, select.POLLOUT)
    assert poll.poll(DAY_S * 1000)
    assert threading.TIMEOUT_MAX > DAY_S
    for end in (reader, writer):
        os.close(end)


def test_a_backoff_doubles_up_to_its_limit_and_never_overflows() -> None:
    assert [backoff_s(0.05, 2.0, doublings) for doublings in (0, 1, 2, 6)] == [0.05, 0.1, 0.2, 2.0]
    assert backoff_s(0.05, 2.0, 10**6) == 2.0
