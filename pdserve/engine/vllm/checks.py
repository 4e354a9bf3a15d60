"""Checks before any weights are read: vLLM's version and platform, the host, the settings, and the model's config.
Their result is vLLM's own config, from which `start.py` opens its worker.

As a program it tells `pdserve doctor` about this environment, and why it cannot serve a model.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from pdserve.bounded_file import MAX_JSON_BYTES, read_json_object
from pdserve.build import FULL_VERSION
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, ModelError, PdserveError, shortened
from pdserve.core.types import Role
from pdserve.engine.load.checkpoint_files import ALL_BITS, Checkpoint, open_checkpoint
from pdserve.engine.memory.plan import (
    with_device_defaults,
)
from pdserve.engine.vllm import PACKAGES, SUPPORTED_RANGE, is_supported
from pdserve.engine.vllm.adapters import check_adapters, lora_args
from pdserve.engine.vllm.models import check_head, check_modality, check_model, implied_fields, model_errors

log = logging.getLogger(__name__)

LOADING_S: Final = 120.0  # that one rank may load faster than another
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_QUANTISATION: Final = ("quantization_config", "compression_config")  # of config.json
#: Fields by which vLLM would read another model, maybe of the Hub, or another config than the one that is hashed.
_ELSEWHERE: Final = ("speculators_config", "configuration_files")
_CPU_BLOCK: Final = 32  # its attention kernels take multiples
_CPU_LATENT: Final = (512, 64)  # values of a token's latent and of its rotated key, for which its MLA has a kernel
_NUMA: Final = "libnuma.so.1"
_FEWEST_TOKENS: Final = 64  # of a step, whatever the settings: steps that warm up have 48
#: Set before vLLM is imported. The second version of its runner keeps other state between forward pass and sampling.
_ENVIRONMENT: Final = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the start, and never run
}


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
    if elsewhere := next((name for name in _ELSEWHERE if name in fields), None):
        raise ModelError(
            elsewhere, shortened(repr(fields[elsewhere]), 100), "nothing: only config.json decides the model"
        )
    check_quantisation(fields)
    checkpoint = open_checkpoint(folder, ALL_BITS) if config.load == "auto" else None
    check_modality(fields)
    with model_errors(folder, installed):
        vllm_config = make_config(config, fields, is_gpu=is_gpu)
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


# --- vLLM's config --------------------------------------------------------------------------------------------


def make_config(config: WorkerConfig, fields: Mapping[str, Any], *, is_gpu: bool) -> Any:
    """`fields`: of the model's config.json."""
    from vllm.engine.arg_utils import EngineArgs

    from pdserve.engine.vllm.loader import register

    drafted = 1 + (config.max_drafts if config.speculation == "ngram" else 0)
    loading_s = math.ceil(LOADING_S + config.stall_s)
    args = EngineArgs(
        model=config.model,
        hf_overrides=implied_fields(fields),
        dtype=_dtype(config, fields, is_gpu=is_gpu),
        kv_cache_dtype=config.kv_dtype,
        config_format="hf",  # vLLM prefers Mistral's params.json, which is not hashed
        load_format=register(is_random=config.load == "dummy"),
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


def _dtype(config: WorkerConfig, fields: Mapping[str, Any], *, is_gpu: bool) -> str:
    """On a CPU `auto` keeps float32, which vLLM's own `auto` would round. Most kernels for quantised weights compute
    only in half precision, so for these vLLM chooses."""
    if config.dtype != "auto" or is_gpu:
        return config.dtype
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    is_quantised = any(fields.get(name) for name in _QUANTISATION)
    return "float32" if stored == "float32" and not is_quantised else "auto"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe(sys.argv[1])) + "\n")
