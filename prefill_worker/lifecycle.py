"""The state machine of an attempt on a prefill worker. Pure.

MOVES is the specification. An event that it does not allow at a stage is a defect of this worker. PrefillSequence.move
applies it, and docs/reference/lifecycles.md is drawn from it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class PrefillStage(Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    SENDING = "sending"  # completely computed; the sender may still read
    ENDING = "ending"  # abandoned, but the sender may still read
    RELEASED = "released"  # holds nothing


class PrefillMove(Enum):
    STARTED = "started, with blocks"
    COMPUTED = "first token sampled"
    ABANDONED = "abandoned while its KV may be read"
    RELEASED = "released"


STARTS: Final = {PrefillStage.WAITING: ""}
MOVES: Final[dict[tuple[PrefillStage, PrefillMove], PrefillStage]] = {
    (PrefillStage.WAITING, PrefillMove.STARTED): PrefillStage.COMPUTING,
    (PrefillStage.COMPUTING, PrefillMove.COMPUTED): PrefillStage.SENDING,
    (PrefillStage.COMPUTING, PrefillMove.ABANDONED): PrefillStage.ENDING,
    (PrefillStage.SENDING, PrefillMove.ABANDONED): PrefillStage.ENDING,
    (PrefillStage.WAITING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    # Its first token is its last, so its KV is not sent; or the transfer failed.
    (PrefillStage.COMPUTING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    (PrefillStage.SENDING, PrefillMove.RELEASED): PrefillStage.RELEASED,
    (PrefillStage.ENDING, PrefillMove.RELEASED): PrefillStage.RELEASED,
}
