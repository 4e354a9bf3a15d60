"""Draws the states in docs/transfer.md from the tables. `python -m scripts.states_page` rewrites the page; all else
here is pure."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Final

from kvtransfer.protocol.session import FAULTS, OPEN, RECEIVER_MOVES, SENDER_MOVES, Event, Moves, State

PAGE: Final = Path(__file__).parents[1] / "docs/transfer.md"
BEGIN: Final = (
    "<!-- States: made by `python -m scripts.states_page` from kvtransfer/protocol/session.py. Not edited. -->"
)
END: Final = "<!-- End of what is made. -->"

MEANING: Final[dict[State, str]] = {
    State.GRANTED: "Opened; nothing has arrived from the other side.",
    State.SENDING: "Blocks are being sent.",
    State.SENT: "Every block has arrived (receiver) or was sent (sender).",
    State.VERIFIED: "Every checksum and stamp matched: the receiver's owner may commit, the sender's may reuse.",
    State.ABORTING: "The receiver's owner aborted; a write may still be open.",
    State.QUARANTINED: "Aborting for longer than the grace time. The blocks stay reserved.",
    State.DRAINED: "Aborted, and no access is open.",
    State.FAILING: "Cannot complete; an access may still be open.",
    State.FAILED: "Cannot complete, and no access is open.",
}


def section() -> str:
    """The generated part, including its markers."""
    faults = ", ".join(fault.value for fault in FAULTS)
    rest = f"Not in the figure: from {', '.join(one.value for one in OPEN)}, any of {faults} leads to failing."
    lines = [
        BEGIN,
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> granted",
        *_arrows(RECEIVER_MOVES),
        "```",
        "",
        *textwrap.wrap(f"{rest} {_difference()}", 120),
        "",
        "| state | meaning |",
        "|---|---|",
        *[f"| {state.value} | {MEANING[state]} |" for state in State],
        "",
        END,
    ]
    return "\n".join(lines)


def page(old: str) -> str:
    """The page with the generated part replaced."""
    before, _, rest = old.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


def _arrows(moves: Moves) -> list[str]:
    return [
        f"    {state.value} --> {after.value}: {event.value}"
        for (state, event), after in moves.items()
        if event not in FAULTS
    ]


def _difference() -> str:
    """The difference between the sender's table and the receiver's."""
    others = sorted({after.value for (_, event), after in SENDER_MOVES.items() if event is Event.ABORTED})
    return f"The sender's table has the same moves, except that an abort leads to {' or '.join(others)}."


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE}\n")
