"""Row 17: a caller opens 515 requests whose bodies of two bytes never end, and 48 with declared bodies of 4 MiB.

Meanwhile `/health`, `/metrics` with the same token and a caller without it are asked on new connections: none may get
429 or 503. The cluster of this benchmark has one token, so the other caller has a wrong one, and must be told so (401).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Final

from benchmarks.attacks.http_port import port_of, send_all
from benchmarks.attacks.row import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget, is_closed

SIZES: Final = (2,) * 515 + (4 * 2**20,) * 48
ENDS_S: Final = 20.0
HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
WRONG: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\nconnection: close\r\n\r\n"


def attack(target: AttackTarget) -> AttackResult:
    port = port_of(target)
    metrics = f"GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {port.token}\r\nconnection: close\r\n\r\n"
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    longest_s = 0.0
    with contextlib.ExitStack() as stack:
        left = set()
        for size in SIZES:
            one = stack.enter_context(port.connect(30))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {port.token}\r\n"
            head += "content-type: application/json\r\n"
            with contextlib.suppress(OSError):
                one.sendall(f"{head}content-length: {size}\r\n\r\n{{".encode())
            one.setblocking(False)
            left.add(one)
        ends_s = time.monotonic() + ENDS_S
        while left and time.monotonic() < ends_s:
            for request, expected in ((HEALTH, "200"), (metrics.encode(), "200"), (WRONG, "401")):
                began_s = time.perf_counter()
                status = send_all(port, request)
                longest_s = max(longest_s, time.perf_counter() - began_s)
                errors[status] += 1
                if status != expected:
                    complaints.append(f"another caller got {status} instead of {expected}")
            left = {one for one in left if not is_closed(one)}
            time.sleep(0.1)
    if left:
        complaints.append(f"{len(left)} slow bodies were not ended")
    if longest_s > MAX_WAIT_S:
        complaints.append(f"another caller waited {longest_s:.2f} s")
    return AttackResult(
        attempts=len(SIZES),
        rejected=len(SIZES) - len(left),
        errors=errors,
        note=f"others waited {longest_s * 1e3:.0f} ms at most",
        complaints=tuple(dict.fromkeys(complaints)),
    )


ROW = AttackRow(number=17, name="slow bodies of one caller", attack=attack, needs="token", has_tls=True)
