"""Activations rounded to fp8 in the kernel: close to float64, also in a whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.engine.cpu import ops as cpu_ops
from pdserve.engine.gpu.kernels import ops as gpu_ops
from pdserve.engine.interface import Row
from pdserve.engine.load.checkpoint_files import open_checkpoint
from pdserve.engine.load.weights import load_weights
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.model.attention import EagerAttention
from pdserve.engine.model.batch import pack
from pdserve.engine.model.config import read_config
from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.rounded import Fp8Linear
from tests.gpu.case_fp8 import CASES
from tests.gpu.cases import Case
from tests.unit.engine.gpu.fp8_sums import errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_activations_are_rounded_with_a_scale_per_token(case: Case, device: torch.device) -> None:
    assert case.check(device) <= case.bound


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fusing_rounding_into_norms_and_gates_keeps_accuracy(
    name: str, tiny: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(name)
    config = read_config(folder)
    checkpoint = open_checkpoint(folder)
    weights = load_weights(config, checkpoint, device, torch.bfloat16, rounding="fp8")
    exact = load_weights(config, checkpoint, device, torch.float32)
    num_rounded = 0
    round_alone = Fp8Linear.round

    def counted(linear: Fp8Linear, x_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_rounded
        num_rounded += 1
        return round_alone(linear, x_TK)

    monkeypatch.setattr(Fp8Linear, "round", counted)
    row = Row(tokens=list(range(3, 9)), start=0, blocks=[0], targets=list(range(4, 10)))
    logits = []
    # Fused: all products except the one of attention's output.
    for one, ops, num_alone in ((exact, cpu_ops, 0), (weights, cpu_ops, 4), (weights, gpu_ops, 1)):
        num_rounded = 0
        model = Decoder(config, one, None, ops)
        shape = BlockShape(
            num_layers=config.num_layers,
            block_size=16,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=one.dtype,
        )
        pool = TorchPool(num_blocks=1, shape=shape, device=device)
        batch = pack([row], 8, device)
        logits.append(model.logits(model.hidden(EagerAttention(batch, pool, model.heads))).cpu())
        assert num_rounded == num_alone * config.num_layers
    # Rounding changes the logits of so small a model by a third. A missing sum or scale would change them completely.
    expected, behind, fused = logits
    assert expected.shape == (6, config.vocab_size)
    assert (fused - expected).norm() < 1.5 * (behind - expected).norm()
    assert (fused - behind).norm() < 1.5 * (behind - expected).norm()


def test_fast_sums_err_less_than_fp8_rounding() -> None:
    rounding, fast, promoted = errors(4096)
    assert 4 * promoted < fast < rounding / 10
