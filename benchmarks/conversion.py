"""Compares KV that changes its shape during a transfer with one copy of the same bytes, in CPU time.

    python -m benchmarks.conversion [--mib 64]

Figures are ratios: 1.00 is a plain copy of the source bytes between two buffers of that size, measured alternately in
the same run. `wire` is the number of bytes sent for each source byte.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvtransfer.protocol.mapping import Window, pieces_of
from kvtransfer.reshape.convert import BlockArrays, pack, unpack
from pdserve.core.kv.kv_shape import KvShape

LARGE = KvShape(layout="block-major.v1", dtype="float32", num_layers=16, num_kv_heads=8, head_dim=64, block_size=16)
BUNDLED = replace(LARGE, num_layers=6, num_kv_heads=2, head_dim=32)
REPEATS = 7


def stored_as(shape: KvShape, dtype: str) -> KvShape:
    layout = "block-major-int8.v1" if dtype == "int8" else "block-major.v1"
    return replace(shape, dtype=dtype, layout=layout)


def cases(shape: KvShape) -> list[tuple[str, KvShape, KvShape]]:
    half, quarter = stored_as(shape, "bfloat16"), stored_as(shape, "int8")
    return [
        ("as it is", shape, shape),
        ("blocks 16 -> 32", shape, replace(shape, block_size=32)),
        ("blocks 32 -> 16", replace(shape, block_size=32), shape),
        ("blocks 16 -> 15", shape, replace(shape, block_size=15)),
        ("half the heads", shape, replace(shape, tp_degree=2)),
        ("float32 -> bfloat16", shape, half),
        ("bfloat16 -> float32", half, shape),
        ("float32 -> int8", shape, quarter),
        ("int8 -> float32", quarter, shape),
        ("float32 16 -> int8 32", shape, replace(quarter, block_size=32)),
    ]


def measure(source: KvShape, target: KvShape, num_bytes: int) -> tuple[float, float, float, float]:
    """Seconds of a plain copy, of pack and of unpack, and wire bytes per source byte; the best of a few turns."""
    num_sources = num_bytes // source.block_bytes
    num_tokens = num_sources * source.block_size // target.block_size * target.block_size
    num_targets = num_tokens // target.block_size
    form = target.form
    memory, landing = bytearray(num_sources * source.block_bytes), bytearray(num_targets * form.block_bytes)
    pool = BlockArrays(memory, source.form)
    values = np.random.default_rng(0).standard_normal(pool.values.shape[1:]).astype(np.float32)
    pool.values[:] = values.astype(pool.values.dtype)
    copied, out, into = bytearray(len(memory)), BlockArrays(bytearray(len(landing)), form), BlockArrays(landing, form)
    order = random.Random(0)
    blocks, granted = (order.sample(range(count), count) for count in (num_sources, num_targets))
    window = Window(0, source.num_layers, 0, target.num_heads)
    pieces = pieces_of(
        source.block_size, target.block_size, num_tokens=num_tokens, first_block=0, num_blocks=num_targets
    )

    def copy() -> None:
        copied[:] = memory

    runs: list[Callable[[], None]] = [
        copy,
        lambda: pack(pool, blocks, window, out, range(num_targets), pieces),
        lambda: unpack(out, into, granted, Window.whole(form)),
    ]
    best = [float("inf")] * len(runs)
    for _ in range(REPEATS):
        for index, run in enumerate(runs):
            began_s = time.process_time()
            run()
            best[index] = min(best[index], time.process_time() - began_s)
    used = num_tokens / (num_sources * source.block_size)
    return best[0] * used, best[1], best[2], len(landing) / len(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="source bytes of each case")
    args = parser.parse_args()
    for name, shape in (("16 layers, 8 heads of 64", LARGE), ("6 layers, 2 heads of 32", BUNDLED)):
        print(f"{name}, fragmented\n{'':24}{'copy GB/s':>10}{'pack':>8}{'unpack':>8}{'wire':>8}")
        for label, source, target in cases(shape):
            copy_s, pack_s, unpack_s, wire = measure(source, target, args.mib << 20)
            speed = args.mib * 2**20 / copy_s / 1e9
            print(f"{label:24}{speed:10.1f}{pack_s / copy_s:8.2f}{unpack_s / copy_s:8.2f}{wire:8.3f}")


if __name__ == "__main__":
    main()
