"""How checkpoints store matrices of 4-bit weights: GPTQ, AWQ and compressed-tensors. Pure.

    w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g]         0 <= q <= 15; g is the group of input k

Eight integers are packed in an int32, the first one in its lowest bits. K inputs, N outputs, S inputs of a group:

    format           weights       scales        zeros
    gptq             [K / 8, N]    [K / S, N]    [K / S, N / 8], reduced by 1 modulo 16
    gptq_v2          the same      the same      [K / S, N / 8]
    awq              [K, N / 8]    the same      [K / S, N / 8]; eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
    pack-quantized   [N, K / 8]    [N, K / S]    [N / 8, K / S]; none if symmetric, then 8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PackedFormat = Literal["gptq", "gptq_v2", "awq", "pack-quantized"]
PER_WORD: Final = 8  # integers of an int32


@dataclass(frozen=True, slots=True)
class Axis:
    """One stored element for `count` outputs or inputs; None: for all."""

    along: Literal["outputs", "inputs"]
    count: int | None

    def length(self, total: int) -> int:
        return 1 if self.count is None else -(-total // self.count)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    suffix: str  # of its name, after that of the module
    dtypes: tuple[str, ...]
    rows: Axis
    columns: Axis


@dataclass(frozen=True, slots=True)
class PackedScheme:
    format: PackedFormat
    group: int | None  # inputs that share a scale; None: all
    has_zeros: bool = True

    def tensors(self) -> tuple[PackedTensor, ...]:
        """The packed weights, the scales, and the zeros if any."""
        groups, words, floats = Axis("inputs", self.group), ("I32",), ("F16", "BF16", "F32")
        if self.format == "pack-quantized":
            outputs, packed = Axis("outputs", 1), Axis("outputs", PER_WORD)
            found = (
                PackedTensor("weight_packed", words, outputs, Axis("inputs", PER_WORD)),
                PackedTensor("weight_scale", floats, outputs, groups),
                PackedTensor("weight_zero_point", words, packed, groups),
            )
            return found if self.has_zeros else found[:2]
        is_awq = self.format == "awq"
        inputs, outputs = Axis("inputs", 1 if is_awq else PER_WORD), Axis("outputs", PER_WORD if is_awq else 1)
        return (
            PackedTensor("qweight", words, inputs, outputs),
            PackedTensor("scales", floats, groups, Axis("outputs", 1)),
            PackedTensor("qzeros", words, groups, Axis("outputs", PER_WORD)),
        )

    @property
    def unused(self) -> tuple[str, ...]:
        """Suffixes of stored tensors that add nothing: the groups of neighbouring inputs, the shape, and the zeros that
        AutoGPTQ writes as the bias of a matrix without one."""
        if self.format == "pack-quantized":
            return ("weight_shape",)
        return () if self.format == "awq" else ("g_idx", "bias")

    def shape(self, tensor: PackedTensor, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        totals = {"outputs": num_outputs, "inputs": num_inputs}
        return tensor.rows.length(totals[tensor.rows.along]), tensor.columns.length(totals[tensor.columns.along])
