"""A rank's part of a stored tensor, described so that only its bytes are read. Pure."""

# Shapes: N outputs, K inputs.

from __future__ import annotations

import math
from dataclasses import replace

from pdserve.core.errors import ModelError
from pdserve.engine.packed_scheme import Axis, PackedTensor
from pdserve.engine.quantisation_config import Scheme
from pdserve.engine.safetensors_file import ITEM_BYTES, StoredTensor
from pdserve.engine.sharding import Span


def cut_tensor(tensor: StoredTensor, rows: Span, columns: Span | None = None) -> StoredTensor:
    """A range of rows of a tensor, and a range of their columns; a vector has rows only."""
    count, row_shape = rows[1] - rows[0], tensor.shape[1:]
    row_bytes = math.prod(row_shape) * ITEM_BYTES[tensor.dtype]
    begin = tensor.begin + rows[0] * row_bytes
    if columns is None or columns == (0, row_shape[0]):
        return replace(tensor, shape=(count, *row_shape), begin=begin, num_bytes=count * row_bytes)
    item_bytes, width = ITEM_BYTES[tensor.dtype], columns[1] - columns[0]
    return replace(
        tensor,
        shape=(count, width),
        begin=begin + columns[0] * item_bytes,
        num_bytes=count * width * item_bytes,
        run_bytes=width * item_bytes,
        stride_bytes=row_bytes,
    )


def cut_scale(
    tensor: StoredTensor, scheme: Scheme, outputs: Span, inputs: Span, shape: tuple[int, int]
) -> StoredTensor:
    """The scales of a part of a matrix [N, K] of `shape`. Raises ModelError if the part divides a scale's block."""
    rows = _blocks(tensor, outputs, shape[0], scheme.block[0], "outputs")
    columns = _blocks(tensor, inputs, shape[1], scheme.block[1], "inputs")
    counts = scheme.scale_counts(*shape)
    if (rows, columns) == ((0, counts[0]), (0, counts[1])):
        return tensor
    return cut_tensor(tensor, rows, columns if len(tensor.shape) == 2 else None)


def cut_packed(
    tensor: StoredTensor, part: PackedTensor, outputs: Span, inputs: Span, shape: tuple[int, int]
) -> StoredTensor:
    """One of the tensors of a part of a 4-bit matrix [N, K] of `shape`. Raises ModelError if the part divides a group
    or an int32."""

    def span(axis: Axis) -> Span:
        cut, total = (outputs, shape[0]) if axis.along == "outputs" else (inputs, shape[1])
        return _blocks(tensor, cut, total, axis.count, axis.along)

    return cut_tensor(tensor, span(part.rows), span(part.columns))


def _blocks(tensor: StoredTensor, span: Span, total: int, size: int | None, what: str) -> Span:
    if size is None:
        return 0, 1
    if span[0] % size or (span[1] % size and span[1] != total):
        expected = f"parts of a multiple of {size} {what}: another tensor_parallel"
        raise ModelError(tensor.name, f"{what} {span[0]} to {span[1]} for one rank", expected)
    return span[0] // size, -(-span[1] // size)
