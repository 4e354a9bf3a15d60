"""How the engine vllm starts on a GPU. vLLM's modules are stand-ins here; its own backends: tests/models."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.memory.plan import MemoryPlan, PoolUnit
from pdserve.engine.memory.pool import BlockShape, TorchPool
from pdserve.engine.vllm import checks, start
from pdserve.engine.vllm.groups import Place
from pdserve.engine.vllm.pool import VllmPool, choose_layout

GIB = 2**30
UNIT = PoolUnit(block_bytes=64, block_size=16)


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model="m", worker_id="w", engine="vllm", **settings)


def provide(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def test_on_a_gpu_vllm_chooses_the_size_of_blocks_unless_it_is_set() -> None:
    assert checks.block_size(config(), is_gpu=True) is None
    assert checks.block_size(config(block_size=64), is_gpu=True) == 64
    assert checks.block_size(config(block_size=40), is_gpu=False) == 64
    assert checks.block_size(config(), is_gpu=False) == 32


def test_on_a_gpu_a_block_is_one_run() -> None:
    assert choose_layout(["LBHNC", "BLHNC"], ["FLASHINFER"], is_gpu=True) == "BLHNC"
    assert choose_layout(["LBNHC"], ["FLEX_ATTENTION"], is_gpu=True) is None


def test_a_platform_without_a_gpu_is_named() -> None:
    absent = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_type="")
    with pytest.raises(ConfigError, match="vllm for CUDA, which finds no GPU, expected"):
        checks.check_platform(config(), absent)


def test_a_device_that_vllm_cannot_use_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, **options: Any) -> None:
            assert options["distributed_init_method"] == "meeting"

        def init_device(self) -> None:
            raise ValueError("Free memory on device cuda:0 (1.0/79.2 GiB) on startup is less than desired\nand more")

        def shutdown(self) -> None:
            closed.append(self)

    closed: list[Any] = []
    provide(
        monkeypatch,
        {
            "vllm": {},
            "vllm.config": {"set_current_vllm_config": lambda config: nullcontext()},
            "vllm.platforms": {"current_platform": SimpleNamespace(dist_backend="nccl")},
            "vllm.utils": {},
            "vllm.utils.import_utils": {"resolve_obj_by_qualname": lambda name: Worker},
            "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
        },
    )
    monkeypatch.setattr(start, "groups_of", lambda *args: nullcontext("meeting"))
    settings: Any = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="x"))
    with pytest.raises(ConfigError) as caught:
        start.open_worker(config(gpu_memory_share=0.5), settings, Path("m"), "0.32.0", Place(), 1)
    assert caught.value.field == "device"
    assert "gpu_memory_share 0.5" in str(caught.value)
    assert "Free memory on device cuda:0 (1.0/79.2 GiB) on startup is less than desired" in str(caught.value)
    assert len(closed) == 1


def test_workers_of_a_gpu_start_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platform = SimpleNamespace(get_device_uuid=lambda: "GPU-1")
    provide(monkeypatch, {"vllm": {}, "vllm.platforms": {"current_platform": platform}})
    monkeypatch.setattr(start.tempfile, "gettempdir", lambda: str(tmp_path))
    with start.start_turn(is_gpu=True, rank=0):
        [path] = tmp_path.iterdir()
        other = os.open(path, os.O_RDWR)  # as another worker's
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with monkeypatch.context() as within:
            within.setattr(start, "fcntl", None)
            with start.start_turn(is_gpu=True, rank=1):
                pass  # rank 0 of its worker has the turn
        platform.get_device_uuid = lambda: "GPU-2"
        with start.start_turn(is_gpu=True, rank=0):
            assert len(list(tmp_path.iterdir())) == 2
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    platform.get_device_uuid = lambda: "GPU-1"
    monkeypatch.setattr(start, "_TURN_S", 0.0)
    with start.start_turn(is_gpu=True, rank=0):
        pass  # it does not wait longer
    os.close(other)
    with start.start_turn(is_gpu=False, rank=0):
        pass


def test_the_plan_of_a_gpu_is_what_vllm_measured() -> None:
    pool = VllmPool(100, 64, 1, torch.device("meta"))
    worker = SimpleNamespace(
        init_snapshot=SimpleNamespace(total_memory=80 * GIB, free_memory=79 * GIB),
        model_runner=SimpleNamespace(model_memory_usage=16 * GIB),
    )
    plain = start.device_memory(worker, pool, UNIT, 0.9)
    assert (plain.total, plain.weights, plain.kv_pool, plain.graphs) == (80 * GIB, 16 * GIB, 6400, 0)
    worker.total_consumed, worker.peak_activation_memory, worker.cudagraph_memory_estimate = 17 * GIB, 5 * GIB, GIB
    assert start.device_memory(worker, pool, UNIT, 0.5) == MemoryPlan(
        device="meta",
        total=80 * GIB,
        usable=40 * GIB,
        weights=16 * GIB,
        activations=4 * GIB,
        graphs=GIB,
        runtime=GIB,
        kv_pool=6400,
        kv_tokens=1600,
    )


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_pool_without_memory_on_its_gpu_names_the_settings(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    def zeros(*args: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 640.00 GiB")

    monkeypatch.setattr(torch, "zeros", zeros)
    shape = BlockShape(num_layers=1, block_size=16, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    device = torch.device("meta")
    with pytest.raises(ConfigError, match="fewer, by kv_blocks, kv_memory_bytes or gpu_memory_share") as caught:
        TorchPool(num_blocks=9, shape=shape, device=device) if is_ours else VllmPool(9, 64, 1, device)
    assert caught.value.field == "kv_blocks"
