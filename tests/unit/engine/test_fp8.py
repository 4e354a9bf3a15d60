"""fp8 products are close to the exact ones, rows are independent, and odd shapes are not quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.device import choose_precision
from pdserve.engine.load.weights import dummy_weights, load_weights
from pdserve.engine.model.config import read_config
from pdserve.engine.model.forms import make_linear
from pdserve.engine.model.linear import PlainLinear
from pdserve.engine.model.rounded import FP8_MOST, Fp8Linear, round_rows

CPU = torch.device("cpu")
MANTISSA = 2.0**-4  # Half a step of e4m3, relative.


def test_rounding_errs_by_at_most_half_a_step() -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 160) * torch.logspace(-20, 20, 9)[:, None]
    x[4] = 0.0
    rounded, scale = round_rows(x)
    back = rounded.float() * scale
    assert rounded.float().abs().max() <= FP8_MOST
    # Relative to the value or, below the normal numbers, to the step of the smallest ones.
    assert ((back - x).abs() <= MANTISSA * x.abs() + 2.0**-9 * scale).all()
    assert (back[4] == 0).all()


def test_products_are_nearly_exact_in_any_batch() -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(7, 64)
    linear = make_linear(weight.bfloat16(), bias.bfloat16(), "fp8")
    assert isinstance(linear, Fp8Linear)
    out = linear(x.bfloat16())
    assert out.dtype == torch.bfloat16
    exact = x @ weight.T + bias
    # Each of 64 products errs independently, by about a sixteenth of itself.
    assert (out.float() - exact).abs().max() < 6 * 2 * MANTISSA / 3**0.5 * 64**0.5
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), exact.flatten(), dim=0) > 0.998
    assert torch.equal(linear(x[3:4].bfloat16()), out[3:4])


def test_unsupported_shapes_stay_plain() -> None:
    assert isinstance(make_linear(torch.randn(24, 64), None, "fp8"), PlainLinear)
    assert isinstance(make_linear(torch.randn(32, 40), None, "fp8"), PlainLinear)


def test_a_loaded_model_has_fp8_layers_and_a_plain_head(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama")
    config = read_config(folder)
    weights = load_weights(config, open_checkpoint(folder), CPU, torch.bfloat16, rounding="fp8")
    made_up = dummy_weights(config, CPU, torch.bfloat16, rounding="fp8")
    exact = load_weights(config, open_checkpoint(folder), CPU, torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    for one in (weights, made_up):
        assert isinstance(one.head, PlainLinear)
        assert all(isinstance(layer.qkv, Fp8Linear) and isinstance(layer.o, Fp8Linear) for layer in one.layers)
    assert torch.equal(weights.head(x), exact.head(x)), "its memory is its own"
    for mine, theirs in zip(weights.layers, exact.layers, strict=True):
        out, expected = mine.qkv(x).float(), theirs.qkv(x).float()
        assert (out - expected).norm() < 0.05 * expected.norm()


def test_fp8_needs_a_supporting_gpu() -> None:
    with pytest.raises(ConfigError, match="int8 on a CPU"):
        choose_precision("fp8", CPU)
    assert WorkerConfig(model="m", worker_id="w", dtype="fp8").dtype == "fp8"
