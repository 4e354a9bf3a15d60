"""Rows of the HTTP port: connections, heads, trailers, slow bodies and malformed requests."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.harness import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget, Beside, is_closed
from pdserve.config import GatewayConfig


@final
@dataclass(frozen=True, slots=True)
class Port:
    host: str
    number: int
    token: str
    tls: ssl.SSLContext | None

    def connect(self, timeout_s: float) -> socket.socket:
        """With its handshake, if the port has TLS."""
        plain = self.connect_plain(timeout_s)
        return plain if self.tls is None else self.tls.wrap_socket(plain, server_hostname=self.host)

    def connect_plain(self, timeout_s: float) -> socket.socket:
        return socket.create_connection((self.host, self.number), timeout_s)


def port_of(target: AttackTarget) -> Port:
    parts = urlsplit(target.cluster.http_url)
    tls = ssl.create_default_context(cafile=target.ca) if target.ca else None
    return Port(str(parts.hostname), int(parts.port or 0), target.token, tls)


def send_all(port: Port, head: bytes, piece: bytes = b"", count: int = 0) -> str:
    """Sends `piece` until the server closes the connection. The status of the answer, "closed" without one, or
    "open"."""
    with port.connect(30) as one:
        with contextlib.suppress(OSError):  # closed while sending
            one.sendall(head)
            for _ in range(count):
                one.sendall(piece)
        found = b""
        try:
            while data := one.recv(65_536):
                found += data
        except TimeoutError:
            return "open"
        except OSError:
            pass
        return found.split(b" ", 2)[1].decode() if found.startswith(b"HTTP/1.1 ") else "closed"


# ---- Row 12
LIMITS: Final = GatewayConfig(router="127.0.0.1:1")
NUM_IDLE: Final = 10_000
NUM_SLOW: Final = 200
NUM_HEADS: Final = 50
NUM_BODIES: Final = 20
BODY_BYTES: Final = 100 * 2**20
MAX_GROWTH_BYTES: Final = 200 * 2**20
LATE_S: Final = 10.0
_REQUEST: Final = json.dumps({"prompt": "def fib(n):", "max_tokens": 12, "temperature": 0}).encode()


def http_port(target: AttackTarget) -> AttackResult:
    """10,000 idle connections, slow or endless headers, and bodies of 100 MB. Meanwhile a legitimate caller sends
    completions, on a new connection each time. Each answer must equal the answer without an attack. With TLS, headers
    and bodies are sent over TLS, idle connections begin no handshake, and 200 more connections send a handshake
    slowly."""
    port = port_of(target)
    gateway = psutil.Process(target.pid("gateway"))
    expected = _ask(port)
    before_bytes = gateway.memory_info().rss
    errors: Counter[str] = Counter()
    attempts = 0
    parts: dict[str, Callable[[], tuple[int, int]]] = {
        "heads": lambda: _large_heads(port),
        "bodies": lambda: _large_bodies(port),
        "slow": lambda: _drip(port.connect, b"G"),
    }
    if port.tls is not None:
        parts["handshakes"] = lambda: _drip(port.connect_plain, b"\x16\x03\x01\x02\x00" + bytes(512))
    parts["idle"] = lambda: _idle_connections(port)

    def ask() -> None:
        if _ask(port) != expected:
            raise ValueError("a wrong answer")

    with Beside(ask) as honest:
        for name, part in parts.items():
            count, closed = part()
            attempts += count
            errors[name] += closed
    grown_bytes = gateway.memory_info().rss - before_bytes
    complaints = honest.complaints("honest HTTP requests", MAX_WAIT_S)
    rejected = errors.total()
    if rejected != attempts:
        complaints.append(f"{attempts - rejected} connections were not closed")
    if grown_bytes > MAX_GROWTH_BYTES:
        complaints.append(f"the gateway grew by {grown_bytes >> 20} MiB")
    return AttackResult(
        attempts=attempts,
        rejected=rejected,
        errors=errors,
        note=f"{len(honest.took_s)} honest HTTP requests were exact, p50 {honest.median_ms:.0f} ms, longest "
        f"{honest.longest_s * 1e3:.0f} ms; the gateway grew by {grown_bytes / 2**20:.0f} MiB",
        complaints=complaints,
    )


def _large_heads(port: Port) -> tuple[int, int]:
    bombs = (b"x-bomb: " + b"v" * 2**20, b"\r\n".join(b"x-%d: v" % n for n in range(100_000)))
    closed = 0
    for number in range(NUM_HEADS):
        closed += _send(port, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + bombs[number % 2] + b"\r\n\r\n")
    return NUM_HEADS, closed


def _large_bodies(port: Port) -> tuple[int, int]:
    """Declared and undeclared sizes, by a caller with the token."""
    closed = 0
    piece = b" " * 2**20
    for number in range(NUM_BODIES):
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {port.token}\r\n"
        head += "content-type: application/json\r\n"
        if number % 2:
            closed += _send(port, f"{head}content-length: {BODY_BYTES}\r\n\r\n".encode(), piece, BODY_BYTES >> 20)
        else:
            chunk = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
            closed += _send(port, f"{head}transfer-encoding: chunked\r\n\r\n".encode(), chunk, BODY_BYTES >> 20)
    return NUM_BODIES, closed


def _drip(connect: Callable[[float], socket.socket], data: bytes) -> tuple[int, int]:
    """One byte now and then, until the server has closed all connections."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(10)) for _ in range(NUM_SLOW)]
        for one in opened:
            one.setblocking(False)
        sent = 0
        ends_s = time.monotonic() + LIMITS.header_s + LATE_S
        left = set(opened)
        while left and time.monotonic() < ends_s:
            for one in list(left):
                with contextlib.suppress(OSError):
                    one.send(data[sent % len(data) :][:1])
                if is_closed(one):
                    left.discard(one)
            sent += 1
            time.sleep(0.2)
        return NUM_SLOW, NUM_SLOW - len(left)


