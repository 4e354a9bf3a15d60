"""Opens vLLM for a worker: checks its version, its platform and the model before any weights are read, starts vLLM's
worker in this process, and gives it a pool.

Nothing of vLLM's server and scheduler runs. Its loggers write to ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from pdserve.bounded_file import MAX_JSON_BYTES, read_json_object
from pdserve.build import FULL_VERSION
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, ModelError, PdserveError, shortened
from pdserve.core.kv.kv_shape import ITEM_BYTES
from pdserve.core.types import Role
from pdserve.engine.interface import EngineSpec
from pdserve.engine.load.checkpoint_files import ALL_BITS, Checkpoint, checkpoint_hash, open_checkpoint
from pdserve.engine.load.weights import dummy_hash
from pdserve.engine.memory.host import free_bytes
from pdserve.engine.memory.plan import (
    DeviceUse,
    MemoryPlan,
    PoolUnit,
    device_plan,
    explicit_blocks,
    host_blocks,
    plain_plan,
    with_device_defaults,
)
from pdserve.engine.model.parameters import Shard
from pdserve.engine.sampling.grammars import open_grammars
from pdserve.engine.vllm import PACKAGES, SUPPORTED, SUPPORTED_RANGE, is_supported
from pdserve.engine.vllm.adapters import AdapterSlots, check_adapters, lora_args, wrap_linear_layers_only
from pdserve.engine.vllm.engine import Limits, VllmEngine, close_worker
from pdserve.engine.vllm.groups import Place, groups_of
from pdserve.engine.vllm.models import (
    check_head,
    check_modality,
    check_model,
    checked_before_weights,
    model_errors,
    widen,
)
from pdserve.engine.vllm.pool import VllmPool, choose_layout
from pdserve.model_source import model_name
from pdserve.progress import PhaseReport

log = logging.getLogger(__name__)

_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_FLOATS: Final = ("float32", "bfloat16", "float16")
_QUANTISATION: Final = ("quantization_config", "compression_config")  # of config.json
_LAYOUT_CHARS: Final = 64  # of the name of a layout
_SAME: Final = {"fp8": "fp8_e4m3"}  # kv_dtype
_CPU_BLOCK: Final = 32  # its attention kernels take multiples
_CPU_LATENT: Final = (512, 64)  # values of a token's latent and of its rotated key, for which its MLA has a kernel
_NUMA: Final = "libnuma.so.1"
_TURN_S: Final = 300.0  # to wait until another worker of the GPU has measured its memory
_LOADING_S: Final = 120.0  # that one rank may load faster than another
_FEWEST_TOKENS: Final = 64  # of a step, whatever the settings: steps that warm up have 48
#: Set before vLLM is imported. The second version of its runner keeps other state between forward pass and sampling.
_ENVIRONMENT: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the start, and never run
}

#: vLLM reads the attributes of every imported module when it replaces kernels, and fails at an object of this one.
_UNREADABLE: Final = "llvmlite.binding.ffi"


def open_vllm(config: WorkerConfig, role: Role) -> VllmEngine:
    """Of one rank. Raises ConfigError if the settings or the environment do not suit vLLM, ModelError if it cannot
    serve the model."""
    engine = open_rank(config, role, Place())
    try:
        with model_errors(Path(config.model), installed_version()):
            engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def open_rank(config: WorkerConfig, role: Role, place: Place) -> VllmEngine:
    """Every rank of a worker opens its part at the same time. Its first steps, which compile, come afterwards."""
    began_s = time.monotonic()
    importing = PhaseReport(config.worker_id, "vllm", "imports")
    importing(0, 1)
    checked = check(config, role)
    config, vllm_config, is_gpu = checked.config, checked.vllm_config, checked.is_gpu
    folder, checkpoint, installed = checked.folder, checked.checkpoint, checked.installed
    if config.threads > 0 and not is_gpu:
        torch.set_num_threads(config.threads)  # vLLM's CPU worker forbids it later
    _prepare_process()
    importing(1, 1)
    stored = 0 if checkpoint is None else sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    with start_turn(is_gpu=is_gpu, rank=place.shard.rank):
        worker = open_worker(config, vllm_config, folder, installed, place, stored)
        try:
            adapters = AdapterSlots(config, worker.model_runner, is_gpu=is_gpu) if config.serves_adapters else None
            slot_bytes = adapters.num_bytes if adapters else 0
            with model_errors(folder, installed):  # it compiles
                pool, unit = make_pool(config, vllm_config, worker, place, is_gpu=is_gpu, slot_bytes=slot_bytes)
        except BaseException:
            close_worker(worker)
            raise
    try:
        spec = _spec(config, vllm_config, worker, pool, unit, place.shard)
        device = pool.raw.device
        choices = (
            f"vllm {installed}",
            spec.dtype,
            str(vllm_config.model_config.quantization),
            *_kv_scales(vllm_config),
        )
        weights_hash = (
            checkpoint_hash(folder, checkpoint, *choices) if checkpoint else dummy_hash(folder, device, *choices)
        )
        spec = replace(spec, weights_hash=weights_hash)
        limits = Limits(
            rows=vllm_config.scheduler_config.max_num_seqs, tokens=vllm_config.scheduler_config.max_num_batched_tokens
        )
        engine = VllmEngine(spec, pool, open_grammars(folder, spec), vllm_config, worker, limits, adapters)
    except BaseException:
        close_worker(worker)
        raise
    if is_gpu:
        engine.memory = device_memory(worker, pool, unit, config.gpu_memory_share)
    else:
        engine.memory = plain_plan(str(device), free_bytes(), stored + slot_bytes, pool.num_blocks, unit)
    log.info(
        "model loaded",
        extra={
            "model": spec.model,
            "engine": f"vllm {installed}",
            "dtype": spec.dtype,
            "device": str(device),
            "kv_layout": spec.layout,
            "kv_blocks": spec.num_blocks,
            "block_size": spec.block_size,
            "load_s": round(time.monotonic() - began_s, 3),
        },
    )
    return engine


# --- checks before any weights are read -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings with vLLM's defaults, for a model that vLLM serves here. `checkpoint` is None with random weights."""

    config: WorkerConfig
    vllm_config: Any
    folder: Path
    checkpoint: Checkpoint | None
    installed: str
    is_gpu: bool


