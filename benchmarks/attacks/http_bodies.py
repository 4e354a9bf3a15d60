"""Rows of HTTP bodies: those that fail validation, long arrays that are accepted, and small ones with long answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from benchmarks.attacks.harness import MAX_WAIT_S, AttackResult, AttackRow, AttackTarget, Beside

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

    def check_health() -> None:
        ask("GET", "/health")

    callers = [threading.Thread(target=call) for _ in range(NUM_CALLERS)]
    with Beside(check_health, pause_s=0.0) as health:
        for one in callers:
            one.start()
        for one in callers:
            one.join()
    peak_bytes = gateway.memory_info().rss
    time.sleep(SETTLE_S)
    kept_bytes = gateway.memory_info().rss - before_bytes
    complaints += health.complaints("calls of /health", MAX_WAIT_S)
    if kept_bytes > MAX_KEPT_BYTES:
        complaints.append(f"the gateway kept {kept_bytes >> 20} MiB")
    if calls:
        complaints.append(f"{len(calls)} bodies were not sent in {target.seconds:.0f} s")
    return AttackResult(
        attempts=2 * len(bodies) - len(calls),
        rejected=sum(count for status, count in errors.items() if status.startswith("4")),
        errors=errors,
        note=f"/health took {health.longest_s * 1e3:.0f} ms at most, of {len(health.took_s)} calls; the gateway had "
        f"{(peak_bytes - before_bytes) >> 20} MiB more at the end, and {kept_bytes >> 20} MiB {SETTLE_S:.0f} s later",
        complaints=complaints,
    )


def repeated(begin: bytes, item: bytes, end: bytes) -> bytes:
    """An array of items, of almost 4 MiB."""
    return begin + item * ((SIZE - len(begin)) // len(item)) + end


# ---- Row 13. Before the fix, each wrong item of an array was an error object: one body stopped the gateway for 30 s
# and took 4 GiB.
def _wrong_bodies() -> list[Body]:
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


# ---- Row 14. Before the fix, 140,000 messages to /tokenize stopped the gateway for 2.6 s, and a choice of 400,000
# texts for 1.2 s.
_MESSAGE = b'{"role":"user","content":"x"},'
_CALL = b'{"id":"a","function":{"name":"f","arguments":"{}"}},'


def _long_shapes() -> list[Body]:
    message = _MESSAGE.rstrip(b",")
    calls = b'{"role":"assistant","tool_calls":[' + (_CALL * 100).rstrip(b",") + b"]},"
    return [
        ("/tokenize", repeated(b'{"messages":[', _MESSAGE, message + b"]}")),
        ("/tokenize", b'{"messages":[' + _MESSAGE * 4095 + message + b"]}"),
        ("/tokenize", b'{"messages":[' + calls * 180 + message + b"]}"),
        ("/tokenize", repeated(b'{"prompt":"', b"x, ", b'"}')),
        ("/tokenize", repeated(b'{"return_token_strs":true,"prompt":"', b"x, ", b'"}')),
        ("/detokenize", repeated(b'{"tokens":[', b"1,", b"1]}")),
        ("/v1/chat/completions", b'{"max_tokens":1,"messages":[' + _MESSAGE * 4095 + message + b"]}"),
        ("/v1/completions", repeated(b'{"prompt":"x","structured_outputs":{"choice":[', b'"ab",', b'"c"]}}')),
        ("/v1/completions", repeated(b'{"prompt":[', b"1,", b"1]}")),
        ("/v1/completions", repeated(b'{"truncate_prompt_tokens":9,"max_tokens":1,"prompt":[', b"1111,", b"1]}")),
        ("/v1/completions", b'{"max_tokens":1,"prompt":[' + (b"[" + b"1," * 15_000 + b"1],") * 127 + b"[1]]}"),
        ("/v1/completions", repeated(b'{"max_tokens":1,"prompt":"', b'x\\", [{:', b'"}')),
        ("/v1/responses", b'{"input":[' + _MESSAGE * 4095 + message + b"]}"),
    ]


# ---- Row 15. Before the fix, 210 KB of request became an answer of 83 MiB, for which the gateway took 781 MiB and
# stopped for 2.6 s.
def _long_answers() -> list[Body]:
    prompt = [[20 + index % 200 for index in range(1000)]] * 16
    one = {"temperature": 1.0, "seed": 1, "max_tokens": 1}
    requests = [
        ("/v1/completions", {**one, "prompt": prompt, "prompt_logprobs": 20, "n": 2}),
        ("/v1/completions", {**one, "prompt": prompt, "echo": True, "logprobs": 20, "n": 2}),
        ("/v1/completions", {**one, "prompt": prompt, "echo": True, "logprobs": 20, "stream": True}),
        ("/v1/completions", {**one, "prompt": "x", "logprobs": 64, "n": 16, "max_tokens": 256}),
        ("/v1/completions", {**one, "prompt": prompt * 8, "prompt_logprobs": 20, "n": 16}),
        ("/tokenize", {"prompt": "x, 1 y\n" * 14_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [20 + index % 200 for index in range(2000)]}),
    ]
    return [(path, json.dumps(body).encode()) for path, body in requests]


def wrong_bodies(target: AttackTarget) -> AttackResult:
    return attack_with(target, _wrong_bodies(), {True: (400, 429), False: (401,)})


def long_shapes(target: AttackTarget) -> AttackResult:
    return attack_with(target, _long_shapes(), {True: (200, 400, 429), False: (401,)})


def long_answers(target: AttackTarget) -> AttackResult:
    return attack_with(target, _long_answers(), {True: (200, 400, 429), False: (401,)})


ROWS: Final = (
    AttackRow(number=13, name="bodies of 4 MiB that fail validation", attack=wrong_bodies, needs="token"),
    AttackRow(number=14, name="long arrays that are accepted", attack=long_shapes, needs="token"),
    AttackRow(number=15, name="small requests with long answers", attack=long_answers, needs="token"),
)
