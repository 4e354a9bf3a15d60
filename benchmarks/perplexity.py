"""Measures the loss from rounded weights and KV: perplexity and changed choices of the bundled model on Python files
outside its training set.

    python -m benchmarks.perplexity [--kinds float32,bfloat16,int8,int4] [--window 512] [--chunk 64] [--choices]

The text consists of the files that training held out (the model's card names them), from the running interpreter's
standard library. Python 3.11.7 gives the 40,267 tokens of the card; another version has similar files. Each window of
--window tokens is a separate sequence, computed in steps of --chunk tokens, so that all but the first chunk read stored
KV of earlier steps. The engine's prompt scoring gives the logprobs. A kind is weights, or weights/KV. The relative
difference is that of perplexity from the first kind. The interval is two standard errors of the windows' paired
differences, so a difference inside it may be chance.

--choices counts the positions at which another token is the most likely one than for transformers in float64, which
reads the same text. transformers in bfloat16 is counted beside the engine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from benchmarks.engine.report import table
from pdserve.config import WorkerConfig
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.build_engine import open_torch_engine

MODEL: Final = Path(__file__).parents[1] / "pdserve/models/stdlib-5m"
HELD_OUT: Final = (
    "distutils/command/bdist_dumb.py",
    "distutils/unixccompiler.py",
    "importlib/metadata/_collections.py",
    "lib2to3/__main__.py",
    "lib2to3/fixes/fix_repr.py",
    "multiprocessing/popen_fork.py",
    "multiprocessing/resource_tracker.py",
    "multiprocessing/spawn.py",
    "os.py",
    "tkinter/messagebox.py",
    "tkinter/ttk.py",
)
END_OF_TEXT: Final = 0  # opens every document, as in training
BLOCK_SIZE: Final = 16
WINDOWS_PER_STEP: Final = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="float32,bfloat16,int8,int4")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--choices", action="store_true", help="compare the most likely tokens with float64")
    flags = parser.parse_args()
    token_ids = read_held_out()
    windows = [token_ids[at : at + flags.window + 1] for at in range(0, len(token_ids) - 1, flags.window)]
    print(f"{MODEL.name}: {len(token_ids):,} tokens in {len(windows)} windows of {flags.window}")
    rows = [["weights/KV", "nats a token", "perplexity", "against " + flags.kinds.split(",")[0], "tokens/s"]]
    exact = transformers_choices(windows, torch.float64) if flags.choices else []
    if exact:
        rows[0].append("changed choices")
    first: list[float] = []
    for kind in flags.kinds.split(","):
        print(f"{kind} ...", file=sys.stderr, flush=True)
        began_s = time.perf_counter()
        losses, choices = read(open_engine(kind, flags.threads, flags.window), windows, flags.chunk)
        took_s = time.perf_counter() - began_s
        first = first or losses
        mean = mean_loss(losses, windows)
        cell = "-" if losses is first else difference(first, losses, windows)
        rows.append([kind, f"{mean:.4f}", f"{math.exp(mean):.3f}", cell, f"{len(token_ids) / took_s:.0f}"])
        if exact:
            rows[-1].append(changed(choices, exact))
    if exact:
        choices = transformers_choices(windows, torch.bfloat16)
        rows.append(["transformers bfloat16", *["-"] * 4, changed(choices, exact)])
    print(table(rows))


def read_held_out() -> list[int]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    library = Path(sysconfig.get_paths()["stdlib"])
    token_ids = []
    for name in HELD_OUT:
        if not (library / name).exists():
            print(f"left out, not in this Python: {name}")
            continue
        with tokenize.open(library / name) as handle:
            text = handle.read().rstrip()
        token_ids += [END_OF_TEXT, *tokenizer.encode(f"# file: {name}\n{text}\n").ids]
    return [*token_ids, END_OF_TEXT]


def open_engine(kind: str, threads: int, window: int) -> Engine:
    weights, _, kv = kind.partition("/")
    settings: dict[str, Any] = {"kv_dtype": kv} if kv else {}
    blocks = WINDOWS_PER_STEP * -(-window // BLOCK_SIZE)
    return open_torch_engine(
        WorkerConfig(
            model=str(MODEL),
            worker_id="bench",
            dtype=weights,
            threads=threads,
            block_size=BLOCK_SIZE,
            kv_blocks=blocks,
            **settings,
        )
    )


def read(engine: Engine, windows: Sequence[Sequence[int]], chunk: int) -> tuple[list[float], list[list[int]]]:
    """The summed negative logprob of each window's tokens, the first of them excepted; and the most likely tokens."""
    each = engine.spec.num_blocks // WINDOWS_PER_STEP
    losses = [0.0] * len(windows)
    choices: list[list[int]] = [[] for _ in windows]
    for at in range(0, len(windows), WINDOWS_PER_STEP):
        running = list(enumerate(windows[at : at + WINDOWS_PER_STEP], start=at))
        start = 0
        while running:
            rows = []
            for index, window in running:
                tokens = window[start : min(start + chunk, len(window) - 1)]
                first = (index - at) * each
                rows.append(
                    Row(
                        tokens=tokens,
                        start=start,
                        blocks=range(first, first - (start + len(tokens)) // -BLOCK_SIZE),
                        targets=window[start + 1 : start + 1 + len(tokens)],
                        num_top=1,
                    )
                )
            for (index, _), out in zip(running, engine.step(rows), strict=True):
                for token in out.scored:
                    assert token.logprob is not None
                    losses[index] -= token.logprob
                    choices[index].append(token.top[0][0])
            start += chunk
            running = [(index, window) for index, window in running if start < len(window) - 1]
    return losses, choices


@torch.inference_mode()
def transformers_choices(windows: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[int]]:
    """The most likely token after each token of each window."""
    import transformers

    print(f"transformers {str(dtype).removeprefix('torch.')} ...", file=sys.stderr, flush=True)
    how = "eager" if dtype == torch.float64 else "sdpa"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation=how).eval()
    model = model.to(dtype)
    return [model(torch.tensor([list(window[:-1])])).logits[0].argmax(-1).tolist() for window in windows]


def changed(choices: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> str:
    pairs = [pair for ours, theirs in zip(choices, exact, strict=True) for pair in zip(ours, theirs, strict=True)]
    count = sum(ours != theirs for ours, theirs in pairs)
    return f"{count} of {len(pairs)} ({100 * count / len(pairs):.2f} %)"


def mean_loss(losses: Sequence[float], windows: Sequence[Sequence[int]]) -> float:
    return sum(losses) / sum(len(window) - 1 for window in windows)


def difference(first: Sequence[float], losses: Sequence[float], windows: Sequence[Sequence[int]]) -> str:
    """The relative change of perplexity, with two standard errors over the windows."""
    own = mean_loss(losses, windows) - mean_loss(first, windows)
    apart = [(b - a) / (len(window) - 1) for a, b, window in zip(first, losses, windows, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return f"{100 * math.expm1(own):+.3f} % (+-{200 * error:.3f})"


if __name__ == "__main__":
    main()
