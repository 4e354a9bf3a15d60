"""Fills a model's parameters from a checkpoint: each exactly once, in the compute dtype, packed immediately."""

# Shapes: N outputs, K inputs; a scale belongs to `block` of them.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from pdserve.core.errors import ModelError
from pdserve.engine.checkpoint_spec import Needs
from pdserve.engine.config import ModelConfig
from pdserve.engine.fused_experts import split_experts
from pdserve.engine.int4 import Int4Linear
from pdserve.engine.invariant import stable
from pdserve.engine.linear import (
    Int8Linear,
    Linear,
    Rounding,
    is_repacked,
    make_linear,
    rounding_for,
    weight_dtype,
    weight_levels,
)
from pdserve.engine.load_threads import load_threads
from pdserve.engine.open_model import TORCH_DTYPES, drop_unused, with_own_head
from pdserve.engine.packed_scheme import PackedScheme
from pdserve.engine.parameters import Weights, build_weights
from pdserve.engine.quantisation_config import Quantisation, Scheme
from pdserve.engine.rounding import LEVELS
from pdserve.engine.safetensors_file import Checkpoint, StoredTensor
from pdserve.engine.scratch import LoadScratch
from pdserve.engine.sharding import WHOLE, Cut, Shard
from pdserve.engine.tensor_reader import TensorReader
from pdserve.engine.unpack import dequantise_groups, unpack

LoadProgress = Callable[[int, int], None]  # bytes read, bytes in all


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: LoadProgress | None = None,
    *,
    rounding: Rounding = "none",
    is_deterministic: bool = False,
    shard: Shard = WHOLE,
) -> Weights:
    """Loads a rank's part of the checkpoint. Raises ModelError on a missing, superfluous or misshapen tensor, before
    reading weights."""
    config = with_own_head(config, checkpoint)
    stored = split_experts(config, checkpoint.tensors)
    needs = Needs(config.quantisation, shard)
    build_weights(config, needs)
    stored = drop_unused(config, stored, needs.tensors)
    needs.check(stored)
    parts = needs.cut(stored)
    with TensorReader(list(parts.values())) as reader, load_threads() as threads:
        source = CheckpointSource(
            parts, reader, config.quantisation, device, dtype, progress, rounding=rounding, shard=shard
        )
        return build_weights(config, stable(source, is_deterministic=is_deterministic, shard=shard), threads)


@final
class _Scratches(threading.local):
    """Of the calling thread."""

    def __init__(self) -> None:
        self.raw, self.wide, self.scale = LoadScratch(), LoadScratch(), LoadScratch()


