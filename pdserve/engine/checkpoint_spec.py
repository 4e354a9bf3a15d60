"""The stored tensors that a model needs, their allowed shapes, and the check that a checkpoint has them all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from torch import Tensor

from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.linear import Linear, PlainLinear, has_panels
from pdserve.engine.packed_scheme import PER_WORD, PackedScheme
from pdserve.engine.quantisation_config import Quantisation
from pdserve.engine.safetensors_file import StoredTensor
from pdserve.engine.sharding import WHOLE, Cut, Shard
from pdserve.engine.tensor_slices import cut_packed, cut_scale, cut_tensor

PLAIN_DTYPES: Final = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Need:
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[str, ...]  # any of them


@final
class Needs:
    """A Source that returns no data: it records every requested tensor, in the order of reading."""

    def __init__(self, quantisation: Quantisation, shard: Shard = WHOLE) -> None:
        self.tensors: dict[str, Need] = {}
        self._shard = shard
        self._parts: dict[str, Callable[[StoredTensor], StoredTensor] | None] = {}  # None: not needed by this rank
        self.num_matrix_weights = 0  # products of this rank
        self.num_packed_weights = 0  # those of them that are stored in 4 bits
        self.num_panel_weights = 0  # those whose product can read bfloat16, if the checkpoint stores it
        self.num_table_weights = 0  # lookup tables of this rank
        self._quantisation = quantisation

    def vector(self, name: str, size: int) -> Tensor:
        return self._note(name, (size,))

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        rows = self._shard.span(num_rows, num_rows) if is_cut else (0, num_rows)
        self._note(name, (num_rows, num_columns))
        self._parts[name] = partial(cut_tensor, rows=rows)
        table = torch.empty((rows[1] - rows[0], num_columns), device="meta")
        self.num_table_weights += table.numel()
        return table

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        inputs = self._shard.inputs(num_inputs, cut)
        spans = self._shard.outputs(parts, cut)
        for (module, num_outputs), outputs in zip(parts.items(), spans.values(), strict=True):
            scheme, shape = self._quantisation.scheme(module), (num_outputs, num_inputs)
            if isinstance(scheme, PackedScheme):
                _check_groups(module, scheme, num_inputs)
                for part in scheme.tensors():
                    name = f"{module}.{part.suffix}"
                    self._note(name, scheme.shape(part, *shape), dtypes=part.dtypes)
                    self._parts[name] = partial(cut_packed, part=part, outputs=outputs, inputs=inputs, shape=shape)
                self.num_packed_weights += (outputs[1] - outputs[0]) * (inputs[1] - inputs[0])
            elif scheme is None:
                self._note(f"{module}.weight", shape)
                self._parts[f"{module}.weight"] = partial(cut_tensor, rows=outputs, columns=inputs)
            else:
                self._note(f"{module}.weight", shape, dtypes=(scheme.stored,))
                scale = f"{module}.{scheme.scale_name}"
                self._note(scale, *scheme.scale_shapes(*shape))
                self._parts[scale] = partial(cut_scale, scheme=scheme, outputs=outputs, inputs=inputs, shape=shape)
                self._parts[f"{module}.weight"] = partial(cut_tensor, rows=outputs, columns=inputs)
            if has_bias:
                self._note(f"{module}.bias", (num_outputs,))
                self._parts[f"{module}.bias"] = partial(cut_tensor, rows=outputs) if self._shard.has_bias(cut) else None
        num_outputs = sum(end - begin for begin, end in spans.values())
        return self.product(torch.empty((num_outputs, inputs[1] - inputs[0]), device="meta"))

    def product(self, table_NK: Tensor) -> Linear:
        self.num_matrix_weights += table_NK.numel()
        self.num_panel_weights += table_NK.numel() if has_panels(*table_NK.shape) else 0
        return PlainLinear(table_NK, None)

    def exact_product(self, table_NK: Tensor) -> Linear:
        return PlainLinear(table_NK, None)

    def check(self, stored: Mapping[str, StoredTensor]) -> None:
        """Raises ModelError on a missing or superfluous tensor, or one of a wrong shape."""
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

    def cut(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """This rank's parts of a checkpoint that passed `check`, in the order of reading."""
        parts: dict[str, StoredTensor] = {}
        for name in self.tensors:
            part = self._parts.get(name, _whole)
            if part is not None:
                parts[name] = part(stored[name])
        return parts

    def _note(self, name: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = PLAIN_DTYPES) -> Tensor:
        if name in self.tensors:
            raise InternalError(f"two parameters are called {name}")
        self.tensors[name] = Need(shapes, dtypes)
        return torch.empty(shapes[0], device="meta")


def _check_groups(module: str, scheme: PackedScheme, num_inputs: int) -> None:
    if num_inputs % (scheme.group or PER_WORD):
        raise ModelError(module, f"{num_inputs} inputs", f"a multiple of {scheme.group or PER_WORD}: whole groups")


def _whole(tensor: StoredTensor) -> StoredTensor:
    return tensor
