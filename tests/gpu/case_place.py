"""Checks of place (kv.py). int8 and fp8 blocks must equal pool.quantise of the same keys, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.gpu.kernels.kv import NOWHERE, make_table, place
from pdserve.engine.memory.pool import BlockShape, TorchPool, quantise
from pdserve.engine.model.attention import inverse_frequencies
from pdserve.engine.model.config import RopeConfig
from tests.gpu.cases import BOUNDS, Case, Launch, draw, worst

_EPS = 1e-6
_LAYER = 1


@dataclass(frozen=True)
class Setup:
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    has_norm: bool = False
    heads_first: bool = False  # in a block

    def name(self) -> str:
        changed = {key: value for key, value in vars(self).items() if value != getattr(Setup(), key)}
        return "place " + (" ".join(f"{key}={value}" for key, value in changed.items()) or "plain").replace(
            "torch.", ""
        )


def _pool(
    setup: Setup, dtype: torch.dtype, device: torch.device, num_blocks: int = 4, num_layers: int = 2
) -> TorchPool:
    shape = BlockShape(
        num_layers=num_layers,
        block_size=setup.page,
        num_kv_heads=setup.num_kv_heads,
        head_dim=setup.head_dim,
        dtype=dtype,
        heads_first=setup.heads_first,
    )
    return TorchPool(num_blocks=num_blocks, shape=shape, device=device)


def _rotated(x_TND: Tensor, table_TD: Tensor, norm_D: Tensor | None) -> Tensor:
    x_TND = x_TND.double()
    if norm_D is not None:
        x_TND = F.rms_norm(x_TND, norm_D.shape, norm_D.double(), _EPS)
    (low, high), (cos, sin) = x_TND.chunk(2, -1), table_TD.double()[:, None].chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def case(setup: Setup) -> Case:
    def check(device: torch.device) -> float:
        num_heads, num_kv_heads, head_dim = setup.num_heads, setup.num_kv_heads, setup.head_dim
        position_T = torch.tensor([0, 5, 77, 3, 127])
        slot_T = torch.tensor([2 * setup.page + 3, 0, NOWHERE, 4 * setup.page - 1, setup.page])
        num_tokens = len(slot_T)
        qkv_TND = draw((num_tokens, num_heads + 2 * num_kv_heads, head_dim), setup.dtype, size=3.0)
        qkv_TND[1, num_heads] = 0.0  # a key of zeros: its scale is 0
        if setup.kv_dtype is not None:
            qkv_TND[4, -1, 3], qkv_TND[0, -1, 2] = torch.nan, torch.inf  # NaN and infinity must appear in the scales
        norms = [draw((head_dim,), setup.dtype, seed) for seed in (8, 9)] if setup.has_norm else [None, None]
        rope = RopeConfig(kind="default", theta=10_000.0)
        table_PD = make_table(inverse_frequencies(rope, head_dim), 1.0, 128, setup.dtype)

        def run(pool: TorchPool) -> Tensor:
            return place(
                pool,
                _LAYER,
                qkv_TND.to(device),
                slot_T.to(device),
                position_T.to(device),
                table_PD.to(device),
                num_heads=num_heads,
                q_norm_D=None if norms[0] is None else norms[0].to(device),
                k_norm_D=None if norms[1] is None else norms[1].to(device),
                eps=_EPS,
            )

        plain = _pool(setup, setup.dtype, device)
        plain.raw.fill_(7)  # places of no token are unchanged
        q_THD = run(plain)
        expected = _pool(setup, setup.dtype, torch.device("cpu"))
        expected.raw.fill_(7)
        q, k, v = qkv_TND.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        table_TD = table_PD[position_T]
        stored = slot_T != NOWHERE
        block, offset = slot_T[stored] // setup.page, slot_T[stored] % setup.page
        rotated = _rotated(k, table_TD, norms[1])[stored].to(setup.dtype)
        expected.write(_LAYER, rotated, v[stored], block, offset)
        is_broken = ~expected.tensor.isfinite()
        if not torch.equal(plain.tensor.cpu().isfinite(), ~is_broken):
            return float("inf")
        error = worst(plain.tensor.cpu().masked_fill(is_broken, 0), expected.tensor.masked_fill(is_broken, 0))
        error = max(error, worst(q_THD, _rotated(q, table_TD, norms[0])))
        if setup.kv_dtype is None:
            return error
        scaled = _pool(setup, setup.kv_dtype, device)
        scaled.raw.fill_(7)
        again = run(scaled)
        if not torch.equal(again, q_THD) or scaled.scales is None:
            return float("inf")
        after = _pool(setup, setup.kv_dtype, torch.device("cpu"))
        after.raw.fill_(7)
        # The expected bits are computed from the keys that the same kernel stored without rounding.
        for part in (0, 1):
            after_values, after_scales = quantise(plain.tensor[:, _LAYER, part].cpu()[block, offset], setup.kv_dtype)
            after.tensor[:, _LAYER, part][block, offset] = after_values
            assert after.scales is not None
            after.scales[:, _LAYER, part][block, offset] = after_scales
        # The padding of a block is compared too; scales that are NaN may have other bits.
        num_bytes = scaled.shape.data_bytes
        same = torch.equal(scaled.raw[:, :num_bytes].cpu(), after.raw[:, :num_bytes])
        assert after.scales is not None
        both_nan = scaled.scales.cpu().isnan() & after.scales.isnan()
        same &= bool(((scaled.scales.cpu() == after.scales) | both_nan).all())
        return error if same else float("inf")

    return Case(setup.name(), check, 2 * BOUNDS[setup.dtype])


CASES = [
    case(setup)
    for setup in (
        Setup(),
        Setup(dtype=torch.bfloat16, has_norm=True, page=16, num_heads=9, num_kv_heads=9),
        Setup(has_norm=True, head_dim=24, num_heads=16, num_kv_heads=1),
        Setup(kv_dtype=torch.int8, head_dim=24),
        Setup(kv_dtype=torch.int8, dtype=torch.bfloat16, has_norm=True),
        Setup(kv_dtype=torch.float8_e4m3fn),
        Setup(kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, has_norm=True),
        Setup(heads_first=True, has_norm=True, head_dim=24, num_heads=16, num_kv_heads=9),
        Setup(heads_first=True, dtype=torch.bfloat16, page=16),
        Setup(heads_first=True, kv_dtype=torch.int8, page=64),
        Setup(heads_first=True, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, has_norm=True, head_dim=24),
    )
]


def _launch(name: str, num_tokens: int, setup: Setup) -> Launch:
    def make(device: torch.device):  # type: ignore[no-untyped-def]
        pool = _pool(setup, setup.kv_dtype or setup.dtype, device, num_tokens // setup.page + 1, 1)
        num_all = setup.num_heads + 2 * setup.num_kv_heads
        qkv_TND = torch.ones(num_tokens, num_all, setup.head_dim, dtype=setup.dtype, device=device)
        at_T = torch.arange(num_tokens, device=device)
        table_PD = torch.ones(8192, setup.head_dim, dtype=setup.dtype, device=device)
        norm_D = torch.ones(setup.head_dim, dtype=setup.dtype, device=device) if setup.has_norm else None

        def run() -> object:
            return place(
                pool,
                0,
                qkv_TND,
                at_T,
                at_T,
                table_PD,
                num_heads=setup.num_heads,
                q_norm_D=norm_D,
                k_norm_D=norm_D,
                eps=_EPS,
            )

        return run, None

    num_values = num_tokens * (setup.num_heads + 2 * setup.num_kv_heads) * setup.head_dim
    kv_bytes = (setup.kv_dtype or setup.dtype).itemsize * 2 * setup.num_kv_heads * num_tokens * setup.head_dim
    num_bytes = num_values * 2 + num_tokens * setup.num_heads * setup.head_dim * 2 + kv_bytes
    return Launch(f"place {name} t={num_tokens}", make, num_bytes)


_LLAMA = Setup(dtype=torch.bfloat16, page=64, num_heads=32, num_kv_heads=8, head_dim=128)
_QWEN = Setup(dtype=torch.bfloat16, page=64, num_heads=16, num_kv_heads=8, head_dim=128, has_norm=True)
LAUNCHES = [
    _launch("llama-8b", 1, _LLAMA),
    _launch("llama-8b", 128, _LLAMA),
    _launch("llama-8b", 2048, _LLAMA),
    _launch("llama-8b heads first", 128, Setup(**{**vars(_LLAMA), "heads_first": True})),
    _launch(
        "llama-8b heads first fp8", 128, Setup(**{**vars(_LLAMA), "heads_first": True, "kv_dtype": torch.float8_e4m3fn})
    ),
    _launch("qwen3-0.6b", 128, _QWEN),
    _launch("qwen3-0.6b int8", 128, Setup(**{**vars(_QWEN), "kv_dtype": torch.int8})),
    _launch("qwen3-0.6b fp8", 128, Setup(**{**vars(_QWEN), "kv_dtype": torch.float8_e4m3fn})),
]
