"""Fills a model's parameters from a checkpoint: each exactly once, in the compute dtype, packed as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, final

import torch
from torch import Tensor

from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.config import ModelConfig
from pdserve.engine.linear import Linear, PlainLinear, make_linear
from pdserve.engine.parameters import Weights, build_weights
from pdserve.engine.safetensors_file import ITEM_BYTES, Checkpoint, StoredTensor

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"  # old Llama checkpoints store what config.json already says


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    is_int8: bool = False,
) -> Weights:
    """Raises ModelError on a missing, left over or misshapen tensor, before anything is read."""
    stored = dict(checkpoint.tensors)
    for name in checkpoint.tensors:
        is_copy_of_embedding = config.is_tied and name == "lm_head.weight"
        if name.endswith(_IGNORED_SUFFIX) or is_copy_of_embedding:
            del stored[name]
    needs = Needs()
    build_weights(config, needs)
    _check_names(needs.shapes, stored)
    return build_weights(config, CheckpointSource(stored, device, dtype, progress, is_int8=is_int8))


@final
class Needs:
    """A Source that gives nothing: it notes every tensor that is asked for, in order, with its shape."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def vector(self, name: str, size: int) -> Tensor:
        return self._note(name, size)

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        return self._note(name, num_rows, num_columns)

    def matrix(self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False) -> Linear:
        for module, num_outputs in parts.items():
            self._note(f"{module}.weight", num_outputs, num_inputs)
            if has_bias:
                self._note(f"{module}.bias", num_outputs)
        return PlainLinear(torch.empty((sum(parts.values()), num_inputs), device="meta"), None)

    def product(self, table_NK: Tensor) -> Linear:
        return PlainLinear(table_NK, None)

    def _note(self, name: str, *shape: int) -> Tensor:
        if name in self.shapes:
            raise InternalError(f"two parameters are called {name}")
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")


@final
class CheckpointSource:
    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
        *,
        is_int8: bool,
    ) -> None:
        self._stored = stored
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._is_int8 = is_int8
        self._done = 0
        self._total = sum(tensor.num_bytes for tensor in stored.values())

    def vector(self, name: str, size: int) -> Tensor:
        return self._fused({name: size})

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        return self._fused({name: num_rows}, num_columns)

    def matrix(self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False) -> Linear:
        weight_NK = self._fused({f"{module}.weight": size for module, size in parts.items()}, num_inputs)
        bias_N = self._fused({f"{module}.bias": size for module, size in parts.items()}) if has_bias else None
        return make_linear(weight_NK, bias_N, is_int8=self._is_int8)

    def product(self, table_NK: Tensor) -> Linear:
        return make_linear(table_NK, is_int8=self._is_int8)

    def _fused(self, parts: Mapping[str, int], *columns: int) -> Tensor:
        """Tensors above one another, each read straight to its place: no second copy is made."""
        whole = torch.empty((sum(parts.values()), *columns), device=self._device, dtype=self._dtype)
        for name, target in zip(parts, whole.split(list(parts.values())), strict=True):
            stored = self._stored[name]
            target.copy_(_read(stored))
            self._done += stored.num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        return whole


def _check_names(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> None:
    if missing := sorted(shapes.keys() - stored.keys()):
        raise ModelError(missing[0], f"no such tensor ({len(missing)} are missing)", "every parameter of the model")
    if left := sorted(stored.keys() - shapes.keys()):
        raise ModelError(left[0], f"a tensor that nothing uses ({len(left)} such)", "only the model's parameters")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ModelError(name, f"shape {list(stored[name].shape)}", f"{list(shape)}, as config.json says")


def _read(stored: StoredTensor) -> Tensor:
    raw = torch.empty(math.prod(stored.shape) * ITEM_BYTES[stored.dtype], dtype=torch.uint8)
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        if file.readinto(raw.numpy().data) != stored.num_bytes:
            raise ModelError(stored.name, "the end of the file", f"{stored.num_bytes} bytes, as the header promises")
    return raw.view(_DTYPES[stored.dtype]).view(stored.shape)
