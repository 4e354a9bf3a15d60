"""Row 14: bodies of up to 4 MiB whose shapes are accepted, or too long by their number of items alone.

Before the fix, 140,000 messages to /tokenize stopped the gateway for 2.6 s, and a choice of 400,000 texts for 1.2 s.
"""

from __future__ import annotations

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.wrong_bodies import Body, attack_with, repeated

_MESSAGE = b'{"role":"user","content":"x"},'
_CALL = b'{"id":"a","function":{"name":"f","arguments":"{}"}},'


def _bodies() -> list[Body]:
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


def attack(target: AttackTarget) -> AttackResult:
    return attack_with(target, _bodies(), {True: (200, 400, 429), False: (401,)})


ROW = AttackRow(number=14, name="long arrays that are accepted", attack=attack, needs="token")
