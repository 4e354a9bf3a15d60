"""The KV pool of vLLM's layers: our allocation, so that every transport can read and write it, which vLLM divides.

vLLM keeps the caches of all layers in one allocation, and names the order of its dimensions by letters: L layers,
B blocks, H heads, N tokens, C the content of one head and token. If blocks are outermost, a block is one run of bytes
over all layers. If layers are, it is one run per layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch.overrides import TorchFunctionMode

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, InternalError, ModelError, shortened
from pdserve.core.kv.kv_shape import ITEM_BYTES
from pdserve.engine.interface import EngineSpec
from pdserve.engine.memory.host import HostMemory, free_bytes
from pdserve.engine.memory.plan import (
    PoolUnit,
    explicit_blocks,
    host_blocks,
)
from pdserve.engine.memory.pool import device_blocks
from pdserve.engine.model.parameters import Shard
from pdserve.engine.vllm import SUPPORTED
from pdserve.engine.vllm.groups import Place
from pdserve.model_source import model_name
from pdserve.progress import PhaseReport

_FLOATS: Final = ("float32", "bfloat16", "float16")
_LAYOUT_CHARS: Final = 64  # of the name of a layout
_SAME: Final = {"fp8": "fp8_e4m3"}  # kv_dtype
# Orders in which a page of one layer and block is one run of bytes, the most useful first.
_OUTERMOST_BLOCKS: Final = ("BLHNC", "BLNHC")
_OUTERMOST_LAYERS: Final = ("LBHNC", "LBNHC")
#: Backends that state only orders with layers outermost, but find blocks by their stride. Tried.
_READS_STRIDES: Final = frozenset({"CPU_ATTN"})
#: Backends that state no order, but view the whole cache of a layer as one matrix.
_VIEWS_LAYERS: Final = frozenset({"CPU_MLA", "AMX_MLA"})


def choose_layout(supported: Sequence[str], backends: Collection[str], *, is_gpu: bool = False) -> str | None:
    """The order of the pool: blocks outermost if the attention backends can read that. None if no order suits: on a GPU
    a block must be one run of bytes (kvtransfer/transports/common/registry.py)."""
    allowed = set(supported)
    if _VIEWS_LAYERS & set(backends):
        allowed -= set(_OUTERMOST_BLOCKS)
    elif set(backends) <= _READS_STRIDES and "LBHNC" in allowed:
        allowed.add("BLHNC")
    orders = _OUTERMOST_BLOCKS if is_gpu else (*_OUTERMOST_BLOCKS, *_OUTERMOST_LAYERS)
    return next((name for name in orders if name in allowed), None)


@final
class VllmPool:
    """`raw` is the whole pool as bytes: [num_blocks, block_bytes], or with one run per layer [runs, num_blocks,
    run_bytes]. On the CPU `buffer` is the same memory."""

    def __init__(self, num_blocks: int, block_bytes: int, runs_per_block: int, device: torch.device) -> None:
        self.num_blocks, self.block_bytes, self.runs_per_block = num_blocks, block_bytes, runs_per_block
        self.is_on_host = device.type == "cpu"
        self.descriptor: int | None = None
        self._buffer: memoryview | None = None
        num_bytes = num_blocks * block_bytes
        if self.is_on_host:
            self._memory = HostMemory(num_bytes)  # keeps the descriptor
            self._buffer, self.descriptor = self._memory.buffer, self._memory.descriptor
            flat = torch.frombuffer(self._buffer, dtype=torch.uint8)
        else:
            flat = device_blocks(num_blocks, block_bytes, device).view(-1)
        runs = [] if runs_per_block == 1 else [runs_per_block]
        self.raw = flat.view(*runs, num_blocks, block_bytes // runs_per_block)

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise InternalError(f"the KV pool lies on {self.raw.device}: it has no host buffer")
        return self._buffer

    def clear(self, blocks: Sequence[int]) -> None:
        """Clears whole blocks, so that attention, which reads whole blocks, meets no NaN of a previous request, and a
        transfer sends nothing of it."""
        if blocks:
            self.raw[..., torch.tensor(blocks, device=self.raw.device), :] = 0

    def give(self, allocate: Callable[[], None], caches: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Calls vLLM's `allocate`, whose one allocation becomes this pool. Raises InternalError unless all `caches` lie
        in it then."""
        with _Instead(self.raw):
            allocate()
        begin = self.raw.untyped_storage().data_ptr()
        if not all(cache.untyped_storage().data_ptr() == begin for cache in caches()):
            raise InternalError("vLLM allocated its KV cache elsewhere than in the worker's pool")


