"""Row 18: requests that break a rule of RFC 9110 or 9112, also those that two servers could read differently."""

from __future__ import annotations

from collections import Counter
from typing import Final

from benchmarks.attacks.http_port import port_of, send_all
from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget

_CHUNKS: Final = b"2\r\n{}\r\n0\r\n\r\n"
#: Rest of a head after its request line, body, and the status that must answer it.
SHAPES: Final = {
    "no host": (b"\r\n", "400"),
    "two hosts": (b"host: x\r\nhost: x\r\n\r\n", "400"),
    "a folded line": (b"host: x\r\na: b\r\n c\r\n\r\n", "400"),
    "a space before the colon": (b"host : x\r\n\r\n", "400"),
    "a bare CR": (b"host: x\r\na: b\rc\r\n\r\n", "400"),
    "a bare LF": (b"host: x\na: b\r\n\r\n", "400"),
    "a size and chunks": (b"host: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n" + _CHUNKS, "400"),
    "two sizes": (b"host: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}x", "400"),
    "gzip": (b"host: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n" + _CHUNKS, "501"),
    "chunked is not last": (b"host: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n" + _CHUNKS, "400"),
    "an unknown expectation": (b"host: x\r\nexpect: more\r\n\r\n", "417"),
}


def attack(target: AttackTarget) -> AttackResult:
    port = port_of(target)
    errors: Counter[str] = Counter()
    complaints = []
    for method in (b"GET /health", b"POST /v1/completions"):
        for name, (rest, expected) in SHAPES.items():
            status = send_all(port, method + b" HTTP/1.1\r\n" + rest)
            errors[status] += 1
            if status != expected:
                complaints.append(f"{name}: {status} instead of {expected}")
    attempts = errors.total()
    return AttackResult(
        attempts=attempts, rejected=attempts - len(complaints), errors=errors, complaints=tuple(complaints)
    )


ROW = AttackRow(number=18, name="malformed HTTP requests", attack=attack)
