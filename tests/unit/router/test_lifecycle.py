"""The lifecycle table itself, and the page that is drawn from it."""

from __future__ import annotations

import pytest

from pdserve.core.types import Role
from router.state.interface import RouterSettings
from router.state.lifecycle import (
    ENDED,
    IN_BATCH,
    LIVE,
    MOVES,
    NEEDS_SENDER,
    WITH_WORKERS,
    IllegalMove,
    Move,
    SenderEnd,
    Stage,
)
from router.state.request import Request
from router.state.state import RouterState
from scripts.drawn_pages import COMMAND, DOCS, STAGES, lifecycle_page
from tests.unit.router.router_events import arrival, hello


def test_docs_lifecycle_matches_the_table() -> None:
    assert (DOCS / "lifecycle.md").read_text() == lifecycle_page(), f"run {COMMAND}"


def test_every_stage_is_explained() -> None:
    assert set(STAGES) == set(Stage)


def test_every_stage_is_live_ended_or_forgotten() -> None:
    assert set(LIVE) | set(ENDED) | {Stage.FORGOTTEN} == set(Stage)
    assert not set(LIVE) & set(ENDED)


def test_every_stage_can_be_reached_and_left() -> None:
    reached = {Stage.QUEUED}
    while True:
        further = reached | {after for (stage, _), after in MOVES.items() if stage in reached}
        if further == reached:
            break
        reached = further
    assert reached == set(Stage)
    assert {stage for stage, _ in MOVES} == set(Stage) - {Stage.FORGOTTEN}


def test_an_ended_request_accepts_only_release() -> None:
    for stage in ENDED:
        assert {move for start, move in MOVES if start is stage} == {Move.RELEASED}


@pytest.mark.parametrize("move", [Move.CLIENT_LEFT, Move.DEADLINE, Move.GIVEN_UP, Move.LAST_TOKEN])
def test_any_live_request_may_end_at_any_time(move: Move) -> None:
    assert all(MOVES[stage, move] in ENDED for stage in LIVE)


def test_any_attempt_may_be_lost() -> None:
    assert {stage for stage, move in MOVES if move is Move.LOST} == set(WITH_WORKERS)


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("move", list(Move))
def test_moves_outside_the_table_are_illegal(stage: Stage, move: Move) -> None:
    strict = RouterState(RouterSettings(is_strict=True))._cluster
    lenient = RouterState(RouterSettings())._cluster
    request = Request(facts=arrival("a"), arrived_s=0.0, deadline_at_s=None, serial=1, stage=stage)
    after = MOVES.get((stage, move))
    if after is not None:
        assert strict.move(request, move)
        assert request.stage is after
        return
    with pytest.raises(IllegalMove, match="request a"):
        strict.move(request, move)
    assert not lenient.move(request, move)
    assert request.stage is stage, "an illegal event changes nothing"
    assert lenient.counters["illegal"] == 1


def test_an_arrival_with_an_id_in_use_is_illegal() -> None:
    state = RouterState(RouterSettings(is_strict=True))
    state.handle(hello("d0", Role.DECODE), 0.0)
    state.handle(arrival("a"), 0.0)
    with pytest.raises(IllegalMove, match="'arrived' while"):
        state.handle(arrival("a"), 0.0)


@pytest.mark.parametrize("end", list(SenderEnd))
def test_only_remote_stages_need_the_prefill_worker(end: SenderEnd) -> None:
    """The prefill worker is needed until the receiver has all KV. A local request never needs one."""
    assert NEEDS_SENDER[end] <= set(WITH_WORKERS) - {Stage.RESERVING_LOCAL, Stage.LOCAL} - IN_BATCH
    assert {Stage.RESERVING, Stage.PREFILLING} <= NEEDS_SENDER[end]
