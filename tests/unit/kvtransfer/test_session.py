"""The lifecycle tables themselves, and one session under random events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.protocol.session import ENDED, FAULTS, OPEN, RECEIVER_MOVES, SENDER_MOVES, Event, Moves, Session, State

BOTH = pytest.mark.parametrize("moves", [RECEIVER_MOVES, SENDER_MOVES], ids=["receiver", "sender"])


@BOTH
def test_end_states_have_no_moves(moves: Moves) -> None:
    assert not [pair for pair in moves if pair[0] in ENDED]


@BOTH
def test_every_open_state_fails_on_every_fault_and_ends_on_abort(moves: Moves) -> None:
    for state in OPEN:
        assert all(moves[state, fault] is State.FAILING for fault in FAULTS)
        assert moves[state, Event.ABORTED] in (State.ABORTING, State.FAILING)


@BOTH
def test_memory_is_freed_only_after_a_checksum_or_quiet(moves: Moves) -> None:
    into_the_end = {(event, after) for (_, event), after in moves.items() if after in ENDED}
    assert into_the_end <= {
        (Event.CHECKED, State.VERIFIED),
        (Event.QUIET, State.FAILED),
        (Event.QUIET, State.DRAINED),
    }


@BOTH
def test_every_state_that_is_used_can_reach_an_end(moves: Moves) -> None:
    for state in {state for state, _ in moves}:
        reached, edge = {state}, [state]
        while edge:
            here = edge.pop()
            new = {after for (before, _), after in moves.items() if before is here} - reached
            reached |= new
            edge += new
        assert reached & set(ENDED), state


def test_an_abort_during_a_write_drains_when_the_write_closes() -> None:
    session = Session(RECEIVER_MOVES, 2)
    session.handle(Event.ANNOUNCED)
    assert session.claim(0, 2)
    assert session.enter()
    session.handle(Event.ABORTED, "enough")
    assert session.state is State.ABORTING
    assert not session.enter()
    session.handle(Event.OVERDUE)
    assert session.state is State.QUARANTINED
    session.leave()
    assert (session.state, session.error) == (State.DRAINED, "enough")


def test_the_last_checksum_does_not_verify_while_a_write_is_open() -> None:
    session = Session(RECEIVER_MOVES, 1)
    session.handle(Event.ANNOUNCED)
    assert session.claim(0, 1)
    assert session.enter()
    session.mark_transferred(0, 1)
    session.check(0, 1, True)
    assert session.state is State.SENT
    session.leave()
    assert session.state is State.VERIFIED


def test_a_dead_writer_ends_the_quarantine() -> None:
    session = Session(RECEIVER_MOVES, 1)
    session.handle(Event.ANNOUNCED)
    session.enter()
    session.handle(Event.ABORTED)
    session.handle(Event.OVERDUE)
    session.writer_gone()
    assert session.state is State.DRAINED


def test_the_first_fault_is_reported() -> None:
    session = Session(RECEIVER_MOVES, 1)
    session.handle(Event.ANNOUNCED)
    session.enter()
    session.handle(Event.CORRUPT, "first")
    session.handle(Event.ABORTED, "second")
    session.leave()
    assert (session.state, session.error) == (State.DRAINED, "first")


STEPS = st.lists(
    st.one_of(
        st.sampled_from(sorted(Event, key=lambda e: e.value)),
        st.tuples(st.just("claim"), st.integers(-1, 4), st.integers(0, 4)),
        st.tuples(st.sampled_from(["transferred", "enter", "leave", "good", "bad"]), st.integers(0, 10)),
    ),
    max_size=40,
)


@BOTH
@given(STEPS)
def test_no_schedule_verifies_without_coverage_or_ends_with_an_open_access(moves: Moves, steps: list[object]) -> None:
    """The session itself creates CHECKED and QUIET. All other events may come at any time, in any order."""
    size = 4
    session = Session(moves, size)
    claims: list[tuple[int, int]] = []
    transferred, good = set[int](), set[int]()
    ended: State | None = None
    for step in steps:
        if isinstance(step, Event):
            if step not in (Event.CHECKED, Event.QUIET, Event.COVERED):
                session.handle(step)
        else:
            name, *numbers = step  # type: ignore[misc]
            if name == "claim" and session.claim(*numbers):
                claims.append((numbers[0], numbers[1]))
            elif name == "enter":
                session.enter()
            elif name == "leave":
                session.leave()
            elif claims and name != "claim":
                first, count = claims[numbers[0] % len(claims)]
                span = set(range(first, first + count))
                if name == "transferred":
                    transferred |= span
                    session.mark_transferred(first, count)
                elif span <= transferred:
                    good |= span if name == "good" else set()
                    session.check(first, count, name == "good")
        if session.state is State.VERIFIED:
            assert transferred == good == set(range(size))
        if session.has_ended:
            assert session.accesses == 0
            assert not session.enter()
            assert ended in (None, session.state), "an end is final"
            ended = session.state


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 1), (0, 3), (2, 1), (1, -1)])
def test_an_empty_or_foreign_chunk_gets_no_claim(first: int, count: int) -> None:
    session = Session(RECEIVER_MOVES, 2)
    session.handle(Event.ANNOUNCED)
    assert not session.claim(first, count)
    assert session.claimed.count == 0
    assert session.claim(0, 2)