def check(config: WorkerConfig, role: Role) -> Checked:
    """Raises ConfigError and ModelError as `open_vllm`."""
    installed = installed_version()
    check_settings(config)
    os.environ.update(_ENVIRONMENT)
    # Its warnings are about settings that it was given here, or about its own server.
    logging.getLogger("vllm").setLevel(logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.ERROR)
    from vllm.platforms import current_platform

    is_gpu = check_platform(config, current_platform)
    if not is_gpu:
        check_host(config)
    config = with_device_defaults(config, role, is_gpu=is_gpu)
    folder = Path(config.model)
    fields = read_json_object(folder / "config.json", MAX_JSON_BYTES) or {}
    check_quantisation(fields)
    checkpoint = open_checkpoint(folder, ALL_BITS) if config.load == "auto" else None
    check_modality(fields)
    with model_errors(folder, installed):
        vllm_config = make_config(config, is_gpu=is_gpu)
    check_model(vllm_config.model_config)
    if checkpoint is not None:
        check_head(checkpoint.tensors, vllm_config.model_config)
    check_adapters(config, vllm_config.model_config, is_gpu=is_gpu)
    kv_dtype = str(vllm_config.cache_config.cache_dtype)  # also of a checkpoint with scales of KV
    if kv_dtype != "auto" and not is_gpu:
        check_rounded_kv(kv_dtype, vllm_config.model_config)
    if vllm_config.model_config.is_deepseek_mla and not is_gpu:
        if vllm_config.model_config.use_mla:  # unless VLLM_MLA_DISABLE=1
            check_latents(vllm_config.model_config)
        # vLLM's CPU kernel takes each head of a query for a token where heads have a dimension of their own, as here.
        vllm_config.compilation_config.custom_ops.append("-rotary_embedding")
    return Checked(config, vllm_config, folder, checkpoint, installed, is_gpu)


