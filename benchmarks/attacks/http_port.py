"""Row 12: the HTTP port. 10,000 idle connections, slow or endless headers, and bodies of 100 MB.

Meanwhile a legitimate caller sends completions, on a new connection each time. Each answer must equal the answer
without an attack. With TLS, headers and bodies are sent over TLS, idle connections begin no handshake, and 200 more
connections send a handshake slowly.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.row import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget, is_closed
from pdserve.config import GatewayConfig

LIMITS: Final = GatewayConfig(router="127.0.0.1:1")
NUM_IDLE: Final = 10_000
NUM_SLOW: Final = 200
NUM_HEADS: Final = 50
NUM_BODIES: Final = 20
BODY_BYTES: Final = 100 * 2**20
MAX_GROWTH_BYTES: Final = 200 * 2**20
LATE_S: Final = 10.0
_REQUEST: Final = json.dumps({"prompt": "def fib(n):", "max_tokens": 12, "temperature": 0}).encode()


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


def attack(target: AttackTarget) -> AttackResult:
    port = port_of(target)
    gateway = psutil.Process(target.pid("gateway"))
    expected = _ask(port)
    before_bytes = gateway.memory_info().rss
    honest = _Honest(lambda: _ask(port), expected)
    errors: Counter[str] = Counter()
    attempts = 0
    with honest:
        for name, part in (
            ("heads", _large_heads),
            ("bodies", _large_bodies),
            ("slow", _slow_heads),
            ("handshakes", _slow_handshakes),
            ("idle", _idle_connections),
        ):
            count, closed = part(port)
            attempts += count
            errors[name] += closed
    grown_bytes = gateway.memory_info().rss - before_bytes
    complaints = [*honest.complaints]
    rejected = sum(errors.values())
    if rejected != attempts:
        complaints.append(f"{attempts - rejected} connections were not closed")
    if grown_bytes > MAX_GROWTH_BYTES:
        complaints.append(f"the gateway grew by {grown_bytes >> 20} MiB")
    took_ms = statistics.median(honest.took_s) * 1e3 if honest.took_s else 0.0
    longest_s = max(honest.took_s, default=0.0)
    if longest_s > MAX_WAIT_S:
        complaints.append(f"an honest HTTP request took {longest_s:.2f} s, over {MAX_WAIT_S:g} s")
    return AttackResult(
        attempts=attempts,
        rejected=rejected,
        errors=errors,
        note=f"{len(honest.took_s)} honest HTTP requests were exact, p50 {took_ms:.0f} ms, longest "
        f"{longest_s * 1e3:.0f} ms; the gateway grew by {grown_bytes / 2**20:.0f} MiB",
        complaints=tuple(complaints),
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


def _slow_heads(port: Port) -> tuple[int, int]:
    return _drip(port.connect, b"G")


def _slow_handshakes(port: Port) -> tuple[int, int]:
    return (0, 0) if port.tls is None else _drip(port.connect_plain, b"\x16\x03\x01\x02\x00" + bytes(512))


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


class _Honest:
    """Sends one request after another while its block runs."""

    def __init__(self, ask: Callable[[], str], expected: str) -> None:
        self._ask, self._expected = ask, expected
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest-http", daemon=True)
        self.took_s: list[float] = []
        self.complaints: list[str] = []

    def __enter__(self) -> _Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        if not self.took_s:
            self.complaints.append("no honest HTTP request was answered")

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            began_s = time.monotonic()
            try:
                text = self._ask()
            except Exception as error:  # the row reports it, whatever it is
                self.complaints.append(f"an honest HTTP request failed: {type(error).__name__}: {error}")
                continue
            self.took_s.append(time.monotonic() - began_s)
            if text != self._expected:
                self.complaints.append("an honest HTTP answer was wrong")


ROW = AttackRow(number=12, name="the HTTP port", attack=attack, needs="token", has_tls=True)