@final
class _Instead(TorchFunctionMode):
    """vLLM allocates all KV with one torch.zeros of bytes, which returns `raw` here."""

    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self._raw = raw.view(-1).view(torch.int8)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._raw.numel(),) and kwargs.get("dtype") == torch.int8:
            return self._raw
        return func(*args, **kwargs)


# --- its size, and its division ---------------------------------------------------------------------------------


def make_pool(
    config: WorkerConfig, vllm_config: Any, worker: Any, place: Place, *, is_gpu: bool, slot_bytes: int
) -> tuple[VllmPool, PoolUnit]:
    """Sizes the pool of this rank, and has vLLM divide it among its layers. All ranks have the same number of blocks.
    `slot_bytes`: of adapters, which a host allocates when they are used. Raises ConfigError and ModelError."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    cache = vllm_config.cache_config
    with set_current_vllm_config(vllm_config):
        specs = worker.get_kv_cache_spec()
        backends = _backends(vllm_config)
        supported = [str(getattr(one, "name", one)) for one in worker.get_supported_kv_cache_layouts()]
        layout = choose_layout(supported, backends.keys(), is_gpu=is_gpu)
        if layout is None:
            expected = f"an attention backend that stores a {'block' if is_gpu else 'page'} of KV as one run of bytes"
            raise ModelError("attention", ", ".join(sorted(backends)), expected)
        cache.kv_cache_layout = layout
        groups = get_kv_cache_groups(vllm_config, specs)
        if len(groups) != 1 or groups[0].kv_cache_spec.block_size != cache.block_size:
            expected = "one list of blocks for all layers: models with state besides KV are not served"
            raise ModelError("architectures", " ".join(vllm_config.model_config.architectures), expected)
        if layout.startswith("B"):
            check_block_size(cache.block_size, backends)
        sized = get_kv_cache_config_from_groups(vllm_config, groups, 2**40)  # only to read the size of a block
        block_bytes = sized.kv_cache_tensors[0].size // sized.num_blocks
        unit = PoolUnit(block_bytes=block_bytes, block_size=cache.block_size)
        report = PhaseReport(config.worker_id, "kernels", "steps")
        report(0, 2)
        room = worker.determine_available_memory()  # compiles
        report(1, 2)
        num_blocks = explicit_blocks(config.kv_blocks, config.kv_memory_bytes, unit)
        if num_blocks is None:
            num_blocks = (
                room // block_bytes if is_gpu else host_blocks(_free_for_each(place.shard.size), slot_bytes, unit)
            )
        num_blocks = place.minimum(num_blocks)
        if num_blocks < 1:
            raise ConfigError("gpu_memory_share", config.gpu_memory_share, f"room for a block of {block_bytes} bytes")
        parts = get_kv_cache_config_from_groups(vllm_config, groups, num_blocks * block_bytes)
        num_layers = sum(len(tensor.layers) for tensor in parts.kv_cache_tensors)
        pool = VllmPool(num_blocks, block_bytes, 1 if layout.startswith("B") else num_layers, worker.device)
        runner = worker.model_runner
        pool.give(lambda: worker.initialize_from_config(parts), lambda: runner.kv_caches)
        worker.compile_or_warm_up_model()
        report(2, 2)
    return pool, unit


def check_block_size(size: int, backends: Mapping[str, Any]) -> None:
    """Raises ConfigError unless all attention backends read blocks of this size. vLLM divides larger blocks for them
    only if layers are outermost."""
    from vllm.v1.worker.utils import select_common_block_size

    names = ", ".join(sorted(backends))
    try:
        common = select_common_block_size(size, list(backends.values()))
    except ValueError as error:
        expected = f"a size that the attention backends {names} read: {shortened(str(error), 300)}"
        raise ConfigError("block_size", size, expected) from error
    if common != size:
        raise ConfigError("block_size", size, f"{common}, the largest of its divisors that {names} reads at once")


def _free_for_each(num_ranks: int) -> int | None:
    """Memory of the host for the pool of each rank."""
    free = free_bytes()
    return None if free is None else free // num_ranks


def _attention_layers(vllm_config: Any) -> list[Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return list(get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values())


def _backends(vllm_config: Any) -> dict[str, Any]:
    """The classes of the attention layers, by name."""
    return {
        backend.get_name(): backend for backend in (one.get_attn_backend() for one in _attention_layers(vllm_config))
    }


# --- what other workers must know of it -------------------------------------------------------------------------


def spec_of(
    config: WorkerConfig, vllm_config: Any, worker: Any, pool: VllmPool, unit: PoolUnit, shard: Shard
) -> EngineSpec:
    """Names the layout by all that decides where a value lies in a block: the order, the backends, and the
    instructions for which a CPU's backend arranges keys."""
    model = vllm_config.model_config
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    kv_dtype = str(worker.model_runner.kv_caches[0].dtype).removeprefix("torch.")
    kv_dtype = kv_dtype if kv_dtype in _FLOATS else "uint8"  # bytes, whose format the layout names
    values = pool.block_bytes // ITEM_BYTES[kv_dtype] // unit.block_size
    num_layers, mine = len(groups[0].layer_names), model.get_num_kv_heads(vllm_config.parallel_config)
    num_heads = mine if shard.size == 1 or model.use_mla else model.get_total_num_kv_heads()
    if values % (num_layers * mine) or mine != max(1, num_heads // shard.size):  # layers of several shapes
        num_layers = num_heads = mine = 1
    context_tokens = min(model.max_model_len, pool.num_blocks * unit.block_size)
    return EngineSpec(
        model=model_name(config.model),
        weights_hash="",
        dtype=str(model.dtype).removeprefix("torch."),
        layout=_layout_name(vllm_config),
        vocab_size=model.get_vocab_size(),
        max_context_tokens=context_tokens,
        eos_token_ids=_eos_token_ids(model),
        block_size=unit.block_size,
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
        kv_dtype=kv_dtype,
        kv_layers=num_layers,
        kv_heads=num_heads,
        kv_head_dim=values // (num_layers * mine),
        tp_degree=shard.size,
        tp_rank=shard.rank,
        num_layers=pool.runs_per_block,
    )


def _layout_name(vllm_config: Any) -> str:
    layers = _attention_layers(vllm_config)
    instructions = {str(getattr(layer, "isa", "")) for layer in layers} - {""}
    # `auto` may also mean what the checkpoint says.
    kv_dtypes = {_SAME.get(one, one) for one in _kv_dtypes(layers)}
    order = vllm_config.cache_config.kv_cache_layout
    parts = [*sorted(_backends(vllm_config)), *sorted(instructions), order, *sorted(kv_dtypes)]
    name = f"vllm-{SUPPORTED[0]}.{SUPPORTED[1]}-{'-'.join(parts)}"
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in name)
    if len(name) > _LAYOUT_CHARS:  # a cut name would be equal to others
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        name = f"{name[: _LAYOUT_CHARS - 9]}-{digest}"
    return f"opaque.{name}"


def _kv_dtypes(layers: Sequence[Any]) -> set[str]:
    """That are not the model's dtype."""
    return {str(getattr(layer, "kv_cache_dtype", "auto")) for layer in layers} - {"auto"}


def kv_scales(vllm_config: Any) -> list[str]:
    """What a byte of quantised KV means in each layer: 1, or from the checkpoint, whose hash reads only samples."""
    return [
        f"{getattr(layer, '_k_scale_float', 1.0)!r} {getattr(layer, '_v_scale_float', 1.0)!r}"
        for layer in _attention_layers(vllm_config)
        if _kv_dtypes([layer])
    ]


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Of config.json and generation_config.json, as our own engine reads them."""
    found: set[int] = set()
    for value in (
        getattr(model.hf_text_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(one for one in found if 0 <= one < model.get_vocab_size()))
