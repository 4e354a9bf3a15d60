"""Fills the decoder's parameters from a checkpoint: each exactly once, converted to the compute dtype."""

# Shapes: E hidden size, F mlp size, V vocabulary, H query heads, K kv heads, D head dim.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import InternalError, ModelError
from pdserve.engine.config import ModelConfig
from pdserve.engine.linear import Linear, make_linear
from pdserve.engine.safetensors_file import ITEM_BYTES, Checkpoint, StoredTensor

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIX: Final = ".rotary_emb.inv_freq"  # old Llama checkpoints store what config.json already says


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's parameters as they are read."""

    attention_norm_E: Tensor
    qkv_weight: Tensor  # [(H + 2K) D, E]: queries, keys, values
    qkv_bias: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_weight: Tensor  # [E, H D]
    o_bias_E: Tensor | None
    mlp_norm_E: Tensor
    gate_up_weight: Tensor  # [2F, E]: gate, up
    gate_up_bias: Tensor | None
    down_weight: Tensor  # [E, F]
    down_bias_E: Tensor | None
    window: int | None


@dataclass(slots=True, kw_only=True)
class Tensors:
    embedding_VE: Tensor
    layers: list[LayerTensors]
    norm_E: Tensor
    head_VE: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer as it is computed with."""

    attention_norm_E: Tensor
    qkv: Linear  # to (H + 2K) D: queries, keys, values
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Linear
    mlp_norm_E: Tensor
    gate_up: Linear  # to 2F: gate, up
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding_VE: Tensor
    layers: tuple[LayerWeights, ...]
    norm_E: Tensor
    head: Linear


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    is_int8: bool = False,
) -> Weights:
    """Raises ModelError on a missing, left over or misshapen tensor, before anything is read."""
    tensors, targets = allocate(config, device, dtype)
    stored = dict(checkpoint.tensors)
    for name in checkpoint.tensors:
        is_copy_of_embedding = config.is_tied and name == "lm_head.weight"
        if name.endswith(_IGNORED_SUFFIX) or is_copy_of_embedding:
            del stored[name]
    _check_names(targets, stored)
    total = sum(tensor.num_bytes for tensor in stored.values())
    done = 0
    mapped: dict[str, Tensor] = {}
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].file, item[1].begin)):
        if tensor.file.name not in mapped:
            mapped = {tensor.file.name: _map(tensor)}  # lets go of the file before
        targets[name].copy_(_read(mapped[tensor.file.name], tensor))
        done += tensor.num_bytes
        if progress is not None:
            progress(done, total)
    targets.clear()
    return pack(tensors, is_int8=is_int8)


def pack(tensors: Tensors, *, is_int8: bool) -> Weights:
    """Layer by layer, each given back before the next is packed: there is never a second copy of the model."""
    layers: list[LayerWeights] = []
    tensors.layers.reverse()
    while tensors.layers:
        layers.append(_pack_layer(tensors.layers.pop(), is_int8))
    return Weights(
        embedding_VE=tensors.embedding_VE,
        layers=tuple(layers),
        norm_E=tensors.norm_E,
        head=make_linear(tensors.head_VE, is_int8=is_int8),
    )


def _pack_layer(layer: LayerTensors, is_int8: bool) -> LayerWeights:
    return LayerWeights(
        attention_norm_E=layer.attention_norm_E,
        qkv=make_linear(layer.qkv_weight, layer.qkv_bias, is_int8=is_int8),
        q_norm_D=layer.q_norm_D,
        k_norm_D=layer.k_norm_D,
        o=make_linear(layer.o_weight, layer.o_bias_E, is_int8=is_int8),
        mlp_norm_E=layer.mlp_norm_E,
        gate_up=make_linear(layer.gate_up_weight, layer.gate_up_bias, is_int8=is_int8),
        down=make_linear(layer.down_weight, layer.down_bias_E, is_int8=is_int8),
        window=layer.window,
    )


def allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensors, dict[str, Tensor]]:
    """Empty parameters, and under each checkpoint name the part of them that it fills.

    Fused matrices (qkv, gate and up) are one parameter with several names, so that no second copy is ever made.
    """
    targets: dict[str, Tensor] = {}
    hidden, query_size, kv_size = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )

    def parameter(names: Mapping[str, int], *columns: int, exists: bool = True) -> Tensor | None:
        if not exists:
            return None
        whole = torch.empty((sum(names.values()), *columns), device=device, dtype=dtype)
        for name, part in zip(names, whole.split(list(names.values())), strict=True):
            if name in targets:
                raise InternalError(f"two parameters are called {name}")
            targets[name] = part
        return whole

    def required(names: Mapping[str, int], *columns: int) -> Tensor:
        whole = parameter(names, *columns)
        assert whole is not None
        return whole

    def layer(index: int) -> LayerTensors:
        at = f"model.layers.{index}."
        qkv = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": config.mlp_size, "up_proj": config.mlp_size}

        def names(group: str, sizes: Mapping[str, int], kind: str) -> dict[str, int]:
            return {f"{at}{group}.{part}.{kind}": size for part, size in sizes.items()}

        return LayerTensors(
            attention_norm_E=required({f"{at}input_layernorm.weight": hidden}),
            qkv_weight=required(names("self_attn", qkv, "weight"), hidden),
            qkv_bias=parameter(names("self_attn", qkv, "bias"), exists=config.has_qkv_bias),
            q_norm_D=parameter({f"{at}self_attn.q_norm.weight": config.head_dim}, exists=config.has_qk_norm),
            k_norm_D=parameter({f"{at}self_attn.k_norm.weight": config.head_dim}, exists=config.has_qk_norm),
            o_weight=required({f"{at}self_attn.o_proj.weight": hidden}, query_size),
            o_bias_E=parameter({f"{at}self_attn.o_proj.bias": hidden}, exists=config.has_o_bias),
            mlp_norm_E=required({f"{at}post_attention_layernorm.weight": hidden}),
            gate_up_weight=required(names("mlp", gate_up, "weight"), hidden),
            gate_up_bias=parameter(names("mlp", gate_up, "bias"), exists=config.has_mlp_bias),
            down_weight=required({f"{at}mlp.down_proj.weight": hidden}, config.mlp_size),
            down_bias_E=parameter({f"{at}mlp.down_proj.bias": hidden}, exists=config.has_mlp_bias),
            window=config.windows[index],
        )

    embedding_VE = required({"model.embed_tokens.weight": config.vocab_size}, hidden)
    tensors = Tensors(
        embedding_VE=embedding_VE,
        layers=[layer(index) for index in range(config.num_layers)],
        norm_E=required({"model.norm.weight": hidden}),
        head_VE=embedding_VE if config.is_tied else required({"lm_head.weight": config.vocab_size}, hidden),
    )
    return tensors, targets


def _check_names(targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    if missing := sorted(targets.keys() - stored.keys()):
        raise ModelError(missing[0], f"no such tensor ({len(missing)} are missing)", "every parameter of the model")
    if left := sorted(stored.keys() - targets.keys()):
        raise ModelError(left[0], f"a tensor that nothing uses ({len(left)} such)", "only the model's parameters")
    for name, target in targets.items():
        if stored[name].shape != tuple(target.shape):
            raise ModelError(name, f"shape {list(stored[name].shape)}", f"{list(target.shape)}, as config.json says")


def _map(tensor: StoredTensor) -> Tensor:
    """The file's bytes, paged in as they are read."""
    size = tensor.file.stat().st_size
    return torch.from_file(str(tensor.file), shared=False, size=size, dtype=torch.uint8)


def _read(file_bytes: Tensor, tensor: StoredTensor) -> Tensor:
    data = file_bytes[tensor.begin : tensor.begin + tensor.num_bytes]
    if tensor.begin % ITEM_BYTES[tensor.dtype]:
        data = data.clone()  # a header of odd length: the view below needs alignment
    return data.view(_DTYPES[tensor.dtype]).view(tensor.shape)
