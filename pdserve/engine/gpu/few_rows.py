"""Which library or kernel computes the products of at most 32 rows, for the switch `products`.

    cublaslt  torch's products by cuBLASLt. `preferred_blas_library` is a field of the process that each product reads
              when it is called (at::Context, read by at::cuda::blas::gemm); it has no effect on queued or captured
              work. cuBLASLt's choice of an algorithm runs on the host alone and its workspace comes from torch's
              allocator, so both may happen during a capture. Other shapes than it supports fall back to cuBLAS.
    split-k   kernels/products.py, with the norm in front and the gate behind
    fastest   the fastest of these and cuBLAS for each shape and number of rows, measured at the start. A method that
              fails, or whose result is not that of cuBLAS, is reported and not used.

Weights that are rounded (fp8) and products of experts keep their own methods.
"""

# Shapes: T rows, K inputs, N outputs.

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

from pdserve.engine.gpu.kernels.products import MOST_ROWS, Gate, Norm, ProductScratch, multiply, product_scratch
from pdserve.engine.model.linear import Addend, LayerAddends, Linear, PlainLinear, Products
from pdserve.engine.model.parameters import MlpWeights, Weights

Method = Literal["cublas", "cublaslt", "split-k"]
Kind = Literal["plain", "normed", "gated"]  # what is in front of a product and behind it
Seconds = Callable[[Callable[[], object]], float]  # that a device takes for what the call launches
Choice = Callable[["Shape"], Method]

