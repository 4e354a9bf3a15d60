"""Answers with chosen times, and servers that a test scripts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from pdserve.core.types import Slo
from simulator.bench.load import LoadLevel
from simulator.bench.server import BenchAnswer, BenchOutcome, ServerReply
from simulator.bench.statistics import BenchResult, BenchTurn, LevelResult

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def answer(number: int = 0, *, sent_s: float = 0.0, chunks_s: Sequence[float] = (), **values: Any) -> BenchAnswer:
    """`chunks_s`: seconds after sending. Each chunk has one token unless `output_tokens` is given."""
    given: dict[str, Any] = {
        "due_s": sent_s,
        "ended_s": sent_s + (chunks_s[-1] if chunks_s else 0.0),
        "outcome": BenchOutcome.COMPLETED if chunks_s else BenchOutcome.FAILED,
        "prompt_tokens": 10,
        "output_tokens": len(chunks_s),
        "error": "" if chunks_s else "HTTP 500",
    }
    chunk_s = tuple(sent_s + one for one in chunks_s)
    return BenchAnswer(number=number, sent_s=sent_s, chunk_s=chunk_s, **{**given, **values})


def turn(*answers: BenchAnswer, lasted_s: float = 10.0, **values: Any) -> BenchTurn:
    return BenchTurn(answers=answers, lasted_s=lasted_s, **values)


def result(
    *, slo: Slo | None = SLO, servers: Sequence[str] = ("one", "two"), rates: Sequence[float] = (1.0, 2.0)
) -> BenchResult:
    """Two turns of three answers for each server and rate; the second server is twice as slow."""
    found = BenchResult(servers=[(name, f"http://{name}", "<model>") for name in servers], slo=slo)
    for rate in rates:
        for slowness, name in enumerate(servers, start=1):
            turns = [
                turn(
                    answer(0, chunks_s=[0.1 * slowness, 0.2 * slowness, 0.3 * slowness]),
                    answer(1, sent_s=0.5, chunks_s=[0.2 * slowness, 0.4 * slowness]),
                    answer(2, sent_s=0.6, detail="<b>out of order</b>"),
                    lasted_s=5.0 * slowness,
                )
                for _ in range(2)
            ]
            level = LoadLevel(rate_rps=rate)
            found.levels.append(LevelResult(level=level, server=name, turns=turns, slo=slo))
    return found


class ScriptedServer:
    """`script` answers each request; it receives the request's number of calls before it."""

    def __init__(self, script: Callable[[int, ServerReply], Awaitable[None]], name: str = "scripted") -> None:
        self.name, self.address = name, "nowhere"
        self.script = script
        self.prompts: list[tuple[tuple[int, ...], int]] = []
        self.is_closed = False
        self._count = 0

    async def connect(self) -> str:
        return "model"

    def prepare(self, token_ids: Sequence[int], max_tokens: int, session_id: str = "") -> Any:
        self.prompts.append((tuple(token_ids), max_tokens))
        return None

    async def send(self, prepared: Any, reply: ServerReply) -> None:
        number, self._count = self._count, self._count + 1
        await self.script(number, reply)

    async def end_session(self, session_id: str) -> str:
        return ""

    async def with_predictions(self, answers: Sequence[BenchAnswer]) -> Sequence[BenchAnswer]:
        return [replace(one, predicted_ttft_s=0.5) for one in answers]

    async def close(self) -> None:
        self.is_closed = True
