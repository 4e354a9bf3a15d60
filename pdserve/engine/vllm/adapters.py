"""LoRA adapters in vLLM: which modules of the model take one, loading and unloading, and products on a CPU.

vLLM keeps the weights of all loaded adapters on the host, and those of the adapters that a step computes in slots
beside the model's weights. An adapter is loaded from tensors that we have read and checked, never from its folder.
"""

# Shapes: T tokens, K inputs, N outputs, R rank, S slots.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, final, get_args

import torch
from torch import Tensor

from pdserve.config import WorkerConfig
from pdserve.core.adapters import AdaptedModule, Adapter
from pdserve.core.errors import ModelError
from pdserve.engine.adapters import WEIGHTS, LoadedAdapters

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WARM: Final = "warm"  # no fingerprint
_ABSORBED: Final = ".kv_b_proj"


# --- before weights are read ----------------------------------------------------------------------------------


def lora_args(config: WorkerConfig) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs; none without adapters, so that the model has no layers for them."""
    if not config.serves_adapters:
        return {}
    from vllm.config.lora import MaxLoRARanks

    slots = min(config.max_loras, config.max_lora_adapters)
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= config.max_lora_rank),
        "max_cpu_loras": config.max_lora_adapters + slots,  # never full: vLLM would evict one that we have loaded
    }


def check_adapters(config: WorkerConfig, model: Any, *, is_gpu: bool) -> None:
    """Raises ModelError if no adapter could be computed."""
    if not config.serves_adapters:
        return
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models import supports_lora

    name, without = " ".join(model.architectures), "without worker.lora and worker.lora_folders it is served"
    if not supports_lora(get_model_cls(model)):
        raise ModelError("architectures", name, f"a model for which vLLM computes LoRA adapters; {without}")
    if model.is_moe and not is_gpu:
        expected = f"no mixture of experts: on a CPU vLLM computes none with LoRA adapters; {without}"
        raise ModelError("architectures", name, expected)


def wrap_linear_layers_only(runner: Any) -> None:
    """Before the runner loads the model: embeddings and the output layer take no adapters. With one on the output
    layer, vLLM could project no other positions than the last of each row."""
    load = runner.load_lora_model

    def load_without_embeddings(model: Any, *rest: Any) -> Any:
        for module in model.modules():
            if hasattr(module, "embedding_modules"):
                module.embedding_modules = {}
        return load(model, *rest)

    runner.load_lora_model = load_without_embeddings


# --- loading and unloading ------------------------------------------------------------------------------------


@final
class AdapterSlots:
    """The adapters of one model runner, by fingerprint."""

    def __init__(self, config: WorkerConfig, runner: Any, *, is_gpu: bool) -> None:
        self.num_slots: int = runner.lora_config.max_loras
        self._runner = runner
        self._manager = runner.lora_manager._adapter_manager
        self._dtype: torch.dtype = runner.lora_config.lora_dtype
        self._loaded = LoadedAdapters(config.max_lora_bytes, config.max_lora_adapters)
        self._requests: dict[str, Any] = {}
        self._numbers = count(1)  # vLLM's names of adapters: each load has a new one
        self._sizes = dict(_module_sizes(self._manager))
        wrappers = () if is_gpu else self._manager.punica_wrapper_mapping.values()
        self._products = [_GroupedProducts(one) for one in wrappers]

    def __contains__(self, fingerprint: object) -> bool:
        return fingerprint in self._requests

    @property
    def num_bytes(self) -> int:
        """Of the slots."""
        modules = self._manager.modules.values()
        parts = [part for one in modules for part in (*one.lora_a_stacked, *one.lora_b_stacked)]
        return sum(part.numel() * part.element_size() for part in parts)

    def request_of(self, fingerprint: str) -> Any:
        """vLLM's LoRARequest; None of the model alone."""
        return self._requests[fingerprint] if fingerprint else None

    def active(self) -> set[str]:
        """Adapters whose weights are in a slot."""
        active = set(self._manager.lora_index_to_id)
        return {name for name, request in self._requests.items() if request.lora_int_id in active}

    def load(self, adapter: Adapter) -> None:
        """Raises ModelError, and has changed nothing then."""
        from vllm.lora.lora_model import LoRAModel

        if adapter.fingerprint in self._loaded:
            return
        self._loaded.check_room(adapter)
        request = self._new_request(adapter.name)
        layers = dict(self._layer(module) for module in adapter.modules)
        self._manager.add_adapter(LoRAModel(request.lora_int_id, adapter.rank, layers))
        self._requests[adapter.fingerprint] = request
        self._loaded.add(adapter)

    def unload(self, fingerprint: str) -> None:
        if request := self._requests.pop(fingerprint, None):
            self._manager.remove_adapter(request.lora_int_id)
            self._loaded.remove(fingerprint)

    @contextmanager
    def warm(self) -> Iterator[str]:
        """An adapter of zeros on all layers, which compiles what adapters need. On a CPU, layers whose products the
        model's code then did not ask for take no adapters."""
        self._requests[_WARM] = request = self._new_request(_WARM)
        self._runner.lora_manager.add_dummy_lora(request, 1)
        try:
            yield _WARM
        finally:
            self.unload(_WARM)
        if self._products:
            called = frozenset().union(*(one.called for one in self._products))
            self._sizes = dict(_module_sizes(self._manager, lambda layer: layer.lora_a_stacked[0].data_ptr() in called))

    def _new_request(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        # vLLM reads the path of an adapter that it does not have, so it must be none.
        return LoRARequest(lora_name=name, lora_int_id=next(self._numbers), lora_path="/dev/null")

    def _layer(self, module: AdaptedModule) -> tuple[str, Any]:
        from vllm.lora.lora_weights import LoRALayerWeights

        name = self._name_of(module.name)
        if name not in self._sizes:
            expected = "linear layers of the model for which vLLM computes adapters"
            raise ModelError("target_modules", module.name, expected)
        found, expected_sizes = (module.a.shape[1], module.b.shape[0]), self._sizes[name]
        if found != expected_sizes:
            seen = f"{module.name} with {found[0]} inputs and {found[1]} outputs"
            raise ModelError(WEIGHTS, seen, f"{expected_sizes[0]} and {expected_sizes[1]}, as the model has")
        a_RK, b_NR = (
            torch.frombuffer(one.data, dtype=_DTYPES[one.dtype]).view(one.shape).float() for one in (module.a, module.b)
        )
        # In float32, and rounded once: vLLM would round the scaling's product again.
        parts = [part.to(self._dtype) for part in (a_RK, b_NR * module.scaling)]
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ModelError(WEIGHTS, f"{module.name} with a weight that is no number or too large", "finite weights")
        return name, LoRALayerWeights(name, module.rank, module.rank, *(part.clone() for part in parts), scaling=1)

    def _name_of(self, name: str) -> str:
        """vLLM's name of a module of the checkpoint."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return name
        suffix = ".lora_A.weight"
        return str(mapper.get_rename_mapper()._map_name(name + suffix) or "").removesuffix(suffix)


def _module_sizes(
    manager: Any, is_computed: Callable[[Any], bool] = lambda layer: True
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Inputs and outputs of each linear layer that takes an adapter, under the names of checkpoints where vLLM has
    joined several. Experts are not among them, and neither is a matrix that MLA multiplies into others when weights
    are read."""
    for name, module in manager.modules.items():
        if name.endswith(_ABSORBED) or not hasattr(module, "output_slices") or not is_computed(module):
            continue
        parts = manager.packed_modules.get(name, [name])
        slices = module.output_slices
        if len(parts) == 1:
            slices = (sum(slices),)
        if len(parts) == len(slices) and all(slices):
            yield from ((part, (module.input_size, size)) for part, size in zip(parts, slices, strict=True))


# --- products on a CPU ----------------------------------------------------------------------------------------


@final
class _GroupedProducts:
    """Adds the adapters' products on a CPU, one adapter after the other. It takes the place of vLLM's own products,
    which copy an adapter's padded matrices for every token, and add those of the last slot to tokens without an
    adapter."""

    def __init__(self, wrapper: Any) -> None:
        self._update = wrapper.update_metadata
        self._groups: list[tuple[int, slice | Tensor]] = []  # slot, and its tokens
        self._wrapper = wrapper
        self.called: set[int] = set()  # where the matrices of the layers lie that have been computed
        wrapper.update_metadata = self.update_metadata
        wrapper.add_lora_linear = self.add_lora_linear

    def update_metadata(self, *args: Any, **named: Any) -> None:
        self._update(*args, **named)
        tokens_of: dict[int, list[int]] = {}
        for token, slot in enumerate(self._wrapper.token_lora_indices.tolist()):
            if slot >= 0:
                tokens_of.setdefault(slot, []).append(token)
        self._groups = [(slot, _as_index(tokens)) for slot, tokens in tokens_of.items()]

    def add_lora_linear(
        self,
        y_TN: Tensor,
        x_TK: Tensor,
        a_S1RK: Sequence[Tensor],
        b_S1NR: Sequence[Tensor],
        scale: float,
        sizes: Sequence[int],
        **_: Any,
    ) -> None:
        """`sizes`: outputs of each of the joined layers."""
        assert scale == 1.0
        self.called.add(a_S1RK[0].data_ptr())
        for slot, index in self._groups:
            x_K = x_TK[index].float()
            begin = 0
            for a, b, size in zip(a_S1RK, b_S1NR, sizes, strict=True):
                added = x_K @ a[slot, 0].float().T @ b[slot, 0].float().T
                y = y_TN[:, begin : begin + size]
                y[index] += added  # rounded once
                begin += size


def _as_index(tokens: Sequence[int]) -> slice | Tensor:
    """A slice, which copies nothing, if the tokens are neighbours."""
    first, last = tokens[0], tokens[-1]
    return slice(first, last + 1) if last - first == len(tokens) - 1 else torch.tensor(tokens)
