"""Opens vLLM for a worker: starts vLLM's worker in this process, after the checks, and gives it a pool.

Nothing of vLLM's server and scheduler runs. Its loggers write to ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, shortened
from pdserve.core.types import Role
from pdserve.engine.load.checkpoint_files import checkpoint_hash
from pdserve.engine.load.weights import dummy_hash
from pdserve.engine.memory.host import free_bytes
from pdserve.engine.memory.plan import DeviceUse, MemoryPlan, PoolUnit, device_plan, plain_plan
from pdserve.engine.sampling.grammars import open_grammars
from pdserve.engine.vllm.adapters import AdapterSlots, wrap_linear_layers_only
from pdserve.engine.vllm.checks import LOADING_S, check, installed_version
from pdserve.engine.vllm.engine import Limits, VllmEngine, close_worker
from pdserve.engine.vllm.groups import Place, groups_of
from pdserve.engine.vllm.models import model_errors, widen
from pdserve.engine.vllm.pool import VllmPool, kv_scales, make_pool, spec_of
from pdserve.owned_folder import open_private
from pdserve.progress import PhaseReport

log = logging.getLogger(__name__)

_TURN_S: Final = 300.0  # to wait until another worker of the GPU has measured its memory

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
        place.minimum(0)  # The other ranks wait here for the turn: vLLM's groups, which come next, wait less long.
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
        spec = spec_of(config, vllm_config, worker, pool, unit, place.shard)
        device = pool.raw.device
        choices = (
            f"vllm {installed}",
            spec.dtype,
            str(vllm_config.model_config.quantization),
            *kv_scales(vllm_config),
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


def open_worker(config: WorkerConfig, vllm_config: Any, folder: Path, installed: str, place: Place, stored: int) -> Any:
    """vLLM's worker with its weights, of which the checkpoint has `stored` bytes. Raises ModelError."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    report, total = PhaseReport(config.worker_id, "weights", "bytes"), max(stored, 1)
    report(0, total)
    rank, backend = place.shard.rank, current_platform.dist_backend
    with groups_of(place, backend, LOADING_S + config.stall_s) as meeting, set_current_vllm_config(vllm_config):
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
            from pdserve.engine.vllm.loader import CheckedLoader

            CheckedLoader.on_read = staticmethod(lambda num_bytes: report(min(num_bytes, total - 1), total))
            with model_errors(folder, installed):
                worker.load_model()
            widen(worker.get_model(), vllm_config.model_config.dtype)
            current_platform.update_block_size_for_backend(vllm_config)
        except BaseException:
            close_worker(worker)
            raise
    report(total, total)
    return worker


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
    try:
        lock = open_private(path)
    except OSError as error:  # such as a file of that name that belongs to another user
        log.warning("workers of this GPU do not take turns", extra={"file": str(path), "why": str(error)})
        yield
        return
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
