"""Alarms, compared with a dict that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.alarms import SLACK, Alarms

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
