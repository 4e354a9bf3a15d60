"""Dummy weights are the same on every machine, and small enough to compute with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ConfigError, ModelError
from pdserve.core.types import Sampling
from pdserve.engine.interface import Engine, Row
from pdserve.engine.load.weights import dummy_weights
from pdserve.engine.model.config import read_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A config without weights, with a head of several chunks."""
    config = json.loads((tiny("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 40_000}))
    return tmp_path


def test_noise_does_not_depend_on_threads(folder: Path) -> None:
    one, many = (dummy_weights(read_config(folder), CPU, torch.float32, num_threads=count) for count in (1, 5))
    eye = torch.eye(64)
    assert torch.equal(one.embedding_VE, many.embedding_VE)
    assert torch.equal(one.head(eye), many.head(eye))
    assert all(torch.equal(a.qkv(eye), b.qkv(eye)) for a, b in zip(one.layers, many.layers, strict=True))


def test_noise_has_the_right_deviation(folder: Path) -> None:
    weights = dummy_weights(read_config(folder), CPU, torch.float32)
    head_VE = weights.head(torch.eye(64)).T
    for matrix in (head_VE, weights.embedding_VE):
        assert matrix.std().item() == pytest.approx(64**-0.5, rel=0.01)
        assert matrix.mean().item() == pytest.approx(0, abs=1e-3)
        assert not torch.equal(matrix[:16_384], matrix[16_384:32_768])  # One chunk and the next.
    assert not torch.equal(head_VE, weights.embedding_VE)
    assert weights.layers[0].mlp.down(torch.eye(96)).std().item() == pytest.approx(96**-0.5, rel=0.05)
    assert torch.equal(weights.norm_E, torch.ones(64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_two_workers_have_the_same_dummy_weights(folder: Path, open_engine: Callable[..., Engine], dtype: str) -> None:
    engines = [open_engine(folder, load="dummy", dtype=dtype) for _ in range(2)]
    row = Row(tokens=[5, 9, 3], start=0, blocks=[1], sample=Sampling(temperature=0.0, logprobs=4), history=[5, 9, 3])
    first, second = (engine.step([row])[0].sampled[0] for engine in engines)
    assert first == second
    assert engines[0].spec == engines[1].spec


def test_dummy_weights_have_their_own_hash(
    tiny: Callable[[str], Path], tmp_path: Path, open_engine: Callable[..., Engine]
) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    names = [
        open_engine(folder).spec.weights_hash,
        open_engine(folder, load="dummy").spec.weights_hash,
        open_engine(folder, dtype="int8").spec.weights_hash,
        open_engine(folder, load="dummy", dtype="int8").spec.weights_hash,
    ]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    names.append(open_engine(folder, load="dummy").spec.weights_hash)
    assert len(set(names)) == 5


def test_only_the_flag_generates_weights(folder: Path, open_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ModelError, match="no weights in"):
        open_engine(folder)
    with pytest.raises(ConfigError, match="load: got random, expected one of auto, dummy"):
        open_engine(folder, load="random")
