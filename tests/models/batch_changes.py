"""How often the other rows of a step change a token of the engine vllm: a greedy text is generated alone, and each of
its tokens again in a step with other texts.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv-vllm/bin/python -m tests.models.batch_changes bfloat16 float16 float32
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.models.conftest import open_vllm
from tests.models.test_exactness import decoded, row_of
from tests.models.tiny import TINY, build
from tests.unit.engine.conftest import prompt_of

TEXTS, TOKENS = 8, 64


def changes(folder: Path, dtype: str) -> tuple[int, int]:
    """The tokens that differ, and all."""
    engine = open_vllm(folder, dtype=dtype)
    try:
        prompts = [prompt_of(20 + 9 * text) for text in range(TEXTS)]
        texts = [list(prompt) for prompt in prompts]
        blocks = [list(range(8 * text, 8 * text + 8)) for text in range(TEXTS)]
        for text, prompt, own in zip(texts, prompts, blocks, strict=True):
            decoded(engine, text, 0, own, len(prompt), TOKENS)
        changed = 0
        for at in range(1, TOKENS):  # the KV of the texts is in their blocks
            ends = [len(prompt) + at for prompt in prompts]
            rows = [
                row_of(text[:end], end - 1, own, len(prompt))
                for text, end, own, prompt in zip(texts, ends, blocks, prompts, strict=True)
            ]
            outs = engine.step(rows)
            changed += sum(
                out.sampled[0].token_id != text[end] for out, text, end in zip(outs, texts, ends, strict=True)
            )
        return changed, TEXTS * (TOKENS - 1)
    finally:
        engine.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        model = build(*TINY["llama"], Path(name) / "llama")
        for dtype in sys.argv[1:]:
            changed, count = changes(model, dtype)
            print(f"{dtype}: {changed} of {count} tokens change in a batch of {TEXTS}", flush=True)