def describe(model: str) -> dict[str, str]:
    """What `pdserve doctor` asks of this environment: version, build, and why it cannot serve `model`, if one is given.
    Without a model, vLLM is not imported."""
    found = {"pdserve": FULL_VERSION}
    try:
        found |= {"vllm": installed_version(), "build": installed_build()}
        if model:
            check(WorkerConfig(model=model, worker_id="doctor"), Role.DECODE)
    except PdserveError as error:
        found |= {"error": str(error), "about": "model" if isinstance(error, ModelError) else "vllm"}
    return found


def installed_version() -> str:
    """Raises ConfigError without a supported vLLM."""
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found = version(package)
            if not is_supported(found):
                raise ConfigError("engine", f"vllm, in version {found}", f"{SUPPORTED_RANGE}: `make vllm-env`")
            return found
    expected = f"{SUPPORTED_RANGE} in this Python: run `make vllm-env`, and set worker.engine_python to its python"
    raise ConfigError("engine", "vllm, which is not installed", expected)


def installed_build() -> str:
    """What the installed vLLM is built for, by which vLLM itself decides."""
    with contextlib.suppress(PackageNotFoundError):
        return "CPUs" if "cpu" in version("vllm") else "GPUs"
    return "CPUs"


def check_settings(config: WorkerConfig) -> None:
    """Raises ConfigError for a setting that only our own engine has."""
    if config.dtype not in _DTYPES:
        expected = f"{', '.join(_DTYPES)}: vLLM reads checkpoints that are stored quantised, and rounds none at load"
        raise ConfigError("dtype", config.dtype, expected)
    if config.kv_dtype not in _KV_DTYPES:
        raise ConfigError("kv_dtype", config.kv_dtype, f"{' or '.join(_KV_DTYPES)} with the engine vllm")
    if config.deterministic == "on":
        raise ConfigError(
            "deterministic", "on", "auto or off: vLLM's logits may depend on the batch in their last bits"
        )
    if config.tensor_parallel > 1 and config.serves_adapters:
        raise ConfigError("tensor_parallel", config.tensor_parallel, "1 with LoRA adapters, which ranks do not load")
    if config.rendezvous:
        raise ConfigError("rendezvous", config.rendezvous, "none with the engine vllm, whose ranks run on one host")


def check_platform(config: WorkerConfig, platform: Any) -> bool:
    """Whether vLLM computes on a GPU. Raises ConfigError if that is not the device of the settings."""
    if not platform.is_cpu() and not platform.is_cuda():
        found = f"vllm for {platform.device_type}" if platform.device_type else "vllm for CUDA, which finds no GPU"
        raise ConfigError("engine", found, "vLLM's build for CPUs, or for CUDA on a host with its driver and a GPU")
    is_gpu = bool(platform.is_cuda())
    if config.device not in ("auto", "cuda" if is_gpu else "cpu"):
        built = "CUDA" if is_gpu else "CPUs"
        raise ConfigError("device", config.device, f"auto: the vLLM of this environment is built for {built}")
    return is_gpu


def check_host(config: WorkerConfig) -> None:
    """Raises ConfigError if this host lacks something that vLLM's build for CPUs needs and no Python package brings."""
    if shutil.which("lscpu") is None:
        raise ConfigError(
            "engine", "vllm without the program lscpu", "util-linux installed, with which vLLM finds cores"
        )
    try:
        ctypes.CDLL(_NUMA)
    except OSError:
        raise ConfigError("engine", f"vllm without the library {_NUMA}", "it installed (Debian: libnuma1)") from None
    if config.cuda_graphs and shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        expected = (
            f"a C++ compiler (Debian: g++, or set CXX), which is not found as {compiler}; or false, which is slower"
        )
        raise ConfigError("cuda_graphs", True, expected)


def check_quantisation(fields: Mapping[str, Any]) -> None:
    """Raises ModelError for values in config.json that vLLM computes with before it checks them."""
    for name in _QUANTISATION:
        settings = fields.get(name)
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise ModelError(name, shortened(repr(settings), 100), "an object with quant_method")
        if settings.get("quant_method") in ("gptq", "awq"):
            for key in ("bits", "w_bit", "group_size", "q_group_size"):
                value = settings.get(key, 1)
                if type(value) is not int or not (value == -1 or 0 < value <= 2**20):
                    raise ModelError(
                        f"{name}.{key}", repr(value), "a positive number, or -1 for one group of all inputs"
                    )


