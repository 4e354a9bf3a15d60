"""Products by AMX equal those of the rounded numbers, and a row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.cpu.kernels import jit

if not jit.is_available():
    pytest.skip("numba is not installed", allow_module_level=True)

from pdserve.engine.cpu.kernels import amx, amx_gemm

ZERO_POINT = 128
ROWS = (1, 2, 15, 16, 17, 32, 33, 48, 64, 65, 200, 511, 512, 513, 1100)  # parts have 512 rows
SHAPES = [(64, 64, 1), (192, 768, 2), (64, 1088, 1), (128, 2048, 2)]  # outputs, inputs and threads

needs_bfloat16, needs_int8 = (
    pytest.mark.skipif(not amx.is_supported(kind), reason="this CPU has no AMX, or kernels may not use it")
    for kind in ("bfloat16", "int8")
)


@pytest.fixture(params=SHAPES, ids=lambda one: "-".join(map(str, one)))
def shape(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of a matrix that is multiplied by so many threads."""
    num_outputs, num_inputs, num_threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield num_outputs, num_inputs
    torch.set_num_threads(before)


def integers(num_rows: int, num_inputs: int, low: int, high: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows + num_inputs)
    return torch.randint(low, high + 1, (num_rows, num_inputs), generator=generator)


@needs_int8
def test_int8_sums_are_exact(shape: tuple[int, int]) -> None:
    num_outputs, num_inputs = shape
    weight = integers(num_outputs, num_inputs, -127, 127)
    w_scale, x = torch.rand(num_outputs), integers(max(ROWS), num_inputs, 0, 255)
    product = amx_gemm.pack_int8(weight.to(torch.int8), w_scale, ZERO_POINT)
    x_scale = torch.rand(len(x), 1)
    exact = (x - ZERO_POINT).double() @ weight.double().t()
    expected = exact.float() * w_scale * x_scale
    for rows in ROWS:
        assert torch.equal(product(x[:rows].to(torch.uint8), x_scale[:rows]), expected[:rows])


@needs_int8
def test_the_largest_int8_sums_do_not_overflow() -> None:
    weight = torch.full((64, 8192), 127, dtype=torch.int8)
    weight[1::2] = -127
    product = amx_gemm.pack_int8(weight, torch.ones(64), ZERO_POINT)
    x = torch.full((17, 8192), 255, dtype=torch.uint8)
    sums = (255 - ZERO_POINT) * 8192 * weight[:, 0].float()
    assert torch.equal(product(x, torch.ones(17, 1)), sums.expand(17, -1))


@needs_bfloat16
def test_bfloat16_sums_are_those_of_float32(shape: tuple[int, int]) -> None:
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    x = torch.randn(max(ROWS), num_inputs, generator=generator).bfloat16()
    product, exact = amx_gemm.pack_bfloat16(weight), x.double() @ weight.double().t()
    whole = product(x)
    assert whole.dtype == torch.bfloat16
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-5 * num_inputs**0.5)
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


@needs_bfloat16
def test_float32_inputs_are_not_rounded(shape: tuple[int, int]) -> None:
    """A sum of float32 numbers has an error of 2^-24 for each addition, of which few are as large as the sum."""
    num_outputs, num_inputs = shape
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16().float()
    x = torch.randn(max(ROWS), num_inputs, generator=generator)
    x *= 10 ** (torch.rand(len(x), 1, generator=generator) * 20 - 10)
    product, exact = amx_gemm.pack_float32(weight), x.double() @ weight.double().t()
    whole = product(x)
    assert whole.dtype == torch.float32
    size = x.double().abs() @ weight.double().abs().t()
    assert ((whole.double() - exact).abs() <= 2**-22 * size).all()  # a product of rounded inputs would have 2^-10
    for rows in ROWS:
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


@needs_bfloat16
def test_each_bit_of_a_float32_input_counts() -> None:
    x = torch.full((24, 64), 0.0)
    for row in range(24):
        x[row, row] = 1 + 2.0**-row if row else 2.0
    x[5, 5] = 1 + 2**-23
    product = amx_gemm.pack_float32(torch.eye(64))
    assert torch.equal(product(x), x)
    assert torch.equal(product(-x * 2.0**100), -x * 2.0**100)


@needs_bfloat16
def test_a_nan_is_not_taken_for_infinity() -> None:
    x = torch.ones(1, 64)
    x.view(torch.int32)[0, 7] = 0x7F800001  # its first 16 bits are those of infinity
    assert amx_gemm.pack_float32(torch.ones(64, 64))(x).isnan().all()


@needs_bfloat16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_stay_in_their_row(dtype: torch.dtype) -> None:
    weight, x = torch.ones(64, 64, dtype=dtype), torch.ones(20, 64, dtype=dtype)
    x[3, 5], x[18, 0] = torch.nan, torch.inf
    pack = amx_gemm.pack_bfloat16 if dtype == torch.bfloat16 else amx_gemm.pack_float32
    got = pack(weight)(x)
    assert got[3].isnan().all()
    assert got[18].isinf().all()
    assert (got[[row for row in range(20) if row not in (3, 18)]] == 64).all()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(63, 64), (32, 128), (64, 48), (96, 64)])
def test_matrices_that_are_not_whole_tiles_are_left_to_others(num_outputs: int, num_inputs: int) -> None:
    assert not amx_gemm.fits("bfloat16", num_outputs, num_inputs)
    assert not amx_gemm.fits("int8", num_outputs, num_inputs)


@needs_bfloat16
@pytest.mark.parametrize("x", [torch.ones(3, 128).bfloat16(), torch.ones(3, 64), torch.ones(3, 128).double()])
def test_other_inputs_than_the_weights_were_packed_for_are_refused(x: Tensor) -> None:
    """They would be read as other numbers, or beyond their end."""
    with pytest.raises(InternalError, match=r"expected 128 torch\.float32"):
        amx_gemm.pack_float32(torch.ones(128, 128))(x)


def test_int8_needs_whole_tiles_of_64_inputs() -> None:
    assert not amx_gemm.fits("int8", 64, 96)
    assert amx_gemm.fits("bfloat16", 64, 96) == amx.is_supported("bfloat16")
