"""Generates random weights from config.json alone, so that speed can be measured without a download.

Weights are uniform noise with standard deviation fan-in^-0.5; norms are one. Noise is generated in chunks, seeded by
the parameter's name and the chunk's place, so every worker on the same kind of device has the same weights for any
number of threads. A GPU generates its own weights, because 8e9 of them take a CPU some fifteen seconds.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from pdserve.bounded_file import MAX_JSON_BYTES, read_bytes
from pdserve.core.errors import ModelError
from pdserve.engine.config import ModelConfig
from pdserve.engine.invariant import stable
from pdserve.engine.linear import Linear, Rounding, is_repacked, make_linear, rounding_for, weight_dtype
from pdserve.engine.load_threads import load_threads
from pdserve.engine.parameters import Weights, build_weights
from pdserve.engine.scratch import LoadScratch
from pdserve.engine.sharding import WHOLE, Cut, Shard, Span

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