_METHODS: Final[tuple[Method, ...]] = get_args(Method)
_BUCKETS: Final = (1, 2, 4, 8, 16, 32)
_MOST_SECONDS: Final = 20.0  # of all measurements, most of them compilation; what is not measured then is by cuBLAS
_REPLAYS: Final = 3
_ROUNDING: Final = 2.0**-5  # of the largest result: bfloat16 rounds inputs, sums and gates to 2^-9 of each

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Of a product, with what is computed in front of it and behind it."""

    kind: Kind
    num_outputs: int
    num_inputs: int
    num_rows: int  # one of the buckets

    def __str__(self) -> str:
        return f"{self.kind} {self.num_rows}x{self.num_inputs} to {self.num_outputs}"


def shape_of(kind: Kind, linear: PlainLinear, num_rows: int) -> Shape:
    num_outputs, num_inputs = linear.weight_NK.shape
    return Shape(kind, num_outputs, num_inputs, next(bucket for bucket in _BUCKETS if bucket >= num_rows))


@final
class FewRows(Products):
    """Products on a GPU: those of few rows with plain weights by the method that `choose` names, all others as without
    this class. With an addend, the norm and the gate are operations of their own."""

    def __init__(self, others: Products, choose: Choice, scratch: ProductScratch) -> None:
        super().__init__(others.ops, others.eps, others.activation)
        self._choose, self._scratch = choose, scratch

    def plain(self, linear: Linear, x_TK: Tensor, addend: Addend | None = None, out_TN: Tensor | None = None) -> Tensor:
        method = self._method("plain", linear, x_TK)
        if method is None:
            return super().plain(linear, x_TK, addend, out_TN)
        if method == "split-k":
            assert isinstance(linear, PlainLinear)
            _, out_TN = multiply(x_TK, linear.weight_NK, linear.bias_N, self._scratch, out_TN=out_TN)
        else:
            with preferred(method):
                out_TN = super().plain(linear, x_TK, None, out_TN)
        if addend is not None:
            addend(x_TK, out_TN)
        return out_TN

    def normed(
        self, linear: Linear, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor, addend: Addend | None = None
    ) -> tuple[Tensor, Tensor]:
        method = self._method("normed", linear, x_TK)
        if addend is not None or method is None:
            return super().normed(linear, x_TK, delta_TK, norm_K, addend)
        return self._after_norm(method, linear, x_TK, delta_TK, norm_K)

    def mlp(
        self,
        gate_up: Linear,
        down: Linear,
        x_TK: Tensor,
        delta_TK: Tensor | None,
        norm_K: Tensor,
        added: LayerAddends,
    ) -> tuple[Tensor, Tensor]:
        if added.gate_up is not None or self._method("gated", gate_up, x_TK) is None:
            return super().mlp(gate_up, down, x_TK, delta_TK, norm_K, added)
        x_TK, gated_TF = self.normed_gate(gate_up, x_TK, delta_TK, norm_K)
        return x_TK, self.plain(down, gated_TF, added.down)

    def normed_gate(
        self, gate_up: Linear, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and activation(gate) * up of the product of its norm, for few rows."""
        method = self._method("gated", gate_up, x_TK)
        assert method is not None
        if method == "split-k":
            return self._after_norm(method, gate_up, x_TK, delta_TK, norm_K, self.activation)
        x_TK, out_TN = self._after_norm(method, gate_up, x_TK, delta_TK, norm_K)
        return x_TK, self.gated(out_TN)

    def _method(self, kind: Kind, linear: Linear, x_TK: Tensor) -> Method | None:
        """None: the product is computed as without this class."""
        if not isinstance(linear, PlainLinear) or len(x_TK) > MOST_ROWS:
            return None
        return self._choose(shape_of(kind, linear, len(x_TK)))

    def _after_norm(
        self, method: Method, linear: Linear, x_TK: Tensor, delta_TK: Tensor | None, norm_K: Tensor, gate: Gate = ""
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(linear, PlainLinear)
        if method == "split-k":
            norm = Norm(delta_TK, norm_K, self.eps)
            return multiply(x_TK, linear.weight_NK, linear.bias_N, self._scratch, norm=norm, gate=gate)
        normed_TK = self.norm(x_TK, delta_TK, norm_K)
        with preferred(method):
            return x_TK, linear(normed_TK)


@contextmanager
def preferred(method: Method) -> Iterator[None]:
    """Products of torch by that library."""
    if method != "cublaslt":
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@dataclass(frozen=True)
class Site:
    """Where a model has products of one shape: those of all its layers, which together exceed the device's cache."""

    kind: Kind
    linears: Sequence[PlainLinear]
    norm_K: Tensor | None = None

    def inputs(self, num_rows: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """x and delta: zeros, or normal numbers."""
        weight_NK = self.linears[0].weight_NK
        size = (2, num_rows, weight_NK.shape[1])
        if seed is None:
            pair = torch.zeros(size, dtype=weight_NK.dtype, device=weight_NK.device)
        else:
            generator = torch.Generator().manual_seed(seed)
            pair = torch.randn(size, generator=generator).to(weight_NK.device, weight_NK.dtype)
        return pair[0], pair[1]

    def launch(self, few_rows: FewRows, x_TK: Tensor, delta_TK: Tensor | None, count: int | None = None) -> Tensor:
        """The last result."""
        for linear in self.linears[:count]:
            if self.norm_K is None:
                out_TN = few_rows.plain(linear, x_TK)
            elif self.kind == "gated":
                _, out_TN = few_rows.normed_gate(linear, x_TK, delta_TK, self.norm_K)
            else:
                _, out_TN = few_rows.normed(linear, x_TK, delta_TK, self.norm_K)
        return out_TN


def sites_of(weights: Weights) -> list[Site]:
    """Equal matrices of all layers form one site."""
    found: dict[Shape, list[PlainLinear]] = {}
    norm_E = weights.norm_E

    def add(kind: Kind, linear: Linear) -> None:
        if isinstance(linear, PlainLinear):
            found.setdefault(shape_of(kind, linear, 1), []).append(linear)

    for layer in weights.layers:
        add("normed", layer.qkv)
        add("plain", layer.o)
        if isinstance(layer.mlp, MlpWeights):
            add("gated", layer.mlp.gate_up)
            add("plain", layer.mlp.down)
    add("plain", weights.head)
    return [Site(shape.kind, linears, None if shape.kind == "plain" else norm_E) for shape, linears in found.items()]


def open_few_rows(
    switch: Literal["cublas", "cublaslt", "fastest", "split-k"],
    others: Products,
    sites: Sequence[Site],
    device: torch.device,
    num_processors: int,
    seconds: Seconds | None = None,
) -> Products:
    """`others` if all products are torch's. Measures and compiles before anything is captured, except products without
    their norm, which only batches with addends use."""
    if switch == "cublas":
        return others
    scratch = product_scratch(num_processors, device)
    if switch == "fastest":
        began_s = time.monotonic()
        chosen = measure(
            others, sites, scratch, seconds or graph_seconds, lambda: time.monotonic() - began_s < _MOST_SECONDS
        )
        told = {str(shape): method for shape, method in chosen.items()}
        took_s = round(time.monotonic() - began_s, 2)
        log.info("products of few rows are chosen", extra={"took_s": took_s, "chosen": told})
        few_rows = FewRows(others, lambda shape: chosen.get(shape, "cublas"), scratch)
    else:
        few_rows = FewRows(others, partial(_always, switch), scratch)
    with torch.inference_mode():
        for site in sites:
            for num_rows in _BUCKETS:
                x_TK, delta_TK = site.inputs(num_rows)
                for delta in (delta_TK, None):  # the first layer's norm has none
                    site.launch(few_rows, x_TK, delta, count=1)
    return few_rows


def _always(method: Method, shape: Shape) -> Method:
    return method


@torch.inference_mode()
def measure(
    others: Products,
    sites: Sequence[Site],
    scratch: ProductScratch,
    seconds: Seconds,
    goes_on: Callable[[], bool],
) -> dict[Shape, Method]:
    """The fastest method of each shape that was measured while it `goes_on`, among those whose result is cuBLAS's."""
    chosen: dict[Shape, Method] = {}
    for num_rows in _BUCKETS:
        for site in sites:
            x_TK, delta_TK = site.inputs(num_rows)
            took_s: dict[Method, float] = {}
            for method in _METHODS:
                if not goes_on():
                    return chosen
                few_rows = FewRows(others, partial(_always, method), scratch)
                try:
                    result = site.launch(few_rows, *site.inputs(num_rows, seed=1), count=1)
                    took_s[method] = seconds(partial(site.launch, few_rows, x_TK, delta_TK))
                except Exception:
                    if method == "cublas":
                        raise
                    log.exception("a method of products fails and is not used", extra={"method": method})
                    continue
                if method == "cublas":
                    expected = result
                elif not agrees(result, expected):
                    shape = shape_of(site.kind, site.linears[0], num_rows)
                    log.error("a product is wrong and not used", extra={"method": method, "shape": str(shape)})
                    del took_s[method]
            chosen[shape_of(site.kind, site.linears[0], num_rows)] = min(took_s, key=took_s.__getitem__)
    return chosen


def agrees(ours_TN: Tensor, theirs_TN: Tensor) -> bool:
    """Whether two methods' results differ by rounding only. Waits for the device."""
    error = (ours_TN.float() - theirs_TN.float()).abs().max()
    return bool(error <= _ROUNDING * theirs_TN.float().abs().max())


def graph_seconds(run: Callable[[], object]) -> float:
    """The least time of a replay of what `run` launches, so that the host's time does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        took_ms = []
        for _ in range(1 + _REPLAYS):  # the first one warms up
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            took_ms.append(begin.elapsed_time(end))
    torch.cuda.current_stream().wait_stream(stream)
    return float(min(took_ms[1:])) / 1e3
