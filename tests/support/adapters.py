"""Writes LoRA adapters as PEFT does, without PEFT and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

#: Modules and their numbers of inputs and outputs; of a toy, any.
TOY_MODULES: Final[Mapping[str, tuple[int, int]]] = {"model.layers.0.self_attn.q_proj": (8, 8)}
PREFIX: Final = "base_model.model."


def tensors_of(
    modules: Mapping[str, tuple[int, int]] = TOY_MODULES, *, rank: int = 2, seed: int = 0, scale: float = 0.1
) -> dict[str, np.ndarray[Any, Any]]:
    """Random, in float32."""
    random = np.random.default_rng(seed)
    found = {}
    for name, (inputs, outputs) in modules.items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            found[f"{PREFIX}{name}.lora_{part}.weight"] = (scale * random.standard_normal(shape)).astype(np.float32)
    return found


def config_of(modules: Mapping[str, Any] = TOY_MODULES, *, rank: int = 2, **changed: Any) -> dict[str, Any]:
    """As PEFT writes it, with all of its fields that are common."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "a/model",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 2 * rank,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_rslora": False,
    } | changed


def file_of(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """A safetensors file."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        entry = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        header[name], at = entry, at + tensor.nbytes
    return with_header(json.dumps(header).encode(), b"".join(tensor.tobytes() for tensor in tensors.values()))


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]] = TOY_MODULES,
    *,
    rank: int = 2,
    seed: int = 0,
    scale: float = 0.1,
    **changed: Any,
) -> Path:
    """`changed`: fields of its config. Adapters of different seeds have different fingerprints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config_of(modules, rank=rank, **changed)))
    tensors = tensors_of(modules, rank=rank, seed=seed, scale=scale)
    (folder / "adapter_model.safetensors").write_bytes(file_of(tensors))
    return folder
