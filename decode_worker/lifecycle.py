"""The state machine of an attempt on a decode worker. Pure.

MOVES is the specification. An event that it does not allow at a stage is a defect of this worker. DecodeSequence.move
applies it, and docs/reference/lifecycles.md is drawn from it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class DecodeStage(Enum):
    RECEIVING = "receiving"  # blocks are held; the KV or the first token has not arrived
    WAITING = "waiting"  # will prefill its tokens; has no blocks
    RUNNING = "running"  # steps compute its tokens
    ENDING = "ending"  # abandoned, but a transfer may still write to its blocks
    RELEASED = "released"  # holds nothing


class DecodeMove(Enum):
    JOINED = "KV and first token arrived"
    STARTED = "started, with blocks"
    PREEMPTED = "preempted"  # its tokens are recomputed later, without changing
    ABANDONED = "abandoned while its KV arrives"
    RELEASED = "released"


STARTS: Final = {DecodeStage.RECEIVING: "remote", DecodeStage.WAITING: "local"}
MOVES: Final[dict[tuple[DecodeStage, DecodeMove], DecodeStage]] = {
    (DecodeStage.RECEIVING, DecodeMove.JOINED): DecodeStage.RUNNING,
    (DecodeStage.WAITING, DecodeMove.STARTED): DecodeStage.RUNNING,
    (DecodeStage.RUNNING, DecodeMove.PREEMPTED): DecodeStage.WAITING,
    (DecodeStage.RECEIVING, DecodeMove.ABANDONED): DecodeStage.ENDING,
    (DecodeStage.RECEIVING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.WAITING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.RUNNING, DecodeMove.RELEASED): DecodeStage.RELEASED,
    (DecodeStage.ENDING, DecodeMove.RELEASED): DecodeStage.RELEASED,
}
