"""Row 13: bodies of 4 MiB that fail validation, with and without a key.

Before the fix, each wrong item of an array was an error object: one body stopped the gateway for 30 s and took 4 GiB.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.row import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget

NUM_CALLERS: Final = 4
MAX_KEPT_BYTES: Final = 256 * 2**20  # more than before the attack, some seconds after it
SETTLE_S: Final = 5.0
ANSWER_S: Final = 60.0
SIZE: Final = 4 * 2**20 - 4096

Body = tuple[str, bytes]  # path and body


def attack_with(target: AttackTarget, bodies: Sequence[Body], allowed: Mapping[bool, Sequence[int]]) -> AttackResult:
    """Sends the bodies, each with and without the key, from several connections. `allowed`: the statuses with the key
    and without. Meanwhile /health is asked all the time."""
    parts = urlsplit(target.cluster.http_url)
    gateway = psutil.Process(target.pid("gateway"))
    before_bytes = gateway.memory_info().rss
    lock = threading.Lock()
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    is_over = threading.Event()
    health_s: list[float] = []
    calls = [(body, has_key) for body in bodies for has_key in (True, False)]
    ends_s = time.monotonic() + target.seconds

    def ask(method: str, path: str, body: bytes = b"", *, has_key: bool = False) -> int:
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=ANSWER_S)
        try:
            key = {"authorization": f"Bearer {target.token}"} if has_key else {}
            with contextlib.suppress(OSError):  # it may answer before it has read everything
                connection.request(method, path, body, {"content-type": "application/json", **key})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def call() -> None:
        while time.monotonic() < ends_s:
            with lock:
                if not calls:
                    return
                (path, body), has_key = calls.pop()
            try:
                status = ask("POST", path, body, has_key=has_key)
            except (OSError, http.client.HTTPException) as error:
                status = 0
                with lock:
                    complaints.append(f"{path} had no answer: {type(error).__name__}: {error}")
            with lock:
                errors[str(status)] += 1
                if status and status not in allowed[has_key]:
                    complaints.append(f"{path}, {body[:40]!r}..., key {has_key}: status {status}")

    def watch() -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            try:
                ask("GET", "/health")
            except (OSError, http.client.HTTPException) as error:
                complaints.append(f"/health failed: {error}")
            health_s.append(time.monotonic() - began_s)

    watcher = threading.Thread(target=watch, name="health")
    watcher.start()
    callers = [threading.Thread(target=call) for _ in range(NUM_CALLERS)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    is_over.set()
    watcher.join()
    peak_bytes = gateway.memory_info().rss
    time.sleep(SETTLE_S)
    kept_bytes = gateway.memory_info().rss - before_bytes
    longest_s = max(health_s, default=ANSWER_S)
    if longest_s > MAX_WAIT_S:
        complaints.append(f"/health took {longest_s:.2f} s, over {MAX_WAIT_S} s")
    if kept_bytes > MAX_KEPT_BYTES:
        complaints.append(f"the gateway kept {kept_bytes >> 20} MiB")
    if calls:
        complaints.append(f"{len(calls)} bodies were not sent in {target.seconds:.0f} s")
    return AttackResult(
        attempts=2 * len(bodies) - len(calls),
        rejected=sum(count for status, count in errors.items() if status.startswith("4")),
        errors=errors,
        note=f"/health took {longest_s * 1e3:.0f} ms at most, of {len(health_s)} calls; the gateway had "
        f"{(peak_bytes - before_bytes) >> 20} MiB more at the end, and {kept_bytes >> 20} MiB {SETTLE_S:.0f} s later",
        complaints=tuple(complaints),
    )


def repeated(begin: bytes, item: bytes, end: bytes) -> bytes:
    """An array of items, of almost 4 MiB."""
    return begin + item * ((SIZE - len(begin)) // len(item)) + end


def _bodies() -> list[Body]:
    chat = b'{"messages":[{"role":"user","content":"x"}],'
    text = b'{"prompt":"x",'
    found: list[Body] = [
        ("/v1/completions", repeated(b'{"prompt":["a",', b"1,", b"1]}")),
        ("/v1/completions", repeated(b'{"prompt":[', b"1,", b'"a"]}')),
        ("/v1/completions", repeated(b'{"prompt":[[', b"1,", b'"a"]]}')),
        ("/v1/completions", repeated(b'{"prompt":[', b"[],", b"{}]}")),
        ("/v1/completions", repeated(text + b'"stop":[', b"1,", b"1]}")),
        ("/v1/completions", repeated(text + b'"structured_outputs":{"choice":[', b"1,", b"1]}}")),
        ("/v1/completions", text + b'"logit_bias":{' + b",".join(b'"%d":"x"' % n for n in range(65_000)) + b"}}"),
        ("/v1/chat/completions", repeated(b'{"messages":[', b"1,", b"1]}")),
        ("/v1/chat/completions", repeated(b'{"messages":[{"role":"user","content":[', b"1,", b"1]}]}")),
        ("/v1/chat/completions", repeated(b'{"messages":[{"role":"assistant","tool_calls":[', b"1,", b"1]}]}")),
        ("/v1/chat/completions", repeated(chat + b'"tools":[', b"1,", b"1]}")),
        ("/v1/responses", repeated(b'{"input":[', b"1,", b"1]}")),
        ("/v1/responses", repeated(b'{"input":"x","include":[', b'"a",', b'"a"]}')),
        ("/tokenize", repeated(b'{"messages":[', b"{},", b"{}]}")),
        ("/tokenize", b"{" + b",".join(b'"%x":1' % n for n in range(65_000)) + b"}"),
        ("/detokenize", repeated(b'{"tokens":[', b'"a",', b"1]}")),
    ]
    return found


def attack(target: AttackTarget) -> AttackResult:
    return attack_with(target, _bodies(), {True: (400, 429), False: (401,)})


ROW = AttackRow(number=13, name="bodies of 4 MiB that fail validation", attack=attack, needs="token")
