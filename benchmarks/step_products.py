"""Compares a decode step with the sum of its matrix products, which are measured separately in the same process.

    python -m benchmarks.step_products --model FOLDER [--dtypes float32,bfloat16,int8,int4] [--batches 1,2,4,8,16,32]
        [--load dummy]

Each round measures one step and then all its products, with inputs that are already rounded. Both use the same weights
in the same order, so both read them from memory. The ratio is that of the two medians. A prompt has 32 tokens. Reading
KV, sampling, and the host's work are part of the step but not of the products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.engine.child import prompts
from benchmarks.engine.peers import BLOCK_SIZE, step
from benchmarks.engine.report import table
from pdserve.config import WorkerConfig
from pdserve.engine.build_engine import open_torch_engine
from pdserve.engine.linear import Linear
from pdserve.engine.ops import quantise
from pdserve.engine.parameters import MlpWeights
from pdserve.engine.torch_engine import TorchEngine

PROMPT_TOKENS: Final = 32
WARM: Final = 4
ROUND: Final[dict[str, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "int8": quantise,
    "int4": quantise,
    "bfloat16": lambda x: (x.bfloat16(),),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8,int4")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--load", default="auto", help="dummy: random weights, for a folder with config.json only")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    batches = [int(word) for word in flags.batches.split(",")]
    rows = [["dtype", "rows", "step ms", "products ms", "ratio", "least step ms", "least products ms", "ratio"]]
    for dtype in flags.dtypes.split(","):
        room = max(batches) * -(-(PROMPT_TOKENS + WARM + flags.rounds + 1) // BLOCK_SIZE)
        engine = open_torch_engine(
            WorkerConfig(
                model=str(flags.model), worker_id="bench", dtype=dtype, threads=flags.threads, kv_blocks=room,
                block_size=BLOCK_SIZE, load=flags.load,
            )
        )  # fmt: skip
        for batch in batches:
            steps, products = measure(engine, dtype, batch, flags.rounds)
            rows.append([dtype, str(batch), *_pair(statistics.median, steps, products), *_pair(min, steps, products)])
            print(" ".join(rows[-1]), flush=True)
    print(table(rows))


def _pair(summary: Callable[[list[float]], float], steps: list[float], products: list[float]) -> list[str]:
    step_s, products_s = summary(steps), summary(products)
    return [f"{1e3 * step_s:.2f}", f"{1e3 * products_s:.2f}", f"{step_s / products_s:.2f}"]


def measure(engine: TorchEngine, dtype: str, batch: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of its products."""
    histories = prompts(batch, PROMPT_TOKENS, engine.spec.vocab_size, salt=1)
    first = step(engine, histories, [0] * batch, PROMPT_TOKENS)
    multiply = products_of(engine, dtype, batch)
    for history, token in zip(histories, first, strict=True):
        history.append(token)
    steps, products = [], []
    for _ in range(WARM + rounds):
        began_s = time.perf_counter()
        sampled = step(engine, histories, [len(one) - 1 for one in histories], PROMPT_TOKENS)
        steps.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        multiply()
        products.append(time.perf_counter() - began_s)
        for history, token in zip(histories, sampled, strict=True):
            history.append(token)
    return steps[WARM:], products[WARM:]


def products_of(engine: TorchEngine, dtype: str, batch: int) -> Callable[[], None]:
    """All products of a step, in order. Dense models only."""
    weights, config = engine.model._weights, engine.model._config
    linears: list[tuple[Linear, int]] = []
    for layer in weights.layers:
        assert isinstance(layer.mlp, MlpWeights)
        linears += [
            (layer.qkv, config.hidden_size),
            (layer.o, config.num_heads * config.head_dim),
            (layer.mlp.gate_up, config.hidden_size),
            (layer.mlp.down, config.mlp_size),
        ]
    linears.append((weights.head, config.hidden_size))
    inputs: dict[int, tuple[Any, ...]] = {}
    for _, size in linears:
        x_BK = torch.randn(batch, size)
        inputs[size] = ROUND[dtype](x_BK) if dtype in ROUND else (x_BK,)

    def run() -> None:
        with torch.inference_mode():
            for linear, size in linears:
                getattr(linear, "product", linear)(*inputs[size])

    return run


if __name__ == "__main__":
    main()
