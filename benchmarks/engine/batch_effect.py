"""How often the other rows of a step change a token: the same texts in one batch and alone, on the same engine.

    PYTHON -m benchmarks.engine.batch_effect --engine vllm --dtypes float32,bfloat16   # PYTHON: of `make vllm-env`
    python -m benchmarks.engine.batch_effect --dtypes float32,bfloat16,int8            # our own engine

The texts begin with parts of Python's standard library and are written in one batch, greedily and with seeds. Then each
position is computed once more without other rows, after the same tokens and with the same seed. A token may differ only
because the logits do. The change of a logprob shows by how much they do.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from benchmarks.harness import table_head, table_row
from pdserve.config import WorkerConfig
from pdserve.core.types import Role, Sampling, TokenOut
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load_engine import load_engine
from pdserve.launch.settings import bundled_model

SKIPPED: Final = 2_000  # characters of each file: its docstring and imports
PROMPT_TOKENS: Final = 40
HOW: Final = ("greedy", "seeded")


@dataclass(slots=True)
class BatchEffect:
    tokens: int = 0
    differ: int = 0
    changes: list[float] = field(default_factory=list)  # of the logprobs of tokens that do not differ

    def add(self, together: TokenOut, alone: TokenOut) -> None:
        self.tokens += 1
        if together.token_id != alone.token_id:
            self.differ += 1
        elif together.logprob is not None and alone.logprob is not None:
            self.changes.append(abs(together.logprob - alone.logprob))

    def row(self) -> list[str]:
        changed = sum(change > 0.0 for change in self.changes)
        return [f"{self.differ} of {self.tokens}", f"{changed}", f"{max(self.changes, default=0.0):.1g}"]


@dataclass(slots=True)
class WrittenText:
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    blocks: Sequence[int]
    outs: list[TokenOut] = field(default_factory=list)

    def row(self, start: int, end: int) -> Row:
        """Computes tokens[start:end], and samples the next one."""
        return Row(
            tokens=self.tokens[start:end],
            start=start,
            blocks=self.blocks,
            sample=self.sampling,
            history=self.tokens[:end],
            prompt_len=self.prompt_len,
        )

    def rows(self, count: int) -> list[tuple[int, int]]:
        """Starts and ends of `count` rows: the prompt, then one token each."""
        first = self.prompt_len
        return [(0, first), *((end - 1, end) for end in range(first + 1, first + count))]


def measure(engine: Engine, texts: Sequence[WrittenText], count: int) -> BatchEffect:
    for at in range(count):
        outs = engine.step([text.row(*text.rows(count)[at]) for text in texts])
        for text, out in zip(texts, outs, strict=True):
            text.outs.append(out.sampled[0])
            text.tokens.append(out.sampled[0].token_id)
    effect = BatchEffect()
    for text in texts:
        for together, (start, end) in zip(text.outs, text.rows(count), strict=True):
            [alone] = engine.step([text.row(start, end)])
            effect.add(together, alone.sampled[0])
    return effect


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=bundled_model(), metavar="FOLDER", help="the bundled one")
    parser.add_argument("--engine", choices=("own", "vllm"), default="own")
    parser.add_argument("--dtypes", default="float32", help="comma-separated (float32)")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="texts that are computed together (16)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="of each text (100)")
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile the model")
    flags = parser.parse_args()
    prompts = standard_library(flags.model, flags.batch)
    print(table_head(["dtype", "tokens", "differ alone", "logprobs that change", "by at most"]), flush=True)
    for dtype in flags.dtypes.split(","):
        size = 32  # of a block, as vLLM's kernels take them
        each = -(-(PROMPT_TOKENS + flags.tokens) // size)
        engine = load_engine(
            WorkerConfig(
                model=str(flags.model),
                worker_id="bench",
                engine=flags.engine,
                dtype=dtype,
                block_size=size,
                kv_blocks=each * flags.batch,
                cuda_graphs=not flags.eager,
            ),
            Role.DECODE,
        )
        for how in HOW:
            texts = [
                WrittenText(
                    tokens=list(prompt),
                    prompt_len=len(prompt),
                    sampling=Sampling(
                        temperature=0.0 if how == "greedy" else 1.0, seed=at, logprobs=0, ignore_eos=True
                    ),
                    blocks=range(at * each, (at + 1) * each),
                )
                for at, prompt in enumerate(prompts)
            ]
            print(table_row([dtype, how, *measure(engine, texts, flags.tokens).row()]), flush=True)
        if hasattr(engine, "close"):
            engine.close()
    return 0


def standard_library(model: Path, count: int) -> list[list[int]]:
    """Prompts of PROMPT_TOKENS tokens from as many files."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens = tokenizer.encode(path.read_text(errors="replace")[SKIPPED:]).ids[:PROMPT_TOKENS]
        if len(tokens) == PROMPT_TOKENS:
            found.append(tokens)
    return found[:count]


if __name__ == "__main__":
    sys.exit(main())
