"""Products with packed and int8 weights equal plain products."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.cpu.kernels import amx_gemm, packed_gemm
from pdserve.engine.cpu.kernels.instructions import LANES
from pdserve.engine.cpu.kernels.rounding import BFLOAT16_TRIAL
from pdserve.engine.cpu.ops import quantise
from pdserve.engine.model import forms
from pdserve.engine.model.forms import KernelLinear, PackedLinear, fits_bfloat16, make_linear
from pdserve.engine.model.linear import FixedRowsLinear, Linear, Rounding, make_invariant
from pdserve.engine.model.rounded import Int8Linear, weight_levels

SHAPES = [(64, 64), (768, 1280), (70, 129), (2048, 96), (33, 1)]


def tensors(num_inputs: int, num_outputs: int, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(num_inputs + num_outputs)
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    return weight, torch.randn(num_outputs) if has_bias else None


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_packed_equals_plain_for_any_number_of_rows(num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    weight, bias = tensors(num_inputs, num_outputs, has_bias=has_bias)
    packed = make_linear(weight, bias)
    assert packed.form == "float32 packed"
    for rows in (1, 2, 3, 4, 5, 31, 64):
        x = torch.randn(rows, num_inputs)
        torch.testing.assert_close(packed(x), F.linear(x, weight, bias), rtol=0, atol=2e-5)


def is_packed_in_panels(num_inputs: int, num_outputs: int) -> bool:
    """Whether oneDNN stores float32 weights of that shape in panels of 64 outputs. It has smaller ones for AVX2."""
    weight = torch.arange(float(num_outputs))[:, None].repeat(1, num_inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    first = (ctypes.c_float * 64).from_address(torch.ops.mkldnn.data_ptr(packed))
    return list(first) == list(range(64))


WEIGHTS: dict[Rounding, torch.dtype] = {"none": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@pytest.mark.parametrize("rounding", WEIGHTS)
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "num_threads"),
    [(768, 1280, 2), (2048, 128, 1), (704, 256, 2), (320, 64, 1), (96, 192, 2)],
)
def test_few_rows_have_the_same_bits_as_onednn(
    num_inputs: int, num_outputs: int, num_threads: int, rounding: Rounding
) -> None:
    """So a sequence gets the same results alone, in a batch, and in a chunk of its prompt."""
    if not packed_gemm.is_supported(WEIGHTS[rounding]):
        pytest.skip("few rows go through oneDNN on this machine")
    weight, bias = tensors(num_inputs, num_outputs, has_bias=rounding != "bfloat16")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        linear = make_linear(weight, bias, rounding)
        # oneDNN pads int8 inputs to 64. With AMX it may pack or add in another way; the kernel is then not used.
        is_other = torch.cpu._is_amx_tile_supported() or (rounding == "int8" and num_inputs % 64 and LANES == 16)
        if rounding == "none" and not is_packed_in_panels(num_inputs, num_outputs):
            is_other = True
        is_other |= rounding == "int8" and isinstance(linear, KernelLinear)  # with AVX2 alone: for any number of rows
        assert isinstance(linear, PackedLinear | Int8Linear) or is_other
        assert is_other or linear.few_rows is not None
        num_rows = BFLOAT16_TRIAL // num_outputs if rounding == "bfloat16" else 40
        x = torch.randn(num_rows, num_inputs)
        whole = linear(x)  # More rows than the kernel accepts.
        assert torch.equal(torch.cat([linear(part) for part in x.split(32)]), whole)
        for rows in (1, 2, 5, 6, 7, 13, 16, 19, 32):
            assert torch.equal(linear(x[:rows]), whole[:rows])
            assert torch.equal(linear(x[3 : 3 + rows]), whole[3 : 3 + rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(768, 1280), (2112, 128), (320, 64)])
def test_weights_of_a_bfloat16_checkpoint_take_half_of_the_memory_and_give_the_same_bits(
    num_inputs: int, num_outputs: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = tensors(num_inputs, num_outputs, has_bias=True)
    weight = weight.bfloat16().float()
    monkeypatch.setattr(forms, "_has_tiles", lambda *_: False)  # they add in another order
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        if not packed_gemm.is_supported() or not is_packed_in_panels(num_inputs, num_outputs):
            pytest.skip("oneDNN multiplies on this machine")
        linear = make_linear(weight.clone(), bias)
        assert linear.form == "widened"
        assert linear.kernel._kept[0].nbytes == 2 * weight.numel()  # type: ignore[attr-defined]
        monkeypatch.setattr(forms, "fits_bfloat16", lambda _: False)
        wide = make_linear(weight.clone(), bias)
        assert wide.form == "float32 packed"
        for rows in (1, 2, 3, 4, 6, 7, 13, 33, 96, 97, 200):
            x = torch.randn(rows, num_inputs)
            assert torch.equal(linear(x), wide(x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not amx_gemm.fits("float32", 64, 64), reason="this CPU has no AMX, or kernels may not use it")
def test_with_amx_weights_of_a_bfloat16_checkpoint_take_half_of_the_memory() -> None:
    weight, bias = tensors(768, 128, has_bias=True)
    weight = weight.bfloat16().float()
    linear = make_linear(weight.clone(), bias)
    assert linear.form == "float32 tiles"
    assert linear.kernel._packed.nbytes == 2 * weight.numel()  # type: ignore[attr-defined]
    x = torch.randn(40, 768)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=1e-5)


def test_one_weight_that_bfloat16_cannot_hold_keeps_float32() -> None:
    weight = torch.ones(64, 128)
    assert fits_bfloat16(weight)
    assert fits_bfloat16(torch.tensor([[float("inf"), float("nan"), -0.0, 1e-39]]).bfloat16().float())
    weight[63, 127] = 1 + 2**-8
    assert not fits_bfloat16(weight)
    assert torch.equal(make_linear(weight)(torch.eye(128)), weight.t())


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_int8_multiplies_the_rounded_numbers(num_inputs: int, num_outputs: int, has_bias: bool) -> None:
    weight, bias = tensors(num_inputs, num_outputs, has_bias=has_bias)
    linear = make_linear(weight, bias, "int8")
    levels = weight_levels()
    scale_N = weight.abs().amax(1) / levels
    weight_NK = (weight / scale_N[:, None]).round().double() * scale_N[:, None].double()
    for rows in (1, 4, 33):
        x = torch.randn(rows, num_inputs) * 10 ** torch.linspace(-3, 3, rows)[:, None]  # Tokens of all magnitudes.
        x[0, 0] = 0.0
        rounded_TK, scale_T1 = quantise(x)  # The processor decides to which integer a half is rounded.
        x_TK = (rounded_TK.double() - 128) * scale_T1.double()
        assert ((x_TK - x.double()).abs() <= 0.50001 * scale_T1.double()).all()
        torch.testing.assert_close(scale_T1, x.abs().amax(1, keepdim=True) / 127, rtol=1e-6, atol=0)
        expected = F.linear(x_TK, weight_NK, None if bias is None else bias.double())
        tolerance = 1e-5 * (x.abs().amax(1, keepdim=True) * num_inputs**0.5 + 1)
        assert ((linear(x).double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_bfloat16_multiplies_the_rounded_numbers(
    is_packed: bool, num_inputs: int, num_outputs: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_packed:  # As on a CPU without such a product in oneDNN.
        monkeypatch.setattr(forms, "multiplies_bfloat16", lambda: False)
    weight, bias = tensors(num_inputs, num_outputs, has_bias=has_bias)
    linear = make_linear(weight, bias, "bfloat16")
    for rows in (1, 4, 33):
        x = torch.randn(rows, num_inputs)
        product = F.linear(x.bfloat16().double(), weight.bfloat16().double())
        got = linear(x)
        assert got.dtype == torch.bfloat16
        expected, tolerance = product, 1e-5 * num_inputs**0.5
        if bias is not None:  # Added to the rounded product.
            expected, tolerance = product + bias.double(), tolerance + 2**-8 * float(product.abs().max())
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=tolerance)
        assert torch.equal(got, linear(x.bfloat16()))


@pytest.mark.parametrize("num_inputs", [256, 260])
def test_the_largest_int8_sums_do_not_overflow(num_inputs: int) -> None:
    """Without VNNI, products are added in 16 bits."""
    sign = torch.ones(64)
    sign[::2] = -1
    linear = make_linear(sign[:, None].repeat(1, num_inputs), None, "int8")
    for rows in (1, 4, 33, 65, 193):
        x = torch.ones(rows, num_inputs)
        x[1::2] = -1
        torch.testing.assert_close(linear(x), num_inputs * x[:, :1] * sign, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", [64, -64, 127, -128])
def test_weights_that_could_overflow_16_bits_are_left_to_onednn(level: int) -> None:
    """A CPU with VNNI may be told to compile kernels for AVX2; weights then have all 127 levels."""
    rounded = torch.ones(64, 64, dtype=torch.int8)
    rounded[5, 7] = 63 if level > 0 else -63
    assert packed_gemm.fits_int8_panels(rounded) == (LANES == 8 and packed_gemm.is_supported(torch.int8))
    rounded[5, 7] = level
    assert not packed_gemm.fits_int8_panels(rounded)


def test_an_int8_row_does_not_depend_on_its_batch() -> None:
    weight, _ = tensors(768, 512, has_bias=False)
    linear = make_linear(weight, None, "int8")
    x = torch.randn(16, 768)
    company = x.clone()
    company[1:] *= 1000
    torch.testing.assert_close(linear(x)[0], linear(company)[0], rtol=0, atol=0)
    torch.testing.assert_close(linear(x)[:1], linear(x[:1]), rtol=0, atol=1e-6)


def test_a_token_of_zeros_stays_zero() -> None:
    weight, _ = tensors(64, 64, has_bias=False)
    assert not make_linear(weight, None, "int8")(torch.zeros(2, 64)).any()


def test_the_form_follows_the_weight() -> None:
    weight, _ = tensors(64, 64, has_bias=False)
    assert make_linear(weight).form == "float32 packed"
    assert make_linear(weight.bfloat16()).form == "plain"
    assert make_linear(weight.bfloat16(), rounding="int8").form.startswith("int8 ")
    assert make_linear(weight, rounding="bfloat16").form.startswith("bfloat16 ")
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(make_linear(weight.bfloat16())(x), F.linear(x, weight.bfloat16()))


#: With one output, the trial of bfloat16 multiplies half a million rows one by one.
WIDE = [(num_inputs, num_outputs) for num_inputs, num_outputs in SHAPES if num_outputs > 1]


@pytest.mark.parametrize(
    ("rounding", "shapes"),
    [
        ("none", SHAPES),
        ("bfloat16", WIDE),
        pytest.param("bfloat16", SHAPES, marks=pytest.mark.slow),
        ("int8", SHAPES),
    ],
)
def test_packed_and_int8_rows_have_the_same_bits_in_any_number(
    rounding: Rounding, shapes: list[tuple[int, int]]
) -> None:
    """This makes the deterministic mode cheap. On a CPU whose kernels differ, `make_invariant` pads the rows."""
    for num_inputs, num_outputs in shapes:
        weight, bias = tensors(num_inputs, num_outputs, has_bias=True)
        linear = make_invariant(make_linear(weight, bias, rounding=rounding), num_inputs)
        x = torch.randn(300, num_inputs)
        whole = linear(x)
        for rows in (1, 4, 6, 31, 63, 64, 65, 200):
            assert torch.equal(linear(x[11 : 11 + rows]), whole[11 : 11 + rows])


def test_a_batch_dependent_product_gets_a_fixed_size() -> None:
    weight, _ = tensors(96, 32, has_bias=False)

    class Fickle(Linear):
        def product(self, *inputs: Tensor) -> Tensor:
            (x_TK,) = inputs
            return F.linear(x_TK, weight) + x_TK.shape[0] * 1e-3

    linear = make_invariant(Fickle(), 96)
    assert isinstance(linear, FixedRowsLinear)
    x = torch.randn(70, 96)
    assert linear(x).shape == (70, 32)
    torch.testing.assert_close(linear(x), F.linear(x, weight) + 64e-3)
    assert torch.equal(linear(x[:1]), linear(x)[:1])
