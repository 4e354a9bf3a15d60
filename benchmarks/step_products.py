"""Compares a decode step with the sum of its matrix products, which are measured separately in the same process.

    python -m benchmarks.step_products --model FOLDER [--dtypes float32,bfloat16,int8,int4] [--batches 1,2,4,8,16,32]
        [--load dummy]

Each round measures one step and then all its products, with inputs that are already rounded. Both use the same weights
in the same order, so both read them from memory. The ratio is that of the two medians. A prompt has 32 tokens. Reading
KV, sampling, and the host's work are part of the step but not of the products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.engine.decode_steps import WARM, DecodeSteps, engines, parse_flags
from benchmarks.engine.report import table
from pdserve.engine.cpu.ops import quantise
from pdserve.engine.model.linear import Linear
from pdserve.engine.model.parameters import MlpWeights
from pdserve.engine.torch_engine import TorchEngine

ROUND: Final[dict[str, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "int8": quantise,
    "int4": quantise,
    "bfloat16": lambda x: (x.bfloat16(),),
}


def main() -> None:
    flags = parse_flags(__doc__, batches="1,2,4,8,16,32", rounds=24)
    rows = [["dtype", "rows", "step ms", "products ms", "ratio", "least step ms", "least products ms", "ratio"]]
    for dtype, engine in engines(flags):
        for batch in flags.batches:
            steps, products = measure(engine, dtype, batch, flags.rounds)
            rows.append([dtype, str(batch), *_pair(statistics.median, steps, products), *_pair(min, steps, products)])
            print(" ".join(rows[-1]), flush=True)
    print(table(rows))


def _pair(summary: Callable[[list[float]], float], steps: list[float], products: list[float]) -> list[str]:
    step_s, products_s = summary(steps), summary(products)
    return [f"{1e3 * step_s:.2f}", f"{1e3 * products_s:.2f}", f"{step_s / products_s:.2f}"]


def measure(engine: TorchEngine, dtype: str, batch: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of its products."""
    rows = DecodeSteps(engine, batch)
    multiply = products_of(engine, dtype, batch)
    steps, products = [], []
    for _ in range(WARM + rounds):
        began_s = time.perf_counter()
        rows.step()
        steps.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        multiply()
        products.append(time.perf_counter() - began_s)
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
