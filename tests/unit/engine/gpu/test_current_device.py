"""Triton launches on the thread's current device, so every rank must have selected its own GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.core.types import Sampling
from pdserve.engine.gpu.kernels.norms import rms_norm
from pdserve.engine.interface import Row
from pdserve.engine.load.build_engine import open_rank
from pdserve.engine.model.collectives import Ranks
from pdserve.engine.model.parameters import Shard
from pdserve.engine.ranks import follower, leader
from pdserve.engine.ranks.leader import OWN
from pdserve.engine.rows import to_words
from tests.gpu.fake_cuda import WrongDevice, fake_cuda

pytestmark = pytest.mark.gpu_checks

CHUNK = Row(tokens=[1] * 20, start=0, blocks=[0, 1], sample=Sampling(temperature=0.0), history=[1] * 20, prompt_len=20)
TOKEN = Row(tokens=[1], start=5, blocks=[3], sample=Sampling(temperature=0.0), history=[1] * 6, prompt_len=6)


class Alone:
    """Ranks without partners. The follower receives one step, then the end."""

    def __init__(self, shard: Shard, *_: Any) -> None:
        self.shard = shard
        self.orders = [[leader.STEP, 0, *to_words([CHUNK, TOKEN])], [leader.STOP]]

    def receive_order(self) -> list[int]:
        return self.orders.pop(0)

    def close(self) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def concat_columns(self, x_TW: Tensor, widths: Sequence[int]) -> Tensor:
        return torch.cat([x_TW[:, :1].expand(-1, width) for width in widths], dim=1)


class Store:
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        return b"off"


def config(folder: Path) -> WorkerConfig:
    return WorkerConfig(model=str(folder), worker_id="w", device="cuda", load="dummy", tensor_parallel=2, kv_blocks=8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_launches_on_its_own_gpu(rank: int, tiny: Callable[[str], Path]) -> None:
    folder, shard = tiny("llama"), Shard(rank, 2)
    with fake_cuda(num_devices=2) as cuda:
        engine = open_rank(config(folder), shard, cast(Ranks, Alone(shard)))
        assert engine.pool.tensor.device == torch.device("cuda", rank)
        engine.follow([CHUNK, TOKEN])
        assert {"_norm", "_attend", "_place"} <= set(cuda.launches)


def test_a_follower_process_launches_on_its_own_gpu(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "private_store", lambda *args, **kwargs: Store())
    monkeypatch.setattr(follower, "Ranks", Alone)
    folder = tiny("llama")
    with fake_cuda(num_devices=2) as cuda:
        assert follower.follow(1, 0, OWN, config(folder)) == 0
        assert cuda.current_device() == 1
        assert "_attend" in cuda.launches


def test_the_stand_in_tracks_each_threads_device() -> None:
    with fake_cuda(num_devices=2) as cuda:
        x_TE, weight_E = (torch.empty(shape, device="cuda:1") for shape in ((3, 64), (64,)))
        with pytest.raises(WrongDevice, match="launched on cuda:0: argument 0 lies on cuda:1"):
            rms_norm(x_TE, weight_E, 1e-6)
        cuda.set_device(1)
        rms_norm(x_TE, weight_E, 1e-6)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(cuda.current_device()))
        thread.start()
        thread.join()
        assert seen == [0]
