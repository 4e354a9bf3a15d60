"""Rows with grammars and bad words together with plain ones, over real gRPC: asynchronous steps sample the same
tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from decode_worker.steps_in_flight import DeferredFlight
from pdserve.core.grammar import Grammar, GrammarKind
from pdserve.core.types import Role
from pdserve.text.tokenizer import load_tokenizer
from pdserve.v1 import worker_pb2

BUNDLED = Path(__file__).parents[3] / "pdserve" / "models" / "stdlib-5m"
SETTINGS: dict[str, Any] = {
    "model": str(BUNDLED),
    "deterministic": "on",  # answers from steps of different rows are compared
    "block_size": 16,
    "kv_blocks": 200,
    "max_context_tokens": 256,
    "max_batch_tokens": 64,
    "speculation": "off",
    "profile": "h100-sxm.llama-3.1-8b.bf16",
}
SEEDED = {"temperature": 0.9, "seed": 7}
LIST = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4}
DEAD_END = Grammar(GrammarKind.LARK, 'start: "ab" X\nX: /a/ & /b/')
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 40},
    "seeded": {"max_tokens": 30, **SEEDED},
    "list": {"max_tokens": 60, "grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LIST)), **SEEDED},
    "digits": {"max_tokens": 50, "grammar": Grammar(GrammarKind.REGEX, "[0-9 ]{25,28}")},
    "penalised": {
        "max_tokens": 40,
        "grammar": Grammar(GrammarKind.REGEX, "[a-f]{30}"),
        "frequency_penalty": 0.5,
        **SEEDED,
    },
    "bad words": {"max_tokens": 40, "bad_token_ids": ((13,), (12, 14))},
}


async def test_async_tokens_equal_synchronous_ones(start: Any, attach: Any, ask: Any, monkeypatch: Any) -> None:
    prompt = load_tokenizer(str(BUNDLED)).encode("def config():\n    return ")
    num_late = 0
    sample = DeferredFlight.sample

    def counted(flight: DeferredFlight, rows: Any) -> None:
        nonlocal num_late
        num_late += len(rows)
        sample(flight, rows)

    monkeypatch.setattr(DeferredFlight, "sample", counted)
    answers = {}
    for choice in ("off", "on"):
        d = start(Role.DECODE, **SETTINGS, async_scheduling=choice, worker_id=f"d-{choice}")
        router = await attach(d)
        stuck = ask("stuck", prompt, max_tokens=20, grammar=DEAD_END)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=stuck, is_local=True))
        asked = [router.local(ask(name, prompt, **sampling)) for name, sampling in ASKED.items()]
        answers[choice] = dict(zip(ASKED, await asyncio.gather(*asked), strict=True))
        failed = await router.next("failed", "stuck")
        assert "stuck after 1 tokens" in failed.message
        await router.released("stuck", Role.DECODE)
        await router.close()
        assert (num_late > 60) == (choice == "on")
        assert not d.fatal
    assert answers["on"] == answers["off"]
    text = load_tokenizer(str(BUNDLED)).decode(answers["on"]["list"][:-1])
    assert set(json.loads(text)) <= {"red", "green", "blue"}
