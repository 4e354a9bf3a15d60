"""Checks of products.py: against float64; each row alone gives the same bits as among others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.gpu.kernels.norms import add_rms_norm, silu_mul
from pdserve.engine.gpu.kernels.products import Gate, Norm, multiply, product_scratch
from tests.gpu.cases import BOUNDS, Case, Launch, draw, worst

_EPS = 1e-5


@dataclass(frozen=True)
class Setup:
    num_rows: int = 3
    num_inputs: int = 200
    num_outputs: int = 150
    dtype: torch.dtype = torch.float32
    processors: int = 3
    is_normed: bool = False
    has_delta: bool = False
    has_bias: bool = False
    gate: Gate = ""

    def name(self) -> str:
        changed = {key: value for key, value in vars(self).items() if value != getattr(Setup(), key)}
        told = " ".join(f"{key}={value}" for key, value in changed.items()) or "plain"
        return f"product {told}".replace("torch.", "")


def reference(x: Tensor, delta: Tensor | None, norm: Tensor | None, weight: Tensor, bias: Tensor | None, gate: Gate):  # type: ignore[no-untyped-def]
    """x + delta in its dtype, and the product in float64."""
    total = x if delta is None else x + delta
    inputs = total.double() if norm is None else F.rms_norm(total.double(), (x.shape[1],), norm.double(), _EPS)
    out = F.linear(inputs, weight.double(), None if bias is None else bias.double())
    if gate:
        gates, ups = out.chunk(2, dim=-1)
        out = (F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")) * ups
    return total, out


def case(setup: Setup) -> Case:
    def check(device: torch.device) -> float:
        dtype, size = setup.dtype, (setup.num_rows, setup.num_inputs)
        wide = draw((setup.num_rows, setup.num_inputs + 8), dtype)  # rows are apart
        x, delta = wide[:, : setup.num_inputs], draw(size, dtype, 1) if setup.has_delta else None
        norm = draw((setup.num_inputs,), torch.float32, 2) if setup.is_normed else None
        weight = draw((setup.num_outputs, setup.num_inputs), dtype, 3, size=setup.num_inputs**-0.5)
        bias = draw((setup.num_outputs,), dtype, 4) if setup.has_bias else None
        total, expected = reference(x, delta, norm, weight, bias, setup.gate)
        scratch = product_scratch(setup.processors, device)
        scratch.parts.fill_(torch.nan)
        scratch.squares.fill_(torch.nan)
        x, delta, norm, weight, bias = (
            None if one is None else one.to(device) for one in (wide, delta, norm, weight, bias)
        )

        def run(rows: slice) -> tuple[Tensor, Tensor]:
            told = None if norm is None else Norm(None if delta is None else delta[rows], norm, _EPS)
            x_TK = x[rows, : setup.num_inputs]
            kept, out = multiply(x_TK, weight, bias, scratch, norm=told, gate=setup.gate)
            return kept.cpu(), out.cpu()

        kept, out = run(slice(None))
        again = run(slice(None))[1]
        is_kept = torch.equal(kept, total) and torch.equal(x.cpu(), wide)
        if not is_kept or bool(scratch.counts.any()) or not torch.equal(out, again):
            return float("inf")
        if device.type == "cuda":  # the interpreter's products by numpy depend on the number of rows
            alone = torch.cat([run(slice(row, row + 1))[1] for row in range(setup.num_rows)])
            if not torch.equal(out, alone):
                return float("inf")
        return worst(out, expected)

    # A product's inputs are rounded to its dtype twice: the sum, and its product with the norm's weight.
    return Case(setup.name(), check, (2 if setup.is_normed else 1) * BOUNDS.get(setup.dtype, 2.0**-11))


_NORMED = Setup(is_normed=True, has_delta=True)
CASES = [
    case(setup)
    for setup in (
        Setup(),
        Setup(processors=40, has_bias=True),
        Setup(processors=1, num_outputs=64),
        Setup(num_rows=1, num_inputs=2000, num_outputs=40, processors=9, dtype=torch.bfloat16),
        Setup(num_rows=17, dtype=torch.bfloat16),
        Setup(num_rows=32, dtype=torch.float16, num_inputs=640),
        replace(_NORMED, has_delta=False),
        _NORMED,
        replace(_NORMED, num_inputs=1100, num_outputs=70, processors=5, has_bias=True),
        replace(_NORMED, num_inputs=1100, num_rows=20, processors=2, dtype=torch.bfloat16),
        replace(_NORMED, num_inputs=700, processors=5, gate="silu"),
        replace(
            _NORMED,
            num_rows=16,
            num_inputs=700,
            num_outputs=260,
            gate="gelu_pytorch_tanh",
            has_bias=True,
            dtype=torch.bfloat16,
        ),
        Setup(gate="silu", num_outputs=140, processors=1),
    )
]


def _launch(name: str, num_rows: int, num_outputs: int, num_inputs: int, kind: str = "") -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        made = {"dtype": torch.bfloat16, "device": device}
        # More weights than the L2 cache holds, as in a step, where each product has its own.
        count = max(1, -(-(200 << 20) // (2 * num_outputs * num_inputs)))
        weights = [torch.ones(num_outputs, num_inputs, **made) for _ in range(count)]
        x, delta = (torch.ones(num_rows, num_inputs, **made) for _ in range(2))
        norm_K = torch.ones(num_inputs, **made)
        scratch, turn = product_scratch(132, device), iter(range(1 << 30))
        norm = Norm(delta, norm_K, _EPS) if kind else None
        gate: Gate = "silu" if kind == "gated" else ""

        def ours() -> object:
            return multiply(x, weights[next(turn) % count], None, scratch, norm=norm, gate=gate)

        def torchs() -> object:
            inputs = add_rms_norm(x, delta, norm_K, _EPS) if kind else x
            out = F.linear(inputs, weights[next(turn) % count])
            return silu_mul(out) if kind == "gated" else out

        return ours, torchs

    told = f"product {name}{' ' * bool(kind)}{kind} {num_rows}x{num_inputs} to {num_outputs}"
    return Launch(told, make, 2 * num_outputs * num_inputs)


LAUNCHES = [
    launch
    for num_rows in (1, 16, 32)
    for launch in (
        _launch("qkv", num_rows, 6144, 4096, "normed"),
        _launch("o", num_rows, 4096, 4096),
        _launch("gate, up", num_rows, 28_672, 4096, "gated"),
        _launch("down", num_rows, 4096, 14_336),
        _launch("head", num_rows, 128_256, 4096),
    )
]
