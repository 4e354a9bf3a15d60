"""Row 8: 600 connections to the router's port without a call; half of them do not even begin HTTP/2.

Before the fix, all of 500 such connections were still open after 26 s.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from typing import Final

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget, is_closed
from pdserve.config import RouterConfig
from pdserve.telemetry import metric_names
from pdserve.wire.peer_server import HANDSHAKE_S

NUM_EACH: Final = 300
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
LATE_S: Final = 10.0
LIMIT: Final = RouterConfig(model="toy").max_connections


def attack(target: AttackTarget) -> AttackResult:
    """Lasts as long as the router lets a connection be half-open or idle, and LATE_S more at most."""
    host, port = target.router.rsplit(":", 1)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(2 * NUM_EACH)]
        for one in made[NUM_EACH:]:
            with contextlib.suppress(ConnectionError):
                one.sendall(PREFACE)
        for one in made:
            one.setblocking(False)
        time.sleep(2.0)
        num_accepted = sum(not is_closed(one) for one in made)
        shown = target.metric("router", metric_names.CONNECTIONS.name)
        while any(not is_closed(one) for one in made) and time.monotonic() < began_s + HANDSHAKE_S + LATE_S:
            time.sleep(0.1)
        half_open, idle = (sum(not is_closed(one) for one in part) for part in (made[:NUM_EACH], made[NUM_EACH:]))
    took_s = time.monotonic() - began_s
    complaints = []
    if num_accepted > LIMIT:
        complaints.append(f"{num_accepted} connections were open at a time, over {LIMIT}")
    if half_open or idle:
        complaints.append(f"{half_open} half-open and {idle} idle connections were still open after {took_s:.0f} s")
    closed = 2 * NUM_EACH - half_open - idle
    return AttackResult(
        attempts=2 * NUM_EACH,
        rejected=closed,
        errors=Counter(
            {"closed at once": 2 * NUM_EACH - num_accepted, "closed later": closed - 2 * NUM_EACH + num_accepted}
        ),
        note=f"{num_accepted} were open at a time (the router counted {shown:.0f}); all had ended after {took_s:.1f} s",
        complaints=tuple(complaints),
    )


ROW = AttackRow(number=8, name="idle and half-open connections", attack=attack)
