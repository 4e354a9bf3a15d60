"""The compiled kernels equal torch in float64, and a row's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine import ops

EPS = 1e-6
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.linspace(-1, 2, x.shape[1]), EPS),
    "add_rms_norm": lambda x: ops.add_rms_norm(x.clone(), x.flip(1).contiguous(), torch.ones(x.shape[1]), EPS),
    "silu_mul": ops.silu_mul,
    "gelu_mul": ops.gelu_mul,
    "quantise": lambda x: ops.quantise(x)[0],
}


def states(num_rows: int, size: int) -> Tensor:
    torch.manual_seed(num_rows * size)
    return torch.randn(num_rows, size) * 10 ** torch.linspace(-4, 1.5, num_rows)[:, None]


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # so that large calls are split
    yield
    torch.set_num_threads(before)


def test_the_kernels_are_in_use() -> None:
    assert ops.fits(states(2, 64))
    assert not ops.fits(states(2, 64).bfloat16())
    assert not ops.fits(states(4, 64)[:, :32])


@pytest.mark.parametrize("size", [2, 30, 768, 4096])
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_kernels_give_what_float64_gives(num_rows: int, size: int) -> None:
    x, delta, weight = states(num_rows, size), states(num_rows, size).flip(0).contiguous(), torch.randn(size)
    wide = x.double()
    torch.testing.assert_close(
        ops.rms_norm(x, weight, EPS), F.rms_norm(wide, (size,), weight.double(), EPS).float(), rtol=2e-6, atol=1e-7
    )
    total = x.clone()
    normed = ops.add_rms_norm(total, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(
        normed, F.rms_norm(total.double(), (size,), weight.double(), EPS).float(), rtol=2e-6, atol=1e-7
    )
    gate, up = wide.chunk(2, dim=1)
    torch.testing.assert_close(ops.silu_mul(x), (F.silu(gate) * up).float(), rtol=2e-6, atol=1e-30)
    exact = gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up
    torch.testing.assert_close(ops.gelu_mul(x), exact.float(), rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(ops.gelu_mul(x), (F.gelu(gate, approximate="tanh") * up).float(), rtol=5e-6, atol=1e-6)


def test_large_gates_close_and_open_without_overflow() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert ops.silu_mul(gate_up).isfinite().all()
    torch.testing.assert_close(ops.silu_mul(gate_up)[0, 2:], torch.tensor([0.0, 90.0, 1e4]))
    torch.testing.assert_close(ops.gelu_mul(gate_up)[0], torch.tensor([0.0, 0.0, 0.0, 90.0, 1e4]))


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    x = states(400, 1024)
    together = KERNELS[name](x)
    for first, end in ((0, 1), (7, 8), (100, 131), (399, 400)):
        assert torch.equal(KERNELS[name](x[first:end].clone()), together[first:end])


def test_rounding_meets_the_halves_and_the_ends() -> None:
    x = torch.tensor([[127.0, -127.0, 0.0, 63.5, 1.5, -2.5], [0.0] * 6])
    rounded, scale = ops.quantise(x)
    assert rounded.tolist() == [[255, 1, 128, 192, 130, 126], [128] * 6]  # halves go to the even neighbour
    assert scale[0, 0] == 1.0
    assert scale[1, 0] > 0.0