def check_rounded_kv(kv_dtype: str, model: Any) -> None:
    """Raises ConfigError for KV that vLLM's attention on a CPU cannot store."""
    size = model.get_head_size()
    if model.use_mla:
        raise ConfigError("kv_dtype", kv_dtype, "auto: vLLM's MLA on a CPU stores KV in the model's dtype")
    if kv_dtype not in _KV_DTYPES:
        raise ConfigError("kv_dtype", kv_dtype, f"one of {', '.join(_KV_DTYPES)} on a CPU")
    if not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported():
        raise ConfigError("kv_dtype", kv_dtype, "auto, and a checkpoint without scales of KV: fp8 needs AVX-512")
    if size % 32:
        raise ConfigError(
            "kv_dtype", kv_dtype, f"auto: vLLM's fp8 on a CPU needs heads of a multiple of 32, not {size}"
        )


def check_latents(model: Any) -> None:
    """Raises ModelError for a model with MLA that vLLM's attention on a CPU cannot compute."""
    latent, rotated = (getattr(model.hf_text_config, field, None) for field in ("kv_lora_rank", "qk_rope_head_dim"))
    if (latent, rotated) != _CPU_LATENT:
        expected = f"{' and '.join(map(str, _CPU_LATENT))}, the only sizes of MLA that vLLM computes on a CPU"
        raise ModelError("kv_lora_rank and qk_rope_head_dim", f"{latent} and {rotated}", expected)


# --- vLLM's worker --------------------------------------------------------------------------------------------


