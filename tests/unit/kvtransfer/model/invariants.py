"""What must hold in every reachable state. The sides and the world check it in code, and raise by these keys."""

from __future__ import annotations

from typing import Final

INVARIANTS: Final = {
    "no old writer": "A write into a landing block happens only while the block belongs to the transfer that the bytes "
    "were read for: never while it is free, committed, or granted to another.",
    "only whole and right": "When a transfer is reported VERIFIED, each of its blocks holds what the prompt's block "
    "with that number holds on the sender: all arrived, nothing else, nothing of another prompt.",
    "freed in time": "From every state, if nobody hears anything any more and time passes, each side gets all its "
    "blocks back at the latest at the deadline, or the end of the lease where there is none, plus the grace time.",
    "sources kept": "A source block is read for a transfer only before the transfer's end was reported: its owner may "
    "reuse it afterwards.",
    "one end": "Each owner hears exactly one end of each transfer that it opened; QUARANTINED may precede DRAINED.",
    "sent means verified": "A sender reports SENT only after the receiver has reported VERIFIED.",
    "no crash": "No book and no block allocator raises, whatever comes in whatever order.",
}
