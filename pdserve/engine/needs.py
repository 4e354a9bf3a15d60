"""Which stored tensors a model needs, in which forms, and whether a checkpoint has them all. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.linear import Linear, PlainLinear
from pdserve.engine.quantisation_config import Quantisation
from pdserve.engine.safetensors_file import StoredTensor

PLAIN_DTYPES: Final = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Need:
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[str, ...]  # any of them


@final
class Needs:
    """A Source that gives nothing: it notes every tensor that is asked for, in the order of reading."""

    def __init__(self, quantisation: Quantisation) -> None:
        self.tensors: dict[str, Need] = {}
        self.num_matrix_weights = 0  # that are multiplied with
        self.num_table_weights = 0  # that are looked up
        self._quantisation = quantisation

    def vector(self, name: str, size: int) -> Tensor:
        return self._note(name, (size,))

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        self.num_table_weights += num_rows * num_columns
        return self._note(name, (num_rows, num_columns))

    def matrix(self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False) -> Linear:
        for module, num_outputs in parts.items():
            scheme = self._quantisation.scheme(module)
            if scheme is None:
                self._note(f"{module}.weight", (num_outputs, num_inputs))
            else:
                self._note(f"{module}.weight", (num_outputs, num_inputs), dtypes=(scheme.stored,))
                self._note(f"{module}.{scheme.scale_name}", *scheme.scale_shapes(num_outputs, num_inputs))
            if has_bias:
                self._note(f"{module}.bias", (num_outputs,))
        return self.product(torch.empty((sum(parts.values()), num_inputs), device="meta"))

    def product(self, table_NK: Tensor) -> Linear:
        self.num_matrix_weights += table_NK.numel()
        return PlainLinear(table_NK, None)

    def exact_product(self, table_NK: Tensor) -> Linear:
        return PlainLinear(table_NK, None)

    def check(self, stored: Mapping[str, StoredTensor]) -> None:
        """Raises ModelError on a tensor that is missing, left over or in a wrong form."""
        if missing := sorted(self.tensors.keys() - stored.keys()):
            raise ModelError(missing[0], f"no such tensor ({len(missing)} are missing)", "every parameter of the model")
        if left := sorted(stored.keys() - self.tensors.keys()):
            raise ModelError(left[0], f"a tensor that nothing uses ({len(left)} such)", "only the model's parameters")
        for name, need in self.tensors.items():
            seen = stored[name]
            if seen.shape not in need.shapes:
                shapes = " or ".join(str(list(shape)) for shape in need.shapes)
                raise ModelError(name, f"shape {list(seen.shape)}", f"{shapes}, as config.json says")
            if seen.dtype not in need.dtypes:
                raise ModelError(name, f"dtype {seen.dtype}", " or ".join(need.dtypes) + ", as config.json says")

    def _note(self, name: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = PLAIN_DTYPES) -> Tensor:
        if name in self.tensors:
            raise InternalError(f"two parameters are called {name}")
        self.tensors[name] = Need(shapes, dtypes)
        return torch.empty(shapes[0], device="meta")
