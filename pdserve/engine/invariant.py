"""Deterministic mode: the bits of a row's result depend only on the row, not on other rows, chunks or the worker.

What could break that, and what prevents it:
products    a matrix product may add in another order for another number of rows: `make_invariant` tests it.
attention   the paged kernel (kernels/paged.py) computes every row, and a query in the same way alone and in a chunk.
the rest    works row by row: in ops.py a row's arithmetic does not depend on the others.
"""

# Shapes: N rows of a matrix, K columns.

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from pdserve.engine.linear import Linear, make_invariant
from pdserve.engine.parameters import Source
from pdserve.engine.sharding import WHOLE, Cut, Shard


def stable(source: Source, *, is_deterministic: bool, shard: Shard = WHOLE) -> Source:
    """`source`, with invariant products if requested."""
    return InvariantSource(source, shard) if is_deterministic else source


@final
class InvariantSource:
    """Wraps every product of `source` so that it does not depend on the number of rows."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self._source = source
        self._shard = shard

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(name, size)

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        return self._source.table(name, num_rows, num_columns, is_cut=is_cut)

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        begin, end = self._shard.inputs(num_inputs, cut)
        return make_invariant(self._source.matrix(parts, num_inputs, has_bias=has_bias, cut=cut), end - begin)

    def product(self, table_NK: Tensor) -> Linear:
        return make_invariant(self._source.product(table_NK), int(table_NK.shape[1]))

    def exact_product(self, table_NK: Tensor) -> Linear:
        return make_invariant(self._source.exact_product(table_NK), int(table_NK.shape[1]))