@final
class CheckpointSource:
    """A thread-safe source of parameters from files."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        reader: TensorReader,
        quantisation: Quantisation,
        device: torch.device,
        dtype: torch.dtype,
        progress: LoadProgress | None,
        *,
        rounding: Rounding,
        shard: Shard = WHOLE,
    ) -> None:
        self._shard = shard
        self._stored = stored
        self._reader = reader
        self._quantisation = quantisation
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._rounding = rounding_beside(quantisation, rounding)
        self._keeps_groups = rounding == "int4"
        self._scratches = _Scratches()
        self._counting = threading.Lock()
        self._num_read_bytes = 0
        self._num_bytes = sum(tensor.num_bytes for tensor in stored.values())

    def vector(self, name: str, size: int) -> Tensor:
        return self._read_into(name, torch.empty(size, device=self._device, dtype=self._dtype))

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        """In the narrower of the stored and the compute dtype: a row can be widened when it is looked up."""
        stored = TORCH_DTYPES[self._stored[name].dtype]
        dtype = stored if stored.itemsize < self._dtype.itemsize else self._dtype
        if is_cut:
            begin, end = self._shard.span(num_rows, num_rows)
            num_rows = end - begin
        return self._read_into(name, torch.empty((num_rows, num_columns), device=self._device, dtype=dtype))

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        parts = {module: end - begin for module, (begin, end) in self._shard.outputs(parts, cut).items()}
        first, last = self._shard.inputs(num_inputs, cut)
        num_inputs, has_bias = last - first, has_bias and self._shard.has_bias(cut)
        schemes = {module: self._quantisation.scheme(module) for module in parts}
        if self._rounding == "int8" and all(_is_kept(scheme) for scheme in schemes.values()):
            return self._kept_matrix(parts, schemes, num_inputs, has_bias)
        scheme = next(iter(schemes.values()))
        if self._keeps_groups and isinstance(scheme, PackedScheme) and set(schemes.values()) == {scheme}:
            return self._int4_matrix(parts, scheme, has_bias)
        rounding = rounding_for(self._rounding, is_head="lm_head" in parts)
        weight_NK = self._place(sum(parts.values()), num_inputs, rounding)
        biases = []
        for (module, scheme), part_NK in zip(schemes.items(), weight_NK.split(list(parts.values())), strict=True):
            if scheme is None:
                self._read_into(f"{module}.weight", part_NK)
            elif isinstance(scheme, PackedScheme):
                dequantise_groups(unpack(scheme, module, self._read_raw), part_NK)
            else:
                stored_NK = self._read_raw(f"{module}.weight").to(self._device)
                dequantise(stored_NK, self._read_scale(f"{module}.{scheme.scale_name}"), scheme, part_NK)
            if has_bias:
                biases.append(self._bias(module, part_NK.shape[0]))
        return make_linear(weight_NK.to(self._device), torch.cat(biases) if has_bias else None, rounding)

    def product(self, table_NK: Tensor) -> Linear:
        rounding = rounding_for(self._rounding, is_head=True)
        if table_NK.dtype != weight_dtype(self._dtype, rounding):
            table_NK = self._place(table_NK.shape[0], table_NK.shape[1], rounding).copy_(table_NK)
        return make_linear(table_NK.to(self._device), None, rounding)

    def exact_product(self, table_NK: Tensor) -> Linear:
        return make_linear(table_NK.float())

    def _kept_matrix(
        self,
        parts: Mapping[str, int],
        schemes: Mapping[str, Scheme | PackedScheme | None],
        num_inputs: int,
        has_bias: bool,
    ) -> Linear:
        """The checkpoint's own integers and scales: rounding again would lose precision."""
        rounded_NK = self._scratches.wide.take_matrix(sum(parts.values()), num_inputs, torch.int8)
        scales, biases = [], []
        for (module, scheme), part_NK in zip(schemes.items(), rounded_NK.split(list(parts.values())), strict=True):
            assert isinstance(scheme, Scheme)
            self._read_into(f"{module}.weight", part_NK)
            scale = self._read_scale(f"{module}.{scheme.scale_name}")
            scales.append(scale.flatten().expand(part_NK.shape[0]))
            if has_bias:
                biases.append(self._bias(module, part_NK.shape[0]))
        return Int8Linear(rounded_NK, torch.cat(scales), torch.cat(biases) if has_bias else None)

    def _int4_matrix(self, parts: Mapping[str, int], scheme: PackedScheme, has_bias: bool) -> Linear:
        """The same for the groups of a 4-bit checkpoint."""
        groups = [unpack(scheme, module, self._read_raw) for module in parts]
        biases = [self._bias(module, size) for module, size in parts.items()] if has_bias else []
        return Int4Linear(
            torch.cat([one.rounded_NK for one in groups]),
            torch.cat([one.scale_NG for one in groups]),
            torch.cat([one.zero_NG for one in groups]),
            torch.cat(biases) if has_bias else None,
        )

    def _place(self, num_rows: int, num_columns: int, rounding: Rounding) -> Tensor:
        """The place of a matrix before `make_linear`: new memory if that is its final form, otherwise
        scratch."""
        dtype = weight_dtype(self._dtype, rounding)
        if is_repacked(self._device, self._dtype, rounding):
            return self._scratches.wide.take_matrix(num_rows, num_columns, dtype)
        return torch.empty((num_rows, num_columns), device=self._device, dtype=dtype)

    def _bias(self, module: str, size: int) -> Tensor:
        return self.vector(f"{module}.bias", size)

    def _read_scale(self, name: str) -> Tensor:
        scale = self._read_raw(name, self._scratches.scale).float().to(self._device, copy=True)
        check_scale(name, scale)
        return scale

    def _read_into(self, name: str, target: Tensor) -> Tensor:
        """Reads directly to its place if the stored form is final, otherwise through the scratch memory."""
        if target.dtype != TORCH_DTYPES[self._stored[name].dtype] or target.device.type != "cpu":
            return target.copy_(self._read_raw(name))
        self._read(name, target)
        return target

    def _read_raw(self, name: str, scratch: LoadScratch | None = None) -> Tensor:
        """As stored; overwritten by the next tensor that is read into the same scratch."""
        stored = self._stored[name]
        raw = (scratch or self._scratches.raw).take(stored.num_bytes)
        self._read(name, raw)
        return raw.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)

    def _read(self, name: str, target: Tensor) -> None:
        stored = self._stored[name]
        self._reader.read(stored, target.view(-1).view(torch.uint8).numpy().data)
        with self._counting:
            self._num_read_bytes += stored.num_bytes
            if self._progress is not None:
                self._progress(self._num_read_bytes, self._num_bytes)


def rounding_beside(quantisation: Quantisation, rounding: Rounding) -> Rounding:
    """Of the matrices that a checkpoint does not store in 4 bits, if `rounding` keeps those that it does: int8, because
    the checkpoint's author found 4 bits too few for them."""
    return "int8" if rounding == "int4" and quantisation.is_4_bit else rounding


def _is_kept(scheme: Scheme | PackedScheme | None) -> bool:
    """Integers that Int8Linear can multiply unchanged: one scale per output, and no overflow."""
    return (
        isinstance(scheme, Scheme) and scheme.stored == "I8" and scheme.block[1] is None and weight_levels() == LEVELS
    )


def check_scale(name: str, scale: Tensor) -> None:
    """Raises ModelError on an impossible scale."""
    wrong = ~(torch.isfinite(scale) & (scale > 0))
    if wrong.any():
        raise ModelError(name, f"a scale of {scale[wrong].flatten()[0].item():g}", "positive finite numbers")


def dequantise(stored_NK: Tensor, scale: Tensor, scheme: Scheme, out_NK: Tensor) -> None:
    """float32 products, rounded once to `out_NK`'s dtype. `scale` is float32 in any shape that the scheme allows."""
    num_outputs, num_inputs = stored_NK.shape
    scale = scale.view(scheme.scale_counts(num_outputs, num_inputs))
    num_rows, num_columns = scheme.block
    if num_columns is not None:
        scale = scale.repeat_interleave(num_columns, dim=1)[:, :num_inputs]
    num_rows = num_outputs if num_rows is None else num_rows
    out_NK.copy_(stored_NK)  # exact: bfloat16 represents every stored value
    if num_rows == 1 or scale.shape[0] == 1:
        out_NK.mul_(scale)
        return
    for index, part_NK in enumerate(out_NK.split(num_rows)):
        part_NK.mul_(scale[index])