def make_config(config: WorkerConfig, *, is_gpu: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from pdserve.engine.vllm.loader import register

    drafted = 1 + (config.max_drafts if config.speculation == "ngram" else 0)
    loading_s = math.ceil(_LOADING_S + config.stall_s)
    args = EngineArgs(
        model=config.model,
        dtype=_dtype(config, is_gpu=is_gpu),
        kv_cache_dtype=config.kv_dtype,
        load_format="dummy" if config.load == "dummy" else register(),
        skip_tokenizer_init=True,
        max_model_len=config.max_context_tokens or None,
        block_size=block_size(config, is_gpu=is_gpu),
        max_num_seqs=config.max_batch,
        max_num_batched_tokens=max(config.max_batch_tokens + config.max_batch * drafted, _FEWEST_TOKENS),
        enforce_eager=not config.cuda_graphs,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="mp" if config.tensor_parallel > 1 else None,  # only a name here
        distributed_timeout_seconds=loading_s,
        cpu_distributed_timeout_seconds=loading_s,
        gpu_memory_utilization=config.gpu_memory_share,
        # On a CPU any value: it only keeps vLLM from measuring. On a GPU vLLM measures, unless the size is given.
        kv_cache_memory_bytes=2**20 if not is_gpu or config.kv_blocks or config.kv_memory_bytes else None,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=True,  # one list of blocks for all layers
        disable_log_stats=True,
        **lora_args(config),
        use_tqdm_on_load=False,
    )
    return args.create_engine_config()


def block_size(config: WorkerConfig, *, is_gpu: bool) -> int | None:
    """None leaves the choice to vLLM: on a GPU a given size excludes attention backends that read another one, such as
    FlashMLA, which reads blocks of 64 tokens."""
    if is_gpu:
        default = WorkerConfig.__dataclass_fields__["block_size"].default
        return None if config.block_size == default else config.block_size
    return -(-config.block_size // _CPU_BLOCK) * _CPU_BLOCK


def _dtype(config: WorkerConfig, *, is_gpu: bool) -> str:
    """On a CPU `auto` keeps float32, which vLLM's own `auto` would round. Most kernels for quantised weights compute
    only in half precision, so for these vLLM chooses."""
    if config.dtype != "auto" or is_gpu:
        return config.dtype
    fields = read_json_object(Path(config.model) / "config.json", MAX_JSON_BYTES) or {}
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    is_quantised = any(fields.get(name) for name in _QUANTISATION)
    return "float32" if stored == "float32" and not is_quantised else "auto"


def open_worker(config: WorkerConfig, vllm_config: Any, folder: Path, installed: str, place: Place, stored: int) -> Any:
    """vLLM's worker with its weights, of which the checkpoint has `stored` bytes. Raises ModelError."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    report, total = PhaseReport(config.worker_id, "weights", "bytes"), max(stored, 1)
    report(0, total)
    rank, backend = place.shard.rank, current_platform.dist_backend
    with groups_of(place, backend, _LOADING_S + config.stall_s) as meeting, set_current_vllm_config(vllm_config):
        worker = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)(
            vllm_config=vllm_config,
            local_rank=rank,
            rank=rank,
            distributed_init_method=meeting,
            is_driver_worker=rank == 0,
        )
        try:
            try:
                worker.init_device()
            except ValueError as error:  # too little free memory, or a GPU without bfloat16
                reason = shortened(str(error).splitlines()[0], 400)
                found = f"{config.device}, with gpu_memory_share {config.gpu_memory_share:g} and dtype {config.dtype}"
                raise ConfigError("device", found, f"a device that vLLM {installed} can use: {reason}") from error
            if vllm_config.lora_config is not None:
                wrap_linear_layers_only(worker.model_runner)
            counted = _counted(lambda done: report(min(done, total - 1), total))
            with model_errors(folder, installed), checked_before_weights(vllm_config), counted:
                worker.load_model()
            widen(worker.get_model(), vllm_config.model_config.dtype)
            current_platform.update_block_size_for_backend(vllm_config)
        except BaseException:
            close_worker(worker)
            raise
    report(total, total)
    return worker


@contextlib.contextmanager
def _counted(count: Callable[[int], None]) -> Iterator[None]:
    """Calls `count` with the bytes of the checkpoint's tensors that vLLM's loader has passed on."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    read = DefaultModelLoader.get_all_weights

    def get_all_weights(loader: Any, *args: Any) -> Iterator[Any]:
        done = 0
        for name, tensor in read(loader, *args):
            yield name, tensor
            done += tensor.nbytes
            count(done)

    DefaultModelLoader.get_all_weights = get_all_weights
    try:
        yield
    finally:
        DefaultModelLoader.get_all_weights = read


@functools.cache
def _prepare_process() -> None:
    """What vLLM does once before it makes a worker."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    current_platform.import_kernels()
    load_general_plugins()
    with _hidden(_UNREADABLE), warnings.catch_warnings(action="ignore", category=FutureWarning):
        current_platform.register_triton_kernel_overrides()


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Removes a module from the list of modules for a while."""
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


# --- pool -----------------------------------------------------------------------------------------------------


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


def device_memory(worker: Any, pool: VllmPool, unit: PoolUnit, share: float) -> MemoryPlan:
    """As vLLM's worker measured it; without a measurement, if the settings have the size of the pool."""
    device, total = str(pool.raw.device), worker.init_snapshot.total_memory
    weights = int(worker.model_runner.model_memory_usage)
    if not hasattr(worker, "total_consumed"):
        return plain_plan(device, total, weights, pool.num_blocks, unit)
    graphs = worker.cudagraph_memory_estimate
    use = DeviceUse(
        device=device,
        total=total,
        free=worker.init_snapshot.free_memory - weights,
        weights=weights,
        activations=max(0, worker.peak_activation_memory - graphs),
        graphs=graphs,
        runtime=max(0, worker.total_consumed - weights),
    )
    return device_plan(use, share, pool.num_blocks, unit)


@contextlib.contextmanager
def start_turn(*, is_gpu: bool, rank: int) -> Iterator[None]:
    """One worker of a GPU at a time, for as long as it loads and measures: vLLM takes for its own all memory that the
    GPU loses in the meantime. Goes on after a while, because a start that takes too long is ended.

    Rank 0 takes the turn for all ranks of its worker, which wait for each other while they load."""
    if not is_gpu or rank > 0:
        yield
        return
    from vllm.platforms import current_platform

    path = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}-{current_platform.get_device_uuid()}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + _TURN_S
        while time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        else:
            log.warning("another worker still loads on this GPU", extra={"waited_s": _TURN_S})
        yield
    finally:
        os.close(lock)


def _spec(
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


def _kv_scales(vllm_config: Any) -> list[str]:
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe(sys.argv[1])) + "\n")
