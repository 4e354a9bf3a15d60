"""Random LoRA adapters of tiny models, and each adapter merged into the weights of its model, in float64."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from pdserve.core.adapters import Adapter, AdapterLimits
from pdserve.engine.adapters import read_adapter
from pdserve.engine.load.checkpoint_files import open_checkpoint
from tests.models.far_oracle import FarOracle
from tests.support.adapters import write_adapter

LIMITS: Final = AdapterLimits(rank=64, num_bytes=2**30)
_NO_LINEAR: Final = ("embed", "lm_head")


def linear_layers(folder: Path) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each."""
    return {
        name.removesuffix(".weight"): (tensor.shape[1], tensor.shape[0])
        for name, tensor in open_checkpoint(folder).tensors.items()
        if len(tensor.shape) == 2 and not any(part in name for part in _NO_LINEAR)
    }


def make_adapter(model: Path, folder: Path, seed: int, *, name: str = "", rank: int = 0) -> Adapter:
    """Adapters of different seeds differ in all: rank, scaling, modules and weights."""
    layers = linear_layers(model)
    rank = rank or (1, 4, 8, 5)[seed % 4]
    if seed % 3 == 1:  # some of the joined layers, and of the layers of the model
        layers = {one: sizes for at, (one, sizes) in enumerate(layers.items()) if at % 3 != seed % 2}
    patterns = {"alpha_pattern": {r"1\.self_attn\.q_proj": 3.0}} if seed % 3 == 2 else {}
    changed = {"lora_alpha": (2, 8, 16)[seed % 3], "use_rslora": seed % 2 == 1, **patterns}
    write_adapter(folder, layers, rank=rank, seed=seed, scale=0.25 / rank**0.25, **changed)
    return read_adapter(name or f"a{seed}", folder, LIMITS)


def merge(model: Path, adapter: Adapter, target: Path) -> Path:
    """The model's folder with W + scaling * B A in float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    for module in adapter.modules:
        a, b = (
            torch.frombuffer(one.data, dtype=torch.float32).view(one.shape).double() for one in (module.a, module.b)
        )
        tensors[f"{module.name}.weight"] += module.scaling * b @ a
    target.mkdir()
    for file in ("config.json", "generation_config.json"):
        shutil.copy(model / file, target / file)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@dataclass(frozen=True)
class AdaptedModel:
    """A model with adapters, each with an oracle of the merged weights; the first is the model alone."""

    adapters: tuple[Adapter, ...]
    oracles: tuple[FarOracle, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return ("", *(one.fingerprint for one in self.adapters))


def make_adapted(model: Path, folder: Path, count: int) -> AdaptedModel:
    adapters = [make_adapter(model, folder / f"adapter-{seed}", seed) for seed in range(count)]
    merged = [merge(model, one, folder / f"merged-{seed}") for seed, one in enumerate(adapters)]
    return AdaptedModel(tuple(adapters), tuple(map(FarOracle, (model, *merged))))
