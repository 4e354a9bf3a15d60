"""The order of the queue: levels, targets, tenants and ageing, and a bound on waiting."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.state.queue import LATE_SHARE, Entry, Queue
from tests.support.examples import examples


def entry(name: str, key: float, serial: int | None = None, **facts: object) -> Entry:
    held: dict[str, object] = {"prefill_s": 1.0, "level": (1, 0), "late_at_s": key}
    serial = int(name.strip("abcdefghijklmnopqrstuvwxyz") or 0) if serial is None else serial
    return Entry(key=key, serial=serial, request_id=name, **{**held, **facts})  # type: ignore[arg-type]


def queue_of(*entries: Entry, is_ageing: bool = True) -> Queue:
    queue = Queue(is_ageing=is_ageing)
    for one in entries:
        queue.add(one)
    queue.check()
    return queue


def drained(queue: Queue) -> list[str]:
    order = []
    while (first := queue.first()) is not None:
        order.append(first)
        queue.take(first)
        queue.check()
    return order


def test_earlier_late_requests_are_ahead_of_a_late_one() -> None:
    queue = queue_of(entry("a1", 5.0, prefill_s=1.0), entry("b2", 3.0, prefill_s=2.0), entry("c3", 4.0, prefill_s=4.0))
    for name in ("a1", "b2"):
        queue.turn_late(name)
    assert [queue.late_ahead_s(name) for name in ("a1", "b2", "c3")] == [0.0, 1.0, 3.0]


def test_the_least_slack_goes_first_and_earlier_arrivals_among_equals() -> None:
    assert drained(queue_of(entry("a1", 5.0), entry("b2", 3.0), entry("c3", 5.0))) == ["b2", "a1", "c3"]


def test_resumed_requests_and_classes_precede_slack() -> None:
    queue = queue_of(
        entry("hasty1", 0.1),
        entry("high2", 9.0, level=(1, -3)),
        entry("begun3", 99.0, level=(0, 0)),
        entry("low4", 0.0),
    )
    assert drained(queue) == ["begun3", "high2", "low4", "hasty1"]


def test_late_requests_go_after_those_on_time() -> None:
    queue = queue_of(entry("late1", 1.0), entry("a2", 5.0), entry("b3", 6.0))
    assert queue.mark_newly_late(2.0) == ["late1"]
    assert queue.mark_newly_late(2.0) == []
    assert drained(queue) == ["a2", "b3", "late1"]


def test_a_late_request_precedes_lower_classes() -> None:
    queue = queue_of(entry("vip1", 1.0, level=(1, -1)), entry("a2", 5.0))
    queue.mark_newly_late(2.0)
    assert drained(queue) == ["vip1", "a2"]


def test_a_late_request_goes_first_when_it_has_credit() -> None:
    queue = queue_of(entry("late0", 0.0), entry("a1", 1e6))
    queue.mark_newly_late(1.0)
    taken = 0
    while (first := str(queue.first())) != "late0":
        queue.take(first)
        taken += 1
        queue.add(entry(f"a{taken + 1}", 1e6))
        queue.check()
    assert taken == round(1.0 / LATE_SHARE)


def test_without_ageing_a_late_request_waits_for_idle_time() -> None:
    queue = queue_of(entry("late0", 0.0), entry("a1", 1e6), is_ageing=False)
    queue.mark_newly_late(1.0)
    for serial in range(2, 500):
        queue.add(entry(f"a{serial}", 1e6))
        queue.take(str(queue.first()))
    assert "late0" in queue


def test_a_skipped_request_stays_queued() -> None:
    queue = queue_of(entry("a1", 1.0), entry("b2", 2.0), entry("late3", 0.0))
    queue.mark_newly_late(0.5)
    assert queue.first(["a1"]) == "b2"
    assert queue.first(["a1", "b2"]) == "late3"
    assert queue.first(["a1", "b2", "late3"]) is None
    assert len(queue) == 3


def test_a_tenant_that_is_ahead_yields() -> None:
    queue = queue_of(entry("heavy1", 1.0, tenant="heavy"), entry("light2", 9.0, tenant="light"))
    for _ in range(5):
        queue.fairness.charge("heavy", 1.0)
    assert drained(queue) == ["light2", "heavy1"]


def test_within_a_quantum_slack_decides() -> None:
    queue = queue_of(entry("heavy1", 1.0, tenant="heavy"), entry("light2", 9.0, tenant="light"))
    for _ in range(2):
        queue.fairness.charge("heavy", 1.0)
    assert drained(queue) == ["heavy1", "light2"]


def test_a_requeued_request_is_late_by_its_new_time() -> None:
    queue = queue_of(entry("a1", 1.0))
    queue.remove("a1")
    queue.add(entry("a1", 5.0, serial=2))
    assert queue.mark_newly_late(2.0) == []
    assert queue.mark_newly_late(5.0) == ["a1"]


def test_times_of_ended_requests_are_dropped() -> None:
    queue = Queue()
    for serial in range(10_000):
        queue.add(entry("a", 1e9, serial=serial))
        queue.remove("a")
    assert len(queue._due) < 200


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_no_request_starves_under_overload(data: st.DataObject) -> None:
    """The bound in queue.py holds while competing requests arrive as fast as requests are taken."""
    late = data.draw(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=3))
    queue = queue_of(*(entry(f"old{index}", 0.0, prefill_s=one) for index, one in enumerate(late)))
    queue.mark_newly_late(1.0)
    target = f"old{len(late) - 1}"
    bound_s = sum(late) / LATE_SHARE
    others_s, serial, largest_s = 0.0, 100, 0.0
    while target in queue:
        for _ in range(data.draw(st.integers(1, 2))):
            serial += 1
            prefill_s = data.draw(st.floats(0.2, 2.0))
            key = data.draw(st.floats(1.5, 1e6))
            level = (1, -data.draw(st.integers(0, 2)))
            tenant = data.draw(st.sampled_from(["", "a", "b"]))
            queue.add(entry(f"new{serial}", key, serial, prefill_s=prefill_s, level=level, tenant=tenant))
        first = str(queue.first())
        if first == target:
            return
        work_s = queue.entry(first).prefill_s
        others_s += work_s if first.startswith("new") else 0.0
        largest_s = max(largest_s, work_s)
        queue.take(first)
        queue.fairness.charge("a", work_s)
        assert others_s <= bound_s + largest_s + 1e-6, "it should have had its turn"


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from("xyz"), st.floats(0.0, 9.0)), max_size=40)
)
def test_random_operations_keep_the_queue_consistent(moves: list[tuple[int, int, str, float]]) -> None:
    queue, now_s, waiting = Queue(), 0.0, 0
    for serial, (kind, level, tenant, key) in enumerate(moves):
        if kind <= 2:
            queue.add(entry(f"r{serial}", now_s + key, level=(min(level, 1), 0), tenant=tenant, prefill_s=key))
            waiting += 1
        elif kind == 3:
            now_s += key
            queue.mark_newly_late(now_s)
        elif (first := queue.first()) is not None:
            queue.take(first) if kind == 4 else queue.remove(first)
            queue.fairness.charge(tenant, key)
            waiting -= 1
        queue.check()
        assert len(queue) == len(list(queue)) == waiting
