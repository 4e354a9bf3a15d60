"""Row 16: parts of a request outside of its body: trailers, chunk extensions and zeros of chunk sizes, 64 MiB each.

A caller with the token sends them on one connection after the other. The gateway must answer or close each, and keep
its memory. A token in a trailer must not authorize the request.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.http_port import Port, port_of, send_all
from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget

PIECES: Final = 1024  # of 64 KiB
MAX_GROWTH_BYTES: Final = 64 * 2**20
PIECE: Final = 65_536
BODY: Final = json.dumps({"prompt": "def fib(n):", "max_tokens": 1}).encode()
FLOODS: Final = {
    "trailers": (b"0\r\n", b"a: b\r\n"),
    "a trailer": (b"0\r\na: ", b"v"),
    "an extension": (b"1;a=", b"v"),
    "zeros": (b"", b"0"),
    "chunks of a byte": (b"", b"1\r\n \r\n"),
}


def attack(target: AttackTarget) -> AttackResult:
    port = port_of(target)
    gateway = psutil.Process(target.pid("gateway"))
    before_bytes = gateway.memory_info().rss
    errors: Counter[str] = Counter()
    complaints = []
    for name, (begin, unit) in FLOODS.items():
        piece = (unit * PIECE)[:PIECE] if len(unit) == 1 else unit * (PIECE // len(unit))
        status = _send(port, begin, piece)
        errors[status] += 1
        if status not in ("400", "431", "closed"):
            complaints.append(f"{name}: {status}")
    trailer = b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n\r\n" % (len(BODY), BODY, port.token.encode())
    status = send_all(port, _head(b"") + trailer)
    errors[status] += 1
    if status != "401":
        complaints.append(f"a token in a trailer: {status}")
    grown_bytes = gateway.memory_info().rss - before_bytes
    if grown_bytes > MAX_GROWTH_BYTES:
        complaints.append(f"the gateway grew by {grown_bytes >> 20} MiB")
    return AttackResult(
        attempts=errors.total(),
        rejected=errors.total() - len(complaints),
        errors=errors,
        note=f"the gateway grew by {grown_bytes / 2**20:.0f} MiB",
        complaints=tuple(complaints),
    )


def _head(token: bytes) -> bytes:
    given = b"authorization: Bearer %s\r\n" % token if token else b""
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % given


def _send(port: Port, begin: bytes, piece: bytes) -> str:
    return send_all(port, _head(port.token.encode()) + begin, piece, PIECES)


ROW = AttackRow(number=16, name="trailers and chunk extensions", attack=attack, needs="token", has_tls=True)
