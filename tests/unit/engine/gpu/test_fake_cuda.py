"""The GPU code path under torch's own rules: shapes, strides, dtypes and devices of every operation on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.gpu import triton_attention
from pdserve.engine.gpu.graphs import StaticDecode
from pdserve.engine.gpu.plain_rows import no_rows
from pdserve.engine.interface import Row
from pdserve.engine.load.build_engine import open_torch_engine
from pdserve.engine.model.batch import to_device
from tests.gpu.fake_cuda import Waits, fake_cuda

pytestmark = pytest.mark.gpu_checks

GREEDY = Sampling(temperature=0.0)


def row(count: int, start: int, first_block: int, num_targets: int = 0) -> Row:
    end = start + count
    return Row(
        tokens=[1] * count,
        start=start,
        blocks=list(range(first_block, first_block - (-end // 16))),
        sample=GREEDY,
        history=[1] * end,
        prompt_len=end,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "layout"),
    [
        ("llama", "auto", "auto", "tokens"),
        ("llama", "fp8", "fp8", "tokens"),
        ("qwen3", "fp8", "int8", "tokens"),
        ("mistral-window", "auto", "fp8", "tokens"),
        ("gemma2", "auto", "int8", "tokens"),
        ("qwen3", "auto", "fp8", "heads"),
    ],
)
def test_torch_accepts_every_operation(
    name: str, dtype: str, kv_dtype: str, layout: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_GPU", f"layout={layout}")
    real_flash = triton_attention.flash
    config = WorkerConfig(
        model=str(tiny(name)),
        worker_id="w",
        device="cuda",
        load="dummy",
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_blocks=64,
        threads=1,
    )
    flash_rows: list[int] = []
    monkeypatch.setattr(
        triton_attention, "flash", lambda *args: flash_rows.append(len(args[3].table_BP)) or real_flash(*args)
    )
    with fake_cuda() as cuda, torch.inference_mode():
        engine = open_torch_engine(config)
        assert engine.pool.shape.heads_first == (layout == "heads")
        device = torch.device("cuda", 0)
        # Prompts alone, the rest of one, rows and a chunk together, rows alone.
        for rows in (
            [row(40, 0, 0), row(17, 0, 8)],
            [row(30, 40, 0)],
            [row(1, 70, 0), row(5, 17, 8), row(33, 0, 16)],
            [row(1, 71, 0), row(1, 22, 8)],
        ):
            flash_rows.clear()
            states_UE = engine._states(rows)
            chunks = sum(one.num_queries > 16 for one in rows)
            has_flash = chunks and name != "gemma2"
            assert flash_rows == ([chunks] * engine.pool.shape.num_layers if has_flash else [])
            assert states_UE.device == device
            assert states_UE.shape == (len(rows), 64)
            logits_UV = engine.model.logits(states_UE)
            assert (logits_UV.shape, logits_UV.dtype) == ((len(rows), 384), torch.float32)
        decode = StaticDecode(
            engine.model,
            engine.pool,
            most_rows=4,
            max_context_tokens=engine.spec.max_context_tokens,
            vocab_size=384,
            num_processors=132,
            most_tokens=16,
            most_queries=4,
        )
        for num_queries in (1, 4):
            decode.inputs.send(no_rows(), 4)
            decode.run(4, num_queries)
        assert {"_attend", "_merge", "_place", "_look", "_settle"} <= set(cuda.launches)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_stored_weights_reach_the_device(dtype: str, tiny: Callable[[str], Path]) -> None:
    config = WorkerConfig(
        model=str(tiny("qwen3")), worker_id="w", device="cuda", dtype=dtype, kv_blocks=64, threads=1, block_size=16
    )
    with fake_cuda() as cuda:
        copied: list[torch.Tensor] = []
        cuda.on_copy = copied.append
        engine = open_torch_engine(config)
        assert engine.pool.tensor.device == torch.device("cuda", 0)
        assert len(copied) >= 20


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        np.array([1, 2, 3]),
        np.arange(1, 6)[::2],
        np.arange(9, dtype=np.int32).reshape(3, 3).T,
        np.array(4),
        np.zeros((0, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_every_copy_to_the_device_is_queued(values: Any, dtype: torch.dtype) -> None:
    """From pinned memory, and with the same result as a copy that waits."""
    on_host = to_device(values, torch.device("cpu"), dtype)
    pinned: list[torch.Tensor] = []
    with fake_cuda() as cuda:
        cuda.set_sync_debug_mode("error")
        cuda.on_copy = lambda source: pinned.append(source)
        there = to_device(values, torch.device("cuda", 0), dtype)
        assert (there.device.type, there.dtype, there.shape) == ("cuda", dtype, on_host.shape)
    assert [one.tolist() for one in pinned] == [on_host.tolist()]


class OnCuda:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (0, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.tensor(np.zeros(3), pin_memory=True), "constructed from numpy"),
        (lambda: torch.tensor(data=np.zeros(3), pin_memory=True), "constructed from numpy"),
        (lambda: torch.tensor(torch.zeros(3), pin_memory=True), "constructed from a variable"),
        (lambda: torch.tensor(OnCuda(), pin_memory=True), "__cuda_array_interface__"),
        (lambda: torch.zeros(3, device="cuda:0", pin_memory=True), "Only dense CPU tensors can be pinned"),
        (lambda: torch.zeros(3, device="cuda:0").pin_memory(), "only dense CPU tensors can be pinned"),
    ],
)
def test_pinning_follows_torchs_rules(make: Callable[[], object], reason: str) -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match=reason):
        make()


@pytest.mark.parametrize(
    ("act", "is_allowed"),
    [
        (lambda x: x.copy_(torch.zeros(3, pin_memory=True), non_blocking=True), True),
        (lambda x: x.copy_(torch.zeros(6, pin_memory=True)[3:], non_blocking=True), True),
        (lambda x: torch.zeros(3).pin_memory().to(x.device, non_blocking=True), True),
        (lambda x: torch.zeros(3, pin_memory=True).copy_(x, non_blocking=True), True),
        (lambda x: torch.from_numpy(np.zeros(3)).to(x.device, non_blocking=True), False),
        (lambda x: x.copy_(torch.from_numpy(np.zeros(3)), non_blocking=True), False),
        (lambda x: torch.from_numpy(np.zeros(3)).copy_(x, non_blocking=True), False),
        (lambda x: torch.zeros(3, pin_memory=True).to(x.device), False),
        (lambda x: x.copy_(torch.zeros(3, pin_memory=True)), False),
        (lambda x: x.to("cpu"), False),
        (lambda x: x.cpu(), False),
    ],
)
def test_a_copy_that_waits_is_found(act: Callable[[torch.Tensor], object], is_allowed: bool) -> None:
    with fake_cuda() as cuda:
        x = torch.zeros(3, device="cuda:0")
        cuda.set_sync_debug_mode("error")
        with nullcontext() if is_allowed else pytest.raises(Waits):
            act(x)


def test_fake_tensors_apply_torchs_rules() -> None:
    def on_gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda:0")

    with fake_cuda():
        x_TK, w_NK = on_gpu(32, 64, dtype=torch.float8_e4m3fn), on_gpu(48, 64, dtype=torch.float8_e4m3fn)
        scales = {"scale_a": on_gpu(32, 1, dtype=torch.float32), "scale_b": on_gpu(1, 48, dtype=torch.float32)}
        assert torch._scaled_mm(x_TK, w_NK.t(), **scales, out_dtype=torch.bfloat16).shape == (32, 48)
        with pytest.raises(RuntimeError, match=r"column-major|col_major"):
            torch._scaled_mm(x_TK, w_NK.t().clone(memory_format=torch.contiguous_format), **scales)
        with pytest.raises(RuntimeError, match="device"):
            x_TK.float() + torch.zeros(32, 64)


def flash(
    *, dtype: torch.dtype = torch.bfloat16, heads: int = 4, head_dim: int = 64, edges: torch.dtype = torch.int32
) -> None:
    q_THD = torch.empty((40, heads, head_dim), dtype=dtype, device="cuda:0")
    k_SKD = torch.empty((70, 2, head_dim), dtype=dtype, device="cuda:0")
    edge_2 = torch.empty(2, dtype=edges, device="cuda:0")
    torch.ops.aten._flash_attention_forward(
        q_THD, k_SKD, k_SKD, edge_2, edge_2, 40, 70, 0.0, True, False, window_size_left=-1, window_size_right=0
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "fp16 and bf16"),
        ({"heads": 3}, "must divide"),
        ({"head_dim": 264}, "at most 256"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"edges": torch.int64}, "int32"),
    ],
)
def test_flash_attention_has_its_devices_rules(call: dict[str, Any], reason: str | None) -> None:
    with fake_cuda(), nullcontext() if reason is None else pytest.raises(RuntimeError, match=reason):
        flash(**call)
