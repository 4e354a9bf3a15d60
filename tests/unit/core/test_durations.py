from __future__ import annotations

import math
import os
import select
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.durations import DAY_S, SLACK, Alarms, backoff_s, check_duration, clamped_s
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


# -- alarms, compared with a dict that is searched -------------------------------------------------------------

KEYS = st.sampled_from("abcde")
TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0, float("inf")])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, TIMES), st.tuples(st.just("clear"), KEYS), st.tuples(st.just("pop"), TIMES)
)


@given(st.lists(STEPS, max_size=300))
def test_alarms_match_a_searched_dict(steps: list[tuple[object, ...]]) -> None:
    alarms: Alarms[str] = Alarms()
    naive: dict[str, float] = {}  # In the order in which they were set.
    for step in steps:
        match step:
            case ("set", str(key), float(at_s)):
                alarms.set(key, at_s)
                naive.pop(key, None)
                naive[key] = at_s
            case ("clear", str(key)):
                alarms.clear(key)
                naive.pop(key, None)
            case ("pop", float(now_s)):
                first = min(naive, key=lambda key: naive[key], default=None)
                due = first if first is not None and naive[first] <= now_s else None
                assert alarms.pop_due(now_s) == due
                if due is not None:
                    del naive[due]
        alarms.check()
        assert set(alarms) == set(naive)
        assert alarms.next_at_s == min(naive.values(), default=None)


def test_cleared_alarms_take_no_memory() -> None:
    alarms: Alarms[int] = Alarms()
    alarms.set(-1, 5.0)  # An early alarm does not keep later ones in memory.
    for key in range(10_000):
        alarms.set(key, 600.0)
        alarms.clear(key)
        assert len(alarms._heap) <= 2 + SLACK
    assert alarms.next_at_s == 5.0


def test_a_moved_alarm_is_due_once() -> None:
    alarms: Alarms[str] = Alarms()
    alarms.set("a", 1.0)
    alarms.set("a", 3.0)
    assert alarms.pop_due(2.0) is None
    assert alarms.pop_due(3.0) == "a"
    assert alarms.pop_due(9.0) is None