def _idle_connections(port: Port) -> tuple[int, int]:
    """Connections beyond the limit are closed in favour of newer ones, the others when the time for headers is over."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(NUM_IDLE):
            opened.append(stack.enter_context(port.connect_plain(30)))
        for one in opened:
            one.setblocking(False)
        ends_s = time.monotonic() + LIMITS.header_s + LATE_S
        left = set(opened)
        while left and time.monotonic() < ends_s:
            left = {one for one in left if not is_closed(one)}
            time.sleep(0.2)
        return NUM_IDLE, NUM_IDLE - len(left)


def _send(port: Port, head: bytes, piece: bytes = b"", count: int = 0) -> int:
    """1 if the server closes the connection without an answer of success, else 0."""
    status = send_all(port, head, piece, count)
    return int(status != "open" and not status.startswith("2"))


def _ask(port: Port) -> str:
    connection = (
        http.client.HTTPConnection(port.host, port.number, timeout=60)
        if port.tls is None
        else http.client.HTTPSConnection(port.host, port.number, timeout=60, context=port.tls)
    )
    try:
        headers = {"authorization": f"Bearer {port.token}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", _REQUEST, headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}: {body['error']['message']}")
        return str(body["choices"][0]["text"])
    finally:
        connection.close()


# ---- Row 16
PIECES: Final = 1024  # of 64 KiB
MAX_FLOOD_BYTES: Final = 64 * 2**20  # by which the gateway may grow
PIECE: Final = 65_536
BODY: Final = json.dumps({"prompt": "def fib(n):", "max_tokens": 1}).encode()
FLOODS: Final = {
    "trailers": (b"0\r\n", b"a: b\r\n"),
    "a trailer": (b"0\r\na: ", b"v"),
    "an extension": (b"1;a=", b"v"),
    "zeros": (b"", b"0"),
    "chunks of a byte": (b"", b"1\r\n \r\n"),
}


def framing(target: AttackTarget) -> AttackResult:
    """Parts of a request outside of its body: trailers, chunk extensions and zeros of chunk sizes, 64 MiB each. A
    caller with the token sends them on one connection after the other. The gateway must answer or close each, and keep
    its memory. A token in a trailer must not authorize the request."""
    port = port_of(target)
    gateway = psutil.Process(target.pid("gateway"))
    before_bytes = gateway.memory_info().rss
    errors: Counter[str] = Counter()
    complaints = []
    for name, (begin, unit) in FLOODS.items():
        piece = unit * (PIECE // len(unit))
        errors[status := send_all(port, _chunked(port.token.encode()) + begin, piece, PIECES)] += 1
        if status not in ("400", "431", "closed"):
            complaints.append(f"{name}: {status}")
    trailer = b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n\r\n" % (len(BODY), BODY, port.token.encode())
    errors[status := send_all(port, _chunked(b"") + trailer)] += 1
    if status != "401":
        complaints.append(f"a token in a trailer: {status}")
    grown_bytes = gateway.memory_info().rss - before_bytes
    rejected = errors.total() - len(complaints)
    if grown_bytes > MAX_FLOOD_BYTES:
        complaints.append(f"the gateway grew by {grown_bytes >> 20} MiB")
    note = f"the gateway grew by {grown_bytes / 2**20:.0f} MiB"
    return AttackResult(attempts=errors.total(), rejected=rejected, errors=errors, note=note, complaints=complaints)


def _chunked(token: bytes) -> bytes:
    given = b"authorization: Bearer %s\r\n" % token if token else b""
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%stransfer-encoding: chunked\r\n\r\n" % given


# ---- Row 17
SIZES: Final = (2,) * 515 + (4 * 2**20,) * 48
ENDS_S: Final = 20.0
HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
WRONG: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\nconnection: close\r\n\r\n"


def slow_bodies(target: AttackTarget) -> AttackResult:
    """A caller opens 515 requests whose bodies of two bytes never end, and 48 with declared bodies of 4 MiB. Meanwhile
    `/health`, `/metrics` with the same token and a caller without it are asked on new connections: none may get 429 or
    503. The cluster of this benchmark has one token, so the other caller has a wrong one, and must be told so (401)."""
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
        complaints=list(dict.fromkeys(complaints)),
    )


# ---- Row 18: rules of RFC 9110 and 9112, also those that two servers could read differently
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


def shapes(target: AttackTarget) -> AttackResult:
    port = port_of(target)
    errors: Counter[str] = Counter()
    complaints = []
    methods = (b"GET /health", b"POST /v1/completions")
    for method, (name, (rest, expected)) in itertools.product(methods, SHAPES.items()):
        errors[status := send_all(port, method + b" HTTP/1.1\r\n" + rest)] += 1
        if status != expected:
            complaints.append(f"{name}: {status} instead of {expected}")
    rejected = errors.total() - len(complaints)
    return AttackResult(attempts=errors.total(), rejected=rejected, errors=errors, complaints=complaints)


ROWS: Final = (
    AttackRow(number=12, name="the HTTP port", attack=http_port, needs="token", has_tls=True),
    AttackRow(number=16, name="trailers and chunk extensions", attack=framing, needs="token", has_tls=True),
    AttackRow(number=17, name="slow bodies of one caller", attack=slow_bodies, needs="token", has_tls=True),
    AttackRow(number=18, name="malformed HTTP requests", attack=shapes),
)
