"""Whether all blocks are freed if no more messages arrive and time passes.

Each side must do this alone, so local states are checked, not their product: threads finish their present call, clocks
advance, and owners release committed blocks.
"""

from __future__ import annotations

from kvtransfer.protocol.transfers import Job
from tests.unit.kvtransfer.model.checker import Event, Machine, Violated
from tests.unit.kvtransfer.model.decode_side import At, DecodeSide
from tests.unit.kvtransfer.model.prefill_side import PrefillSide

_MOST_STEPS = 100


def settle(machine: Machine, state: int) -> list[Event]:
    """The steps until no block is held. Raises Violated, with the steps so far in `trail`."""
    side: DecodeSide | PrefillSide = machine.copy(state)
    allowed_s = max(0.0, side.deadline_s() - side.now_s) + side.scenario.grace_s
    passed_s = 0.0  # Added up, because equal states may have different clocks.
    trail: list[Event] = []
    try:
        for _ in range(_MOST_STEPS):
            event = next_alone(side)
            if event is None:
                break
            trail.append(event)
            passed_s += max(0.0, (side.next_alarm_s() or 0.0) - side.now_s) if event == ("time passes",) else 0.0
            reaction = machine.react(state, event)
            assert reaction is not None, event
            state = reaction[0]
            side = machine.copy(state)
        if side.holds:
            raise Violated("freed in time", f"blocks {side.holds} are held for ever")
        if passed_s > allowed_s:
            raise Violated("freed in time", f"freed {passed_s - allowed_s:g} s after the deadline and the grace time")
    except Violated as violated:
        violated.trail = trail
        raise
    return trail


def next_alone(side: DecodeSide | PrefillSide) -> Event | None:
    """The side's next step without any message."""
    if isinstance(side, DecodeSide):
        for writer, thread in side.threads.items():
            if thread.at in (At.WRITING, At.WRITTEN):
                return "go on", writer
    elif isinstance(side.job, Job) and not side.job.transfer.session.is_open:
        return ("send",)  # The rest of the frame is sent from a copy.
    if side.next_alarm_s() is not None:
        return ("time passes",)
    if isinstance(side, DecodeSide):
        committed = [transfer for transfer, order in side.orders.items() if order.is_committed]
        return ("free", committed[0]) if committed else None
    return None
