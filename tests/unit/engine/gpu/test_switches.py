"""Switches of the GPU engine are read from one variable, and an unknown one is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.core.types import Sampling
from pdserve.engine.gpu.graphs import EagerReplays
from pdserve.engine.gpu.kernels.attention_plan import choose_tiling
from pdserve.engine.gpu.kernels.sampling import Sampler
from pdserve.engine.gpu.kernels.switches import VARIABLE, GpuSwitches, gpu_switches
from pdserve.engine.gpu.resample import Resampler
from pdserve.engine.gpu.triton_attention import takes_flash
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.load.gpu_engine import measure_graphs, with_graphs
from tests.gpu.case_sampling import draws_of
from tests.gpu.strict_capture import strict_capture


def test_switches_come_from_one_variable() -> None:
    assert gpu_switches({}) == GpuSwitches()
    found = gpu_switches({"PDSERVE_GPU": "merge=fused, products=split-k,"})
    assert found == GpuSwitches(merge="fused", products="split-k")


@pytest.mark.parametrize("text", ["merge", "merge=", "merge=both", "speed=high", "=on"])
def test_an_unknown_switch_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PDSERVE_GPU.*one of"):
        gpu_switches({"PDSERVE_GPU": text})


def test_attention_without_a_pipeline_has_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = choose_tiling(128, torch.bfloat16, 16)
    monkeypatch.setenv(VARIABLE, "attention=few-stages")
    few = choose_tiling(128, torch.bfloat16, 16)
    assert usual.num_stages > few.num_stages == 1
    assert few.positions == usual.positions


@pytest.mark.gpu_checks
def test_eager_steps_capture_nothing(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "steps=eager")
    monkeypatch.setattr(Resampler, "warm", lambda self: None)
    folder = tiny("llama")
    meter: Any = SimpleNamespace(settle=lambda: None, reserved=lambda: 0)
    with strict_capture() as captures:
        config = WorkerConfig(model=str(folder), worker_id="w", device="cuda", load="dummy", kv_blocks=64, threads=1)
        eager = open_torch_engine(config)
        assert measure_graphs(eager, meter, most_rows=2, most_drafts=3) > 0  # The counts for penalties.
        engine = with_graphs(eager, 2, "w", 3)
        assert isinstance(engine._replays, EagerReplays)
        assert isinstance(engine._verify, EagerReplays)
        assert captures.num_graphs == 0


def test_prompts_attend_without_flash_attention(tiny: Callable[[str], Path], open_engine: Any) -> None:
    heads = open_engine(tiny("llama"), kv_blocks=8).model.heads
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "prefill=torch")
        assert not takes_flash(heads, torch.bfloat16)
    assert takes_flash(heads, torch.bfloat16)


def test_argmax_samples_the_best_token_of_every_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sampler=argmax")
    logits_BV = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    samplings = [Sampling(temperature=temperature, seed=1) for temperature in (0.0, 1.0, 0.7)]
    token_B, logprob_B = Sampler(4, 3000, device).draw(logits_BV.to(device), draws_of(samplings, [1, 2, 3], device))
    expected_B, best_B = logits_BV.double().log_softmax(-1).max(-1)
    assert token_B.cpu().tolist() == best_B.tolist()
    assert (logprob_B.cpu().double() - expected_B).abs().max() < 4e-6
