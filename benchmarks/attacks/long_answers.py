"""Row 15: small requests with long answers: logprobs of prompts and of answers, echoes, tokens of texts.

Before the fix, 210 KB of request became an answer of 83 MiB, for which the gateway took 781 MiB and stopped for 2.6 s.
"""

from __future__ import annotations

import json

from benchmarks.attacks.row import AttackResult, AttackRow, AttackTarget
from benchmarks.attacks.wrong_bodies import Body, attack_with


def _bodies() -> list[Body]:
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


def attack(target: AttackTarget) -> AttackResult:
    return attack_with(target, _bodies(), {True: (200, 400, 429), False: (401,)})


ROW = AttackRow(number=15, name="small requests with long answers", attack=attack, needs="token")
