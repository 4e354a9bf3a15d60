"""Deterministic mode: a row's bits depend on the row alone, not on its company, its chunks or its worker.

What could break that, and what holds it:
products    a matrix product may add up in another order for another number of rows: `make_invariant` tries it out.
attention   the paged kernel (kernels/paged.py) takes every row, and computes a query the same way alone and in a chunk.
the rest    works row by row; the kernels in kernels/rows.py never let a row's arithmetic depend on the others.
"""

# Shapes: N rows of a matrix, K columns.

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from pdserve.engine.linear import Linear, make_invariant
from pdserve.engine.parameters import Source


def stable(source: Source, *, is_deterministic: bool) -> Source:
    """`source`, its products made invariant where that is asked for."""
    return InvariantSource(source) if is_deterministic else source


@final
class InvariantSource:
    """Hands every product of `source` on as one that does not depend on the number of rows."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(name, size)

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        return self._source.table(name, num_rows, num_columns)

    def matrix(self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False) -> Linear:
        return make_invariant(self._source.matrix(parts, num_inputs, has_bias=has_bias), num_inputs)

    def product(self, table_NK: Tensor) -> Linear:
        return make_invariant(self._source.product(table_NK), int(table_NK.shape[1]))

    def exact_product(self, table_NK: Tensor) -> Linear:
        return make_invariant(self._source.exact_product(table_NK), int(table_NK.shape[1]))
