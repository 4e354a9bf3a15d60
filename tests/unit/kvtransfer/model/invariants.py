"""The invariants of every reachable state. The sides and the world check them, and raise errors with these keys."""

from __future__ import annotations

from typing import Final

INVARIANTS: Final = {
    "no old writer": "A target block is written only while it belongs to the transfer for which the bytes were read: "
    "never while it is free, committed, or granted to another transfer.",
    "only whole and right": "When a transfer is reported VERIFIED, each of its blocks holds what the prompt's block "
    "with that number holds on the sender: all of it, nothing else, and nothing of another prompt.",
    "freed in time": "From every state, if no more messages arrive and time passes, each side gets all its blocks back "
    "at the latest at the deadline, or at the end of the lease if there is no deadline, plus the grace time.",
    "sources kept": "A source block is read for a transfer only before the end of the transfer is reported. Its owner "
    "may reuse it afterwards.",
    "one end": "Each owner receives exactly one end of each transfer that it opened. QUARANTINED may precede DRAINED.",
    "sent means verified": "A sender reports SENT only after the receiver has reported VERIFIED.",
    "no crash": "No module and no block allocator raises, whatever messages arrive in whatever order.",
}
