"""The part of every matrix that one of several tensor-parallel ranks holds. Pure.

Attention is divided by heads and the mlp by its inner size. Input projections are divided by outputs, output
projections by inputs, so a layer has two all-reduces: after attention and after the mlp. The vocabulary is divided by
tokens. If there are fewer kv heads than ranks, neighbouring ranks hold the same one. Every rank holds the norms and the
router of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from pdserve.core.errors import ConfigError
from pdserve.engine.config import ModelConfig

Span = tuple[int, int]  # begin, end


@dataclass(frozen=True, slots=True)
class Cut:
    """How a matrix is divided: along `axis`, into equal units; for outputs, each of its parts separately."""

    axis: Literal["outputs", "inputs"]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def span(self, total: int, units: int) -> Span:
        """This rank's part of `total` numbers that consist of `units` equal pieces. Pieces are not divided."""
        width, first = total // units, units * self.rank // self.size
        end = units * (self.rank + 1) // self.size if units >= self.size else first + 1
        return first * width, end * width

    def outputs(self, parts: Mapping[str, int], cut: Cut | None) -> dict[str, Span]:
        """Which outputs of each part this rank computes."""
        if cut is None or cut.axis != "outputs":
            return {module: (0, count) for module, count in parts.items()}
        return {
            module: self.span(count, units) for (module, count), units in zip(parts.items(), cut.units, strict=True)
        }

    def inputs(self, num_inputs: int, cut: Cut | None) -> Span:
        """Which inputs this rank multiplies."""
        return self.span(num_inputs, cut.units[0]) if cut is not None and cut.axis == "inputs" else (0, num_inputs)

    def has_bias(self, cut: Cut | None) -> bool:
        """Only one of the partial sums may include the bias."""
        return cut is None or cut.axis == "outputs" or self.rank == 0


WHOLE: Final = Shard()


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of one rank's part of the model. Raises ConfigError if the heads cannot be divided evenly."""
    size, heads, kv_heads = shard.size, config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        expected = f"a number that divides {heads} query heads, and divides or is a multiple of {kv_heads} kv heads"
        raise ConfigError("tensor_parallel", size, expected)
    return replace(config, num_heads=heads // size, num_kv_heads=max(1, kv_heads // size))
