"""The two sources of a model's parameters: a checkpoint, and noise, so that speed can be measured without a download.

Of a checkpoint, each tensor is read exactly once, converted to the compute dtype and packed immediately. Both sources
store products in their fastest or, in deterministic mode, their stable form.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from pdserve.bounded_file import MAX_JSON_BYTES, read_bytes
from pdserve.core.errors import ModelError
from pdserve.engine.cpu.kernels.rounding import LEVELS
from pdserve.engine.load.checkpoint import TORCH_DTYPES, Needs, drop_unused, with_own_head
from pdserve.engine.load.checkpoint_files import Checkpoint, StoredTensor, split_experts
from pdserve.engine.load.tensor_reader import LoadScratch, TensorReader, dequantise_groups, load_threads, unpack
from pdserve.engine.model.config import ModelConfig
from pdserve.engine.model.forms import is_repacked, make_linear, rounding_for, store, weight_dtype
from pdserve.engine.model.linear import Linear, Rounding, make_invariant
from pdserve.engine.model.parameters import WHOLE, Cut, Shard, Source, Span, Weights, build_weights
from pdserve.engine.model.quantisation import PackedScheme, Quantisation, Scheme
from pdserve.engine.model.rounded import weight_levels

# --- deterministic mode ---------------------------------------------------------------------------------------
# The bits of a row's result depend only on the row, not on other rows, chunks or the worker. What could break that, and
# what prevents it:
#
#     products    a matrix product may add in another order for another number of rows: `make_invariant` tests it.
#     attention   the paged kernel (cpu/kernels/paged.py) computes every row, and a query in the same way alone and in a
#                 chunk.
#     the rest    works row by row: in cpu/ops.py a row's arithmetic does not depend on the others.

# Shapes: N rows of a matrix, K columns.


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


# --- parameters from a checkpoint -----------------------------------------------------------------------------

# Shapes: N outputs, K inputs; a scale belongs to `block` of them.

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
        return store("int8", (rounded_NK, torch.cat(scales)), torch.cat(biases) if has_bias else None)

    def _int4_matrix(self, parts: Mapping[str, int], scheme: PackedScheme, has_bias: bool) -> Linear:
        """The same for the groups of a 4-bit checkpoint."""
        groups = [unpack(scheme, module, self._read_raw) for module in parts]
        biases = [self._bias(module, size) for module, size in parts.items()] if has_bias else []
        weights = (
            torch.cat([one.rounded_NK for one in groups]),
            torch.cat([one.scale_NG for one in groups]),
            torch.cat([one.zero_NG for one in groups]),
        )
        return store("int4", weights, torch.cat(biases) if has_bias else None)

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
    """Integers that int8 products can multiply unchanged: one scale per output, and no overflow."""
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


# --- parameters from noise ------------------------------------------------------------------------------------
# It is uniform with standard deviation fan-in^-0.5; norms are one. Noise is generated in chunks, seeded by the
# parameter's name and the chunk's place, so every worker on the same kind of device has the same weights for any number
# of threads. A GPU generates its own weights, because 8e9 of them take a CPU some fifteen seconds.

_CHUNK: Final = 2**20  # weights


def dummy_weights(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rounding: Rounding = "none",
    is_deterministic: bool = False,
    num_threads: int = 0,
    shard: Shard = WHOLE,
) -> Weights:
    """`num_threads` 0: as many as torch uses. Ranks hold parts of the weights of one rank alone."""
    source = DummySource(device, dtype, rounding=rounding, shard=shard)
    with load_threads(num_threads) as threads:
        return build_weights(config, stable(source, is_deterministic=is_deterministic, shard=shard), threads)


def dummy_hash(folder: Path, device: torch.device, *choices: str) -> str:
    """Identifies the weights: config.json, and a sample of the noise that this build of torch generates on such a
    device."""
    digest = hashlib.blake2b("\n".join(("dummy", *choices)).encode(), digest_size=16)
    digest.update(read_bytes(folder / "config.json", MAX_JSON_BYTES, "config.json", ModelError))
    sample = torch.empty(4096, device=device)
    _fill_chunk(sample, "sample", 0, 1.0)
    digest.update(sample.cpu().numpy().tobytes())
    return digest.hexdigest()


@final
class DummySource:
    """Gives the same weights to any thread."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, rounding: Rounding, shard: Shard = WHOLE) -> None:
        self._shard = shard
        self._device = device
        self._dtype = dtype
        self._rounding = rounding
        self._matrix_dtype = weight_dtype(dtype, rounding)
        self._is_scratch = device.type == "cpu" and is_repacked(device, dtype, rounding)
        self._scratches = threading.local()

    def vector(self, name: str, size: int) -> Tensor:
        return torch.ones(size, device=self._device, dtype=self._dtype)

    def table(self, name: str, num_rows: int, num_columns: int, *, is_cut: bool = False) -> Tensor:
        table_VE = self._fill(self._empty(num_rows, num_columns), name, num_columns)
        if is_cut and self._shard.size > 1:
            begin, end = self._shard.span(num_rows, num_rows)
            table_VE = table_VE[begin:end].clone()
        return table_VE

    def matrix(
        self, parts: Mapping[str, int], num_inputs: int, *, has_bias: bool = False, cut: Cut | None = None
    ) -> Linear:
        num_outputs = sum(parts.values())
        if self._is_scratch:
            if not hasattr(self._scratches, "one"):
                self._scratches.one = LoadScratch()
            weight_NK = self._scratches.one.take_matrix(num_outputs, num_inputs, self._matrix_dtype)
        else:
            weight_NK = torch.empty((num_outputs, num_inputs), dtype=self._matrix_dtype, device=self._device)
        name = "+".join(parts)
        self._fill(weight_NK, f"{name}.weight", num_inputs)
        bias_N: Tensor | None = None
        if has_bias:
            bias_N = self._fill(self._empty(num_outputs), f"{name}.bias", num_inputs)
        if cut is not None and self._shard.size > 1:
            spans = list(self._shard.outputs(parts, cut).values())
            first, last = self._shard.inputs(num_inputs, cut)
            weight_NK = _rows(weight_NK, list(parts.values()), spans)[:, first:last].contiguous()
            if bias_N is not None:
                bias_N = _rows(bias_N, list(parts.values()), spans) if self._shard.has_bias(cut) else None
        rounding = rounding_for(self._rounding, is_head="lm_head" in parts)
        if self._is_scratch and not is_repacked(self._device, self._dtype, rounding):
            weight_NK = weight_NK.clone()
        return make_linear(weight_NK, bias_N, rounding)

    def product(self, table_NK: Tensor) -> Linear:
        return make_linear(table_NK, None, rounding_for(self._rounding, is_head=True))

    def exact_product(self, table_NK: Tensor) -> Linear:
        return make_linear(table_NK.float())

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, target: Tensor, name: str, fan_in: int) -> Tensor:
        for at, chunk in enumerate(target.view(-1).split(_CHUNK)):
            _fill_chunk(chunk, name, at, fan_in**-0.5)
        return target


def _rows(whole: Tensor, sizes: Sequence[int], spans: Sequence[Span]) -> Tensor:
    """The row range of each of several tensors that are stacked."""
    parts = (part[begin:end] for part, (begin, end) in zip(whole.split(sizes), spans, strict=True))
    return torch.cat(list(parts))


def _fill_chunk(chunk: Tensor, name: str, at: int, spread: float) -> None:
    seed = hashlib.blake2b(f"{name}/{at}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=chunk.device).manual_seed(int.from_bytes(seed, "little") >> 1)
    width = math.sqrt(3.0) * spread  # uniform over +-width has a standard deviation of width / sqrt(3)
    chunk.uniform_(-width, width, generator=generator)
