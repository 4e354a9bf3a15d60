"""The state machine of a request in the router. Pure: no clock, sockets or randomness.

MOVES is the specification: an event that is not in it is illegal. `python -m scripts.drawn_pages` draws
docs/lifecycle.md from it. endings.py applies the ends of requests and of their attempts.

A message of an older attempt, or for a forgotten request, never reaches this table. It is late, and is only counted.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from pdserve.core.types import Role


class Stage(Enum):
    __hash__ = object.__hash__  # tables are read on every event, and Enum computes its hash in Python

    QUEUED = "queued"  # no worker has it: before its first attempt, or after a lost one
    RESERVING = "reserving"  # waits for the decode worker's grant
    PREFILLING = "prefilling"  # the prefill worker has it
    MOVING = "moving"  # the first token was sent, the KV is not committed
    LANDED = "landed"  # the KV is committed, the first token has not reached the router
    DECODING = "decoding"
    RESERVING_LOCAL = "reserving_local"  # waits for a decode worker that will compute everything
    LOCAL = "local"  # the decode worker prefills and decodes
    # The client has received its last message; workers may still hold memory.
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REJECTED = "rejected"
    FAILED = "failed"
    # No worker holds memory for it: the router forgets it.
    FORGOTTEN = "forgotten"


class Move(Enum):
    """The events of a request."""

    __hash__ = object.__hash__

    ARRIVED = "arrived"  # creates a request; illegal for a known one
    PLACED_REMOTE = "placed remote"
    PLACED_LOCAL = "placed local"
    GRANTED = "granted"
    DECLINED = "a worker declined"
    FIRST_TOKEN = "first token"
    COMMITTED = "KV committed"
    TOKENS = "tokens"
    LAST_TOKEN = "last token"
    LOST = "attempt lost"
    MIGRATED = "migrated"
    CLIENT_LEFT = "client left"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    GIVEN_UP = "given up"
    RELEASED = "all released"


WITH_WORKERS: Final = (
    Stage.RESERVING,
    Stage.PREFILLING,
    Stage.MOVING,
    Stage.LANDED,
    Stage.DECODING,
    Stage.RESERVING_LOCAL,
    Stage.LOCAL,
)
LIVE: Final = (Stage.QUEUED, *WITH_WORKERS)
ENDED: Final = (Stage.FINISHED, Stage.CANCELLED, Stage.EXPIRED, Stage.REJECTED, Stage.FAILED)

MOVES: Final[dict[tuple[Stage, Move], Stage]] = {
    (Stage.QUEUED, Move.PLACED_REMOTE): Stage.RESERVING,
    (Stage.RESERVING, Move.GRANTED): Stage.PREFILLING,
    (Stage.PREFILLING, Move.FIRST_TOKEN): Stage.MOVING,
    (Stage.MOVING, Move.COMMITTED): Stage.DECODING,
    # Messages of the two workers may arrive in any order.
    (Stage.PREFILLING, Move.COMMITTED): Stage.LANDED,
    (Stage.LANDED, Move.FIRST_TOKEN): Stage.DECODING,
    (Stage.DECODING, Move.TOKENS): Stage.DECODING,
    (Stage.QUEUED, Move.PLACED_LOCAL): Stage.RESERVING_LOCAL,
    (Stage.RESERVING_LOCAL, Move.GRANTED): Stage.LOCAL,
    (Stage.LOCAL, Move.TOKENS): Stage.LOCAL,
    # Either worker may decline. The attempt is then cancelled on the other one.
    (Stage.RESERVING, Move.DECLINED): Stage.QUEUED,
    (Stage.PREFILLING, Move.DECLINED): Stage.QUEUED,
    (Stage.RESERVING_LOCAL, Move.DECLINED): Stage.QUEUED,
    (Stage.QUEUED, Move.REJECTED): Stage.REJECTED,
    # A dead or silent worker, a failed transfer, or a worker's internal error. The request continues at the next token.
    **{(stage, Move.LOST): Stage.QUEUED for stage in WITH_WORKERS},
    # A running answer leaves a draining decode worker, and continues at the next token too.
    (Stage.DECODING, Move.MIGRATED): Stage.QUEUED,
    (Stage.LOCAL, Move.MIGRATED): Stage.QUEUED,
    # A stop string may be found in any stage, even if the request is queued again.
    **{(stage, Move.LAST_TOKEN): Stage.FINISHED for stage in LIVE},
    **{(stage, Move.CLIENT_LEFT): Stage.CANCELLED for stage in LIVE},
    **{(stage, Move.DEADLINE): Stage.EXPIRED for stage in LIVE},
    **{(stage, Move.GIVEN_UP): Stage.FAILED for stage in LIVE},
    **{(stage, Move.RELEASED): Stage.FORGOTTEN for stage in ENDED},
}


class SenderEnd(Enum):
    """How a prefill worker's part in an attempt can end before it has sent all KV."""

    LOST = "lost or silent"
    FAILED = "attempt failed"
    TRANSFER_FAILED = "transfer failed"
    RELEASED = "released"


#: The stages at which the attempt is lost if its prefill worker's part ends early. At the other stages it continues:
#: from MOVING on, the first token has arrived, and from LANDED on, the receiver has verified the KV.
NEEDS_SENDER: Final[dict[SenderEnd, frozenset[Stage]]] = {
    SenderEnd.LOST: frozenset({Stage.RESERVING, Stage.PREFILLING, Stage.MOVING, Stage.LANDED}),
    SenderEnd.FAILED: frozenset({Stage.RESERVING, Stage.PREFILLING, Stage.MOVING, Stage.LANDED}),
    SenderEnd.TRANSFER_FAILED: frozenset({Stage.RESERVING, Stage.PREFILLING, Stage.MOVING}),
    SenderEnd.RELEASED: frozenset({Stage.RESERVING, Stage.PREFILLING, Stage.LANDED}),
}
#: The request has an entry in the queue, in a worker's queue, or a backoff.
WAITING: Final = frozenset({Stage.QUEUED})
#: The stages at which a worker computes for the request. At the others, its crash has another cause.
COMPUTES: Final[dict[Role, frozenset[Stage]]] = {
    Role.PREFILL: frozenset({Stage.PREFILLING, Stage.LANDED}),
    Role.DECODE: frozenset({Stage.DECODING, Stage.LOCAL}),
}
#: A token of the answer comes from the decode worker alone, so it can leave that worker.
CAN_MIGRATE: Final = frozenset(stage for stage, move in MOVES if move is Move.MIGRATED)
#: Both workers have done their part: the sequence is in the decode worker's batch.
IN_BATCH: Final = frozenset({Stage.DECODING})


class IllegalMove(Exception):
    """A worker or the runtime violated the protocol. `story` lists the request's previous moves."""

    def __init__(self, request_id: str, stage: Stage, move: Move, story: tuple[str, ...] = ()) -> None:
        super().__init__(f"request {request_id}: {move.value!r} while {stage.value}; before: {', '.join(story) or '-'}")
        self.request_id, self.stage, self.move, self.story = request_id, stage, move, story
