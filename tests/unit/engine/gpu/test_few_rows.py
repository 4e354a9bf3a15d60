"""The products of few rows, and every switch of the GPU engine: tokens, captures, launches and compiled kernels."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.floor import LLAMA_8B, decode_floor
from pdserve.config import WorkerConfig
from pdserve.engine.gpu import few_rows
from pdserve.engine.gpu.few_rows import FewRows, Shape, Site, measure, open_few_rows, shape_of
from pdserve.engine.gpu.graphs import StaticDecode
from pdserve.engine.gpu.kernels import ops as gpu_ops
from pdserve.engine.gpu.kernels.products import product_scratch
from pdserve.engine.gpu.kernels.switches import gpu_switches
from pdserve.engine.gpu.resample import Resampler
from pdserve.engine.load import build_engine
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.gpu_engine import with_graphs
from pdserve.engine.load.weights import load_weights
from pdserve.engine.model.config import read_config
from pdserve.engine.model.linear import PlainLinear, Products
from tests.gpu.compile_budget import count_compiled
from tests.gpu.strict_capture import strict_capture
from tests.support.slow import slow_except
from tests.unit.engine.gpu.conftest import plain_products
from tests.unit.engine.gpu.test_compile_budget import open_triton, row  # noqa: F401
from tests.unit.engine.gpu.test_graph_engine import requests
from tests.unit.engine.test_addends import TOKENS, logits_of, lora_of, sequence

pytestmark = pytest.mark.gpu_checks

OTHERS = Products(gpu_ops, 1e-5, "silu")
ALL = "merge=fused,pdl=on,products=split-k"
SWITCHES = ["merge=fused", "pdl=on", "products=cublaslt", "products=split-k", "products=fastest", ALL]


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library was set to. torch without CUDA rejects cuBLASLt."""
    told = ["cublas"]

    def library(name: str | None = None) -> str:
        told.extend([name] if name else [])
        return told[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    return told


@pytest.mark.parametrize("name", slow_except(["llama-tied-biased", "gemma2", "qwen3"], "llama-tied-biased"))
@pytest.mark.parametrize("switches", slow_except(SWITCHES, "products=fastest", ALL))
def test_tokens_match_the_eager_engine(
    name: str,
    switches: str,
    make_pair: Callable[..., Any],
    serve: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", switches)
    eager, graph = make_pair(name)
    assert serve(graph, requests(), chunk=8) == serve(eager, requests(), chunk=8)


def find_the_last_method_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """split-k, where nothing is computed."""
    turn = iter(range(10**6))
    monkeypatch.setattr(few_rows, "graph_seconds", lambda run: -float(next(turn)))
    monkeypatch.setattr(few_rows, "agrees", lambda *_: True)


def open_fake(folder: Path, dtype: str = "bfloat16") -> Any:
    config = WorkerConfig(
        model=str(folder), worker_id="w", device="cuda", load="dummy", kv_blocks=64, threads=1, dtype=dtype
    )
    return open_torch_engine(config)


@pytest.mark.parametrize("switches", slow_except(["", *SWITCHES], "", "products=cublaslt", "products=fastest", ALL))
def test_a_capture_launches_only_counted_kernels(
    switches: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, preferred: list[str]
) -> None:
    """Each kernel is counted in benchmarks/gpu/floor.py, and was launched before its capture."""
    monkeypatch.setenv("PDSERVE_GPU", switches)
    monkeypatch.setattr(Resampler, "warm", lambda self: None)
    folder, num_rows = tiny("llama"), 16
    find_the_last_method_fastest(monkeypatch)
    with strict_capture() as captures:
        eager = open_fake(folder)
        with_graphs(eager, num_rows, "w")
    shape = dataclasses.replace(LLAMA_8B, num_layers=2)
    found, products = gpu_switches(), gpu_switches().products
    is_fused = products in ("split-k", "fastest")
    counted = decode_floor(shape, 1, 64, is_merged=found.merge == "fused", is_fused=is_fused).num_kernels
    assert captures.num_graphs == 5
    assert len(captures.launched) == 5 * counted, Counter(captures.launched)
    assert captures.launched.count("_product") == (5 * 9 if is_fused else 0)
    assert captures.launched.count("_merge") == (0 if found.merge == "fused" else 5 * 2)
    assert ("cublaslt" in preferred) == (products in ("cublaslt", "fastest"))
    assert preferred[-1] == "cublas"


def test_rounded_products_keep_their_method(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With fp8 weights only the head is a plain product."""
    monkeypatch.setenv("PDSERVE_GPU", "products=split-k")
    monkeypatch.setattr(Resampler, "warm", lambda self: None)
    with strict_capture() as captures:
        eager = open_fake(tiny("llama"), "fp8")
        with_graphs(eager, 1, "w")
    assert captures.launched.count("_product") == 1
    assert any("scaled_mm" in one for one in captures.launched)


@pytest.mark.parametrize("switches", [ALL, "products=fastest"])
def test_random_steps_compile_nothing(
    switches: str,
    open_triton: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", switches)
    find_the_last_method_fastest(monkeypatch)
    rng = random.Random(5)
    with count_compiled() as compiled, plain_products():
        engine = open_triton("llama")
        build_engine.warmed(engine)
        warmed = compiled.variants()
        assert warmed["_product"] >= 8
        for num_rows in (1, 2, 5, 20, 31, 40):
            blocks = iter(range(engine.spec.num_blocks))
            engine.follow([row(rng, blocks, 100) for _ in range(num_rows)])
            assert compiled.variants() == warmed
        with torch.inference_mode():
            decode = StaticDecode(
                engine.model,
                engine.pool,
                most_rows=32,
                max_context_tokens=1024,
                vocab_size=engine.spec.vocab_size,
                num_processors=132,
            )
            for bucket in (1, 8, 32):
                decode.run(bucket)
        assert compiled.variants()["_product"] == warmed["_product"]


@pytest.mark.parametrize("method", ["cublas", "cublaslt", "split-k"])
def test_products_of_few_rows_take_addends(method: Any, tiny: Callable[[str], Path], preferred: list[str]) -> None:
    """Norm and gate are then operations of their own."""
    folder = tiny("llama-tied-biased")
    config = read_config(folder)
    with plain_products():
        weights = load_weights(config, open_checkpoint(folder), torch.device("cpu"), torch.float32)
    scratch = product_scratch(2, torch.device("cpu"))
    rows = [sequence(index) for index in range(len(TOKENS))]
    without = logits_of(config, weights, rows, None)
    for projection in ("q", "gate", "down", "head", "all"):
        lora = lora_of(config, projection, torch.float32)
        expected = logits_of(config, weights, rows, lora)
        got = logits_of(config, weights, rows, lora, lambda own: FewRows(own, lambda _: method, scratch))
        assert (got - expected).norm() < 1e-4 * (expected - without).norm()
    assert ("cublaslt" in preferred) == (method == "cublaslt")


def test_wrong_and_failing_methods_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are reported."""
    multiply = few_rows.multiply

    def doubled(*args: Any, **kwargs: Any) -> Any:
        x, out = multiply(*args, **kwargs)
        return x, 2 * out

    def chosen() -> Any:
        seconds = iter([2.0, 3.0, 1.0])
        scratch = product_scratch(2, torch.device("cpu"))
        goes_on = iter([True] * 3 + [False]).__next__
        return list(measure(OTHERS, [site("normed", 64, 32)], scratch, lambda run: next(seconds), goes_on).values())

    assert chosen() == ["split-k"]
    monkeypatch.setattr(few_rows, "multiply", doubled)
    assert chosen() == ["cublas"]
    assert caplog.messages == ["a product is wrong and not used"]
    monkeypatch.setattr(few_rows, "multiply", lambda *_, **__: 1 // 0)
    assert chosen() == ["cublas"]
    assert caplog.messages[1:] == ["a method of products fails and is not used"]


def site(kind: Any, num_outputs: int, num_inputs: int) -> Site:
    norm = None if kind == "plain" else torch.ones(num_inputs)
    weight = torch.randn((num_outputs, num_inputs), generator=torch.Generator().manual_seed(3))
    return Site(kind, [PlainLinear(weight, None)], norm)


def test_the_fastest_method_of_each_shape_is_chosen() -> None:
    """The measured calls are those of the method; shapes without a measurement are computed by cuBLAS."""
    scratch, sites = product_scratch(2, torch.device("cpu")), [site("plain", 64, 32), site("gated", 64, 32)]
    seconds = iter([3.0, 1.0, 2.0, 3.0, 2.0, 1.0, 1.0, 2.0, 2.0])
    chosen = measure(OTHERS, sites, scratch, lambda run: next(seconds), iter([True] * 9 + [False] * 9).__next__)
    assert chosen == {
        Shape("plain", 64, 32, 1): "cublaslt",
        Shape("gated", 64, 32, 1): "split-k",
        Shape("plain", 64, 32, 2): "cublas",
    }


def test_rows_belong_to_the_next_bucket() -> None:
    linear = PlainLinear(torch.ones(4, 8), None)
    assert [shape_of("plain", linear, count).num_rows for count in (1, 3, 9, 17, 32)] == [1, 4, 16, 32, 32]


def test_the_library_is_restored_after_an_error(preferred: list[str]) -> None:
    rows = FewRows(OTHERS, lambda shape: "cublaslt", product_scratch(2, torch.device("cpu")))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rows.plain(PlainLinear(torch.ones(4, 8), None), torch.ones(2, 9))
    assert preferred == ["cublas", "cublaslt", "cublas"]


def test_the_default_leaves_products_to_torch() -> None:
    assert open_few_rows("cublas", OTHERS, [], torch.device("cpu"), 4) is OTHERS
