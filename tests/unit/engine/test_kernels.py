"""The compiled kernels equal torch in float64, and a row's bits do not depend on the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from pdserve.engine.cpu import ops
from pdserve.engine.cpu.kernels import packed_gemm
from pdserve.engine.cpu.kernels.arithmetic import narrow, widen, words
from pdserve.engine.cpu.ops import ROUNDED

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
    torch.set_num_threads(2)  # So that large calls are split.
    yield
    torch.set_num_threads(before)


def test_the_kernels_are_in_use() -> None:
    assert ops.fits(states(2, 64))
    assert not ops.fits(states(2, 64).bfloat16())
    assert not ops.fits(states(4, 64)[:, :32])


@pytest.mark.parametrize("size", [2, 30, 768, 4096])
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_kernels_match_float64(num_rows: int, size: int) -> None:
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


def test_rounding_handles_halves_and_limits() -> None:
    x = torch.tensor([[127.0, -127.0, 0.0, 63.5, 1.5, -2.5], [0.0] * 6])
    rounded, scale = ops.quantise(x)
    assert rounded.tolist() == [[255, 1, 128, 192, 130, 126], [128] * 6]  # Halves are rounded to the even neighbour.
    assert scale[0, 0] == 1.0
    assert scale[1, 0] > 0.0


@pytest.mark.parametrize("name", ["int8", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 300])
def test_rounded_results_match_the_plain_operation(name: str, dtype: torch.dtype, num_rows: int) -> None:
    """Up to one unit of the rounded value, because the two kernels may add in another order."""
    rounded, x, weight = ROUNDED[name], states(num_rows, 768), torch.linspace(-1, 2, 768)
    delta = states(num_rows, 768).flip(0).to(dtype).contiguous()
    total, other = x.clone(), x.clone()
    assert_rounded(rounded.add_rms_norm(total, delta, weight, EPS), ops.add_rms_norm(other, delta, weight, EPS))
    assert torch.equal(total, other)
    assert torch.equal(total, x + delta)
    assert_rounded(rounded.rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS))
    gate_up = x.to(dtype)
    assert_rounded(rounded.silu_mul(gate_up), ops.silu_mul(gate_up.float()))
    assert_rounded(rounded.gelu_mul(gate_up), ops.gelu_mul(gate_up.float()))


def assert_rounded(found: tuple[Tensor, ...], exact: Tensor) -> None:
    if len(found) == 1:
        torch.testing.assert_close(found[0].float(), exact, rtol=2**-8, atol=1e-30)
        return
    values, scale = found
    torch.testing.assert_close(scale, exact.abs().amax(1, keepdim=True) / 127, rtol=1e-5, atol=1e-12)
    assert ((values.float() - 128) * scale - exact).abs().le(0.51 * scale + 1e-12).all()


def test_bfloat16_rounding_matches_torch() -> None:
    """Halves, the edges of the exponents, infinities and NaN, through a kernel that stores what it reads."""
    bits = torch.arange(-(2**31), 2**31, 65_521, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 1, 0x8000, 0x18000])
    x = torch.cat([bits, special.to(torch.int32), special.to(torch.int32) | -(2**31)]).view(torch.float32)
    found = torch.empty(x.shape, dtype=torch.bfloat16)
    copy_narrowed(x.numpy(), words(found))
    expected = x.bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(torch.int16), expected[kept].view(torch.int16))
    back = torch.empty(x.shape)
    copy_widened(words(found), back.numpy())
    assert torch.equal(back[kept], found.float()[kept])
    assert back[~kept].isnan().all()


@njit
def copy_narrowed(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = narrow(source[i])


@njit
def copy_widened(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = widen(source[i])


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_argmax_is_the_first_of_the_largest(size: int) -> None:
    x = torch.randn(40, size).mul(3).round()  # Many are equal.
    x[0] = -torch.inf
    x[1] = -5.0
    x[2, -1] = torch.inf
    assert ops.argmax(x) == x.argmax(dim=-1).tolist()
    x[3, 0] = torch.nan
    assert size == 1 or ops.argmax(x)[3] > 0


# Other threads allocate blocks of the size of the kernel's own memory, and write to them, from the same heap.
ALLOCATING = """
import threading, time, torch
from pdserve.engine.model.forms import make_linear, packed_product
ended = threading.Event()
def allocate():
    while not ended.is_set():
        [b"?" * num_bytes for num_bytes in (8159, 8176, 8192, 8208, 8256) * 50]
linear, x = make_linear(torch.randn(4096, 512)), torch.randn(32, 512)
expected = packed_product(x, linear.packed)
assert linear.few_rows is not None
threads = [threading.Thread(target=allocate) for _ in range(2)]
[thread.start() for thread in threads]
until_s = time.monotonic() + 1.0
equal = []
while time.monotonic() < until_s:
    equal.append(torch.equal(linear(x), expected))
ended.set()
print(all(equal))
"""


@pytest.mark.skipif(not packed_gemm.is_supported(), reason="this CPU has neither AVX-512 nor AVX2")
def test_product_keeps_its_memory_while_others_allocate() -> None:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATING], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
