"""Decode steps of our engine alone, for the benchmarks that take a step apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

from benchmarks.engine.child import prompts
from benchmarks.engine.peers import BLOCK_SIZE, step
from pdserve.config import WorkerConfig
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.torch_engine import TorchEngine

PROMPT_TOKENS: Final = 32
WARM: Final = 4  # steps that are not counted


def parse_flags(description: str | None, *, batches: str, rounds: int) -> argparse.Namespace:
    """The flags, with the defaults given; `batches` and `dtypes` become lists."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8,int4", type=lambda words: words.split(","))
    parser.add_argument("--batches", default=batches, type=lambda words: [int(word) for word in words.split(",")])
    parser.add_argument("--load", default="auto", help="dummy: random weights, for a folder with config.json only")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def engines(flags: argparse.Namespace) -> Iterator[tuple[str, TorchEngine]]:
    """An engine for each dtype, with blocks for the largest batch."""
    for dtype in flags.dtypes:
        room = max(flags.batches) * -(-(PROMPT_TOKENS + WARM + flags.rounds + 1) // BLOCK_SIZE)
        config = WorkerConfig(
            model=str(flags.model), worker_id="bench", dtype=dtype, threads=flags.threads, kv_blocks=room,
            block_size=BLOCK_SIZE, load=flags.load,
        )  # fmt: skip
        yield dtype, open_torch_engine(config)


@final
class DecodeSteps:
    """Rows whose prompts are computed; each call of `step` decodes one token of each."""

    def __init__(self, engine: TorchEngine, batch: int) -> None:
        self._engine = engine
        self._histories = prompts(batch, PROMPT_TOKENS, engine.spec.vocab_size, salt=1)
        self._keep(step(engine, self._histories, [0] * batch, PROMPT_TOKENS))

    def step(self) -> None:
        starts = [len(one) - 1 for one in self._histories]
        self._keep(step(self._engine, self._histories, starts, PROMPT_TOKENS))

    def _keep(self, sampled: list[int]) -> None:
        for history, token in zip(self._histories, sampled, strict=True):
            history.append(token)
